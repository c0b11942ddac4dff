"""One sequence of MLA decode in plain torch: right in several ways (RIGHT), wrong in many (BUGS).

A variant takes the operands and a sequence, and gives its output [heads, 512] in fp32. How far over its limit
the judge finds each bug is printed by `pytest -s tests/kernels/mla_decode/test_check.py`; nearest are weights
rounded to fp8, 5 times over, and a row of zeros counted as a token, 7 times. Rounded scores are
a border line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH

Variant = Callable[[MlaDecodeOperands, int], torch.Tensor]
SPLITS = 4


# The steps


def slots_of(o: MlaDecodeOperands, i: int, length: int) -> torch.Tensor:
    """Where the first `length` tokens lie by the page table; may go past the sequence's end."""
    token = torch.arange(length)
    return o.page_table[i, token // o.page].long() * o.page + token % o.page


def rows(o: MlaDecodeOperands, slots: torch.Tensor) -> torch.Tensor:
    return o.kv.view(-1, WIDTH)[slots].float() * o.kv_scale


def scores_of(o: MlaDecodeOperands, i: int, kv: torch.Tensor) -> torch.Tensor:
    return o.q[i].float() @ kv.T * o.scale


def attend(
    o: MlaDecodeOperands, i: int, slots: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """The right answer, unless it is given other slots, or a factor on the softmax scale."""
    kv = rows(o, o.token_slots(i) if slots is None else slots)
    return (scores_of(o, i, kv) * scale).softmax(-1) @ kv[:, :LATENT]


def partials(
    o: MlaDecodeOperands, i: int, weights: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split-KV before its combine. Of each part of the sequence the highest score [splits, heads, 1], the sum
    of the weights [splits, heads, 1], and the product, not normalised [splits, heads, 512], which takes the
    weights rounded to a dtype."""
    kv = rows(o, o.token_slots(i))
    found = []
    for part in torch.arange(len(kv)).chunk(SPLITS):
        scores = scores_of(o, i, kv[part])
        peak = scores.amax(-1, keepdim=True)
        exponentials = (scores - peak).exp()
        product = exponentials.to(weights).float() @ kv[part, :LATENT]
        found.append((peak, exponentials.sum(-1, keepdim=True), product))
    peaks, sums, products = map(torch.stack, zip(*found, strict=True))
    return peaks, sums, products


# Right


def split_kv(
    o: MlaDecodeOperands,
    i: int,
    weights: torch.dtype = torch.float32,
    partial_results: torch.dtype = torch.float32,
) -> torch.Tensor:
    peaks, sums, products = partials(o, i, weights)
    results = (products / sums).to(partial_results).float()
    share = (peaks + sums.log()).softmax(0)
    return (share * results).sum(0)


def normalised_first(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Weights are rounded to bf16 after their normalisation, so that they no longer sum to 1."""
    kv = rows(o, o.token_slots(i))
    return scores_of(o, i, kv).softmax(-1).bfloat16().float() @ kv[:, :LATENT]


RIGHT: dict[str, Variant] = {
    "attend": attend,
    "split_kv": split_kv,
    "split_kv, bf16 weights": partial(split_kv, weights=torch.bfloat16),
    "split_kv, bf16 weights and partial results": partial(
        split_kv, weights=torch.bfloat16, partial_results=torch.bfloat16
    ),
    "normalised_first": normalised_first,
}


# Right where a call may round q and the softmax weights to FP8 as well


def fp8_products(
    o: MlaDecodeOperands,
    i: int,
    q_scale: float = 1.0,
    splits: int = 1,
    sum_of_rounded: bool = False,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """q over q_scale and the weights below 1 of each split in the cache's format. As AITER's
    op_tests/test_mla_persistent.py computes it, and with the sum of the rounded weights instead."""
    q = (o.q[i].float() / q_scale).to(o.kv.dtype).float() * q_scale
    kv = rows(o, o.token_slots(i) if slots is None else slots)
    found = []
    for part in torch.arange(len(kv)).chunk(splits):
        scores = q @ kv[part].T * o.scale
        peak = scores.amax(-1, keepdim=True)
        exponentials = (scores - peak).exp()
        rounded = exponentials.to(o.kv.dtype).float()
        total = (rounded if sum_of_rounded else exponentials).sum(-1, keepdim=True)
        found.append((peak + total.log(), rounded @ kv[part, :LATENT] / total))
    log_sums, results = map(torch.stack, zip(*found, strict=True))
    return (log_sums.softmax(0) * results).sum(0)


RIGHT_IN_FP8: dict[str, Variant] = {
    "fp8 products": fp8_products,
    "fp8 products, q scaled": partial(fp8_products, q_scale=0.3),
    "fp8 products, sum of rounded weights": partial(fp8_products, sum_of_rounded=True),
    "fp8 products in splits": partial(fp8_products, splits=SPLITS),
}


# Wrong tokens


def last_page_dropped(o, i):
    return attend(o, i, o.token_slots(i)[: (o.host_lengths[i] - 1) // o.page * o.page])


def page_dropped(o, i, page):
    slots = o.token_slots(i)
    return attend(o, i, torch.cat([slots[: page * o.page], slots[(page + 1) * o.page :]]))


def page_read_twice(o, i):
    """The page in the middle is taken for the one before it."""
    slots = o.token_slots(i).clone()
    middle = len(slots) // o.page // 2 * o.page
    slots[middle : middle + o.page] = slots[middle - o.page : middle].clone()
    return attend(o, i, slots)


def length_one_short(o, i):
    return attend(o, i, o.token_slots(i)[:-1])


def first_token_skipped(o, i):
    return attend(o, i, o.token_slots(i)[1:])


def length_one_long(o, i):
    return attend(o, i, slots_of(o, i, o.host_lengths[i] + 1))


def length_one_long_read_as_zeros(o, i):
    """The load is masked by the length, the score is not."""
    kv = torch.cat([rows(o, o.token_slots(i)), torch.zeros(1, WIDTH)])
    return scores_of(o, i, kv).softmax(-1) @ kv[:, :LATENT]


def unused_slots_leak(o, i):
    """Their weight is 0, their value NaN."""
    length, most = o.host_lengths[i], o.page_table.shape[1] * o.page
    kv = rows(o, slots_of(o, i, most))
    scores = scores_of(o, i, kv).masked_fill(torch.arange(most) >= length, float("-inf"))
    return scores.softmax(-1) @ kv[:, :LATENT]


def page_table_stride_one_short(o, i):
    """The padding of the table's rows is forgotten."""
    length, stride = o.host_lengths[i], o.page_table.shape[1] - 1
    token = torch.arange(length)
    pages = o.page_table.flatten()[i * stride + token // o.page].long()
    return attend(o, i, pages * o.page + token % o.page)


# Wrong arithmetic


def scale_of_576(o, i):
    return attend(o, i, scale=(192 / 576) ** 0.5)


def scale_5_percent_high(o, i):
    return attend(o, i, scale=1.05)


def scale_5_percent_low(o, i):
    return attend(o, i, scale=0.95)


def rope_forgotten(o, i):
    kv = rows(o, o.token_slots(i))
    return (o.q[i, :, :LATENT].float() @ kv[:, :LATENT].T * o.scale).softmax(-1) @ kv[:, :LATENT]


def partials_averaged(o, i):
    _, sums, products = partials(o, i)
    return (products / sums).mean(0)


def partials_summed_without_rescaling(o, i):
    _, sums, products = partials(o, i)
    return products.sum(0) / sums.sum(0)


def kv_in_fp16(o, i):
    kv = rows(o, o.token_slots(i)).half().float()
    return scores_of(o, i, kv).softmax(-1) @ kv[:, :LATENT]


def scores_in_bf16(o, i):
    """Wrong where softmax is peaked, so not among BUGS."""
    kv = rows(o, o.token_slots(i))
    return scores_of(o, i, kv).bfloat16().float().softmax(-1) @ kv[:, :LATENT]


def weights_in_fp8(o, i):
    kv = rows(o, o.token_slots(i))
    weights = (scores := scores_of(o, i, kv)).sub(scores.amax(-1, keepdim=True)).exp()
    return weights.to(torch.float8_e4m3fn).float() @ kv[:, :LATENT] / weights.sum(-1, keepdim=True)


def kv_scale_ignored(o, i):
    kv = rows(o, o.token_slots(i)) / o.kv_scale
    return scores_of(o, i, kv).softmax(-1) @ kv[:, :LATENT]


def kv_scale_ignored_in_scores(o, i):
    return attend(o, i, scale=1 / o.kv_scale)


def kv_scale_ignored_in_values(o, i):
    return attend(o, i) / o.kv_scale


# Wrong places


def value_from_last_512_columns(o, i):
    kv = rows(o, o.token_slots(i))
    return scores_of(o, i, kv).softmax(-1) @ kv[:, WIDTH - LATENT :]


def value_written_with_stride_576(o, i):
    kv = rows(o, o.token_slots(i))
    product = scores_of(o, i, kv).softmax(-1) @ kv
    return product.flatten()[: len(product) * LATENT].view(-1, LATENT)


def head_given_to_another(o, i):
    out = attend(o, i)
    out[1] = out[0]
    return out


def sequence_given_to_another(o, i):
    return attend(o, i - 1)


def row_never_written(o, i):
    out = attend(o, i)
    out[-1] = float("nan")
    return out


BUGS: tuple[Variant, ...] = (
    last_page_dropped,
    page_read_twice,
    length_one_short,
    first_token_skipped,
    length_one_long,
    length_one_long_read_as_zeros,
    unused_slots_leak,
    page_table_stride_one_short,
    scale_of_576,
    scale_5_percent_high,
    scale_5_percent_low,
    rope_forgotten,
    partials_averaged,
    partials_summed_without_rescaling,
    kv_in_fp16,
    weights_in_fp8,
    kv_scale_ignored,
    kv_scale_ignored_in_scores,
    kv_scale_ignored_in_values,
    value_from_last_512_columns,
    value_written_with_stride_576,
    head_given_to_another,
    sequence_given_to_another,
    row_never_written,
)


def last_page_dropped_in_fp8(o, i):
    return fp8_products(o, i, slots=o.token_slots(i)[: (o.host_lengths[i] - 1) // o.page * o.page])


def q_scale_ignored(o, i):
    """As q in the wrong of the two formats gives: its bits mean half or twice as much."""
    return fp8_products(o.replaced(scale=o.scale * 2), i)


def q_scale_5_fold(o, i):
    return fp8_products(o.replaced(scale=o.scale / 5), i)


def kv_scale_ignored_in_fp8(o, i):
    return fp8_products(o.replaced(kv_scale=1.0), i)


def kv_scale_ignored_in_values_in_fp8(o, i):
    return fp8_products(o, i) / o.kv_scale


def kv_scale_twice_as_large(o, i):
    return fp8_products(o.replaced(kv_scale=2 * o.kv_scale), i)


def rope_forgotten_in_fp8(o, i):
    q = o.q.clone()
    q[..., LATENT:] = 0
    return fp8_products(o.replaced(q=q), i)


BUGS_IN_FP8: tuple[Variant, ...] = (
    last_page_dropped_in_fp8,
    q_scale_ignored,
    q_scale_5_fold,
    kv_scale_ignored_in_fp8,
    kv_scale_ignored_in_values_in_fp8,
    kv_scale_twice_as_large,
    rope_forgotten_in_fp8,
    value_from_last_512_columns,
    head_given_to_another,
    sequence_given_to_another,
)

# Bugs with one kind of cache only: fp16 holds every e4m3 value, and a bf16 cache has the scale 1.
ONLY_WITH: dict[Variant, str] = {
    kv_in_fp16: "bf16",
    kv_scale_ignored: "fp8",
    kv_scale_ignored_in_scores: "fp8",
    kv_scale_ignored_in_values: "fp8",
}
