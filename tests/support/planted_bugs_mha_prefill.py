"""Rows of one sequence of MHA prefill in plain torch: right in several ways (RIGHT), wrong in many (BUGS).

A variant takes the operands, a sequence and some of its new tokens (a range), and gives their output
[rows, heads, 128] in fp32. How far over its limit the judge finds each bug is printed by
`pytest -s tests/kernels/mha_prefill/test_check.py`; nearest are one row of zeros counted as a key and weights
rounded to fp8, 4 times over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence
from kernels.mha_prefill.sizes import NOPE, VALUE

Variant = Callable[[MhaPrefillOperands, Sequence, range], torch.Tensor]
BLOCK = 64


# The steps


def beyond(tensor: torch.Tensor) -> torch.Tensor:
    """The same tokens with the guards before and behind them, as a stray pointer sees them."""
    stride = tensor.stride(0)
    shape = (tensor.shape[0] + 2 * GUARD, *tensor.shape[1:])
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset() - GUARD * stride)


def queries(o: MhaPrefillOperands, s: Sequence, rows: range) -> torch.Tensor:
    return o.q[s.queries][rows.start : rows.stop].float().transpose(0, 1)


def keys(o: MhaPrefillOperands, s: Sequence, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [heads, n, ...] of these keys of the sequence, int64 [n]; may go past its ends."""
    at = GUARD + s.keys.start + index
    return tuple(beyond(t)[at].float().transpose(0, 1) for t in (o.k, o.v))


def last_of(s: Sequence, rows: range) -> torch.Tensor:
    """The last key that each row sees, [rows, 1]."""
    return s.prefix + torch.tensor(list(rows))[:, None]


def attend(
    o: MhaPrefillOperands,
    s: Sequence,
    rows: range,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    scale: float = 1.0,
    heard: slice = slice(None),
) -> torch.Tensor:
    """The right answer, unless it is given other keys, or which of them each row sees [rows, n], a factor on
    the softmax scale, or the part of q and k to multiply."""
    index = torch.arange(s.prefix + rows.stop) if index is None else index
    seen = index <= last_of(s, rows) if seen is None else seen
    k, v = keys(o, s, index)
    scores = queries(o, s, rows)[..., heard] @ k[..., heard].transpose(1, 2) * (o.scale * scale)
    return product(scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def product(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (weights @ v).transpose(0, 1)


def scores_of(o: MhaPrefillOperands, s: Sequence, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [heads, rows, keys], and v [heads, keys, 128]."""
    index = torch.arange(s.prefix + rows.stop)
    k, v = keys(o, s, index)
    scores = queries(o, s, rows) @ k.transpose(1, 2) * o.scale
    return scores.masked_fill(index > last_of(s, rows), -math.inf), v


# Right


def flash(
    o: MhaPrefillOperands,
    s: Sequence,
    rows: range,
    weights: torch.dtype = torch.bfloat16,
    sums_rounded: bool = False,
    rescaled: bool = True,
    accumulator: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Block by block, with the highest score so far."""
    scores, v = scores_of(o, s, rows)
    peak = torch.full((*scores.shape[:2], 1), -math.inf)
    total, attended = torch.zeros_like(peak), torch.zeros(*scores.shape[:2], VALUE)
    for part, values in zip(scores.split(BLOCK, -1), v.split(BLOCK, 1), strict=True):
        new_peak = peak.maximum(part.amax(-1, keepdim=True))
        rescale = (peak - new_peak).exp() if rescaled else 1.0
        exponentials = (part - new_peak).exp()
        rounded = exponentials.to(weights).float()
        total = total * rescale + (rounded if sums_rounded else exponentials).sum(-1, keepdim=True)
        attended = (attended * rescale + rounded @ values).to(accumulator).float()
        peak = new_peak
    return (attended / total).transpose(0, 1)


def normalised_first(o: MhaPrefillOperands, s: Sequence, rows: range) -> torch.Tensor:
    """Weights are rounded to bf16 after their normalisation, so that they no longer sum to 1."""
    scores, v = scores_of(o, s, rows)
    return product(scores.softmax(-1).bfloat16().float(), v)


def merged(o: MhaPrefillOperands, s: Sequence, rows: range) -> torch.Tensor:
    """As chunked prefill in vLLM: cached and new keys by themselves, each result in bf16, then merged."""
    scores, v = scores_of(o, s, rows)
    results, sums = [], []
    for part in (slice(0, s.prefix), slice(s.prefix, None)):
        if scores[..., part].shape[-1]:
            weights = scores[..., part].softmax(-1)
            results.append((weights.bfloat16().float() @ v[:, part]).bfloat16().float())
            sums.append(scores[..., part].logsumexp(-1, keepdim=True))
    share = torch.stack(sums).softmax(0)
    return (share * torch.stack(results)).sum(0).transpose(0, 1)


RIGHT: dict[str, Variant] = {
    "attend": attend,
    "flash, fp32 weights": partial(flash, weights=torch.float32),
    "flash": flash,
    "flash, rounded weights summed": partial(flash, sums_rounded=True),
    "normalised_first": normalised_first,
    "merged": merged,
}


# Wrong keys


def mask_one_short(o, s, rows):
    index = torch.arange(s.prefix + rows.stop)
    return attend(o, s, rows, index, index < last_of(s, rows))


def mask_one_long(o, s, rows):
    index = torch.arange(s.prefix + rows.stop + 1)
    return attend(o, s, rows, index, index <= last_of(s, rows) + 1)


def mask_forgotten(o, s, rows):
    index = torch.arange(s.length)
    return attend(o, s, rows, index, index >= 0)


def first_key_lost(o, s, rows):
    return attend(o, s, rows, torch.arange(1, s.prefix + rows.stop))


def key_before_the_first_read(o, s, rows):
    return attend(o, s, rows, torch.arange(-1, s.prefix + rows.stop))


def keys_of_the_sequence_before(o, s, rows):
    """All are taken from where the sequence before has its last ones."""
    index = torch.arange(s.prefix + rows.stop)
    before = o.sequences[o.sequences.index(s) - 1]
    return attend(o, s, rows, index - before.length, index <= last_of(s, rows))


def keys_of_another_sequence_too(o, s, rows):
    """The sequences' borders are forgotten: keys from the first of all on are seen."""
    return attend(o, s, rows, torch.arange(-s.keys.start, s.prefix + rows.stop))


def last_block_dropped(o, s, rows):
    return attend(o, s, rows, torch.arange((s.prefix + rows.stop - 1) // BLOCK * BLOCK))


def block_dropped(o, s, rows):
    index = torch.arange(s.prefix + rows.stop)
    middle = len(index) // BLOCK // 2
    return attend(o, s, rows, index[index // BLOCK != middle])


def block_read_twice(o, s, rows):
    """The block in the middle is taken for the one before it."""
    index = torch.arange(s.prefix + rows.stop)
    middle = max(1, len(index) // BLOCK // 2)
    seen = index <= last_of(s, rows)
    return attend(o, s, rows, torch.where(index // BLOCK == middle, index - BLOCK, index), seen)


def row_of_zeros_leaks(o, s, rows):
    """The load is masked, the score is not."""
    scores, v = scores_of(o, s, rows)
    weights = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)
    return product(weights[..., :-1], v)


def rows_of_zeros_leak(o, s, rows):
    """As many as fill the last block, one at least."""
    scores, v = scores_of(o, s, rows)
    filled = BLOCK - v.shape[1] % BLOCK
    weights = torch.nn.functional.pad(scores, (0, filled)).softmax(-1)
    return product(weights[..., :-filled], v)


def cached_keys_ignored(o, s, rows):
    return attend(o, s, rows, torch.arange(s.prefix, s.prefix + rows.stop))


def mask_without_the_cached(o, s, rows):
    """Aligned to the first key and not to the last: query i sees keys 0 .. i."""
    index = torch.arange(rows.stop)
    return attend(o, s, rows, index, index <= last_of(s, rows) - s.prefix)


def last_cached_key_lost(o, s, rows):
    index = torch.arange(s.prefix + rows.stop)
    return attend(o, s, rows, index[index != s.prefix - 1])


def first_new_key_seen_twice(o, s, rows):
    """Taken for a cached one too."""
    index = torch.arange(s.prefix + rows.stop)
    return attend(o, s, rows, torch.cat([index[: s.prefix + 1], index[s.prefix :]]))


# Wrong arithmetic


def scale_of_128(o, s, rows):
    return attend(o, s, rows, scale=(192 / 128) ** 0.5)


def scale_5_percent_high(o, s, rows):
    return attend(o, s, rows, scale=1.05)


def scale_5_percent_low(o, s, rows):
    return attend(o, s, rows, scale=0.95)


def rope_forgotten(o, s, rows):
    return attend(o, s, rows, heard=slice(0, NOPE))


def k_in_fp16(o, s, rows):
    return attend(o.replaced(k=guarded_fp16(o.k)), s, rows)


def v_in_fp16(o, s, rows):
    return attend(o.replaced(v=guarded_fp16(o.v)), s, rows)


def guarded_fp16(tensor: torch.Tensor) -> torch.Tensor:
    return beyond(tensor).half().float()[GUARD:-GUARD]


def no_maximum_in_fp16(o, s, rows):
    scores, v = scores_of(o, s, rows)
    weights = scores.half().exp().float()
    return product(weights / weights.sum(-1, keepdim=True), v)


def weights_in_fp8(o, s, rows):
    return flash(o, s, rows, weights=torch.float8_e4m3fn)


def not_rescaled(o, s, rows):
    return flash(o, s, rows, rescaled=False)


def accumulated_in_bf16(o, s, rows):
    """Between 1 and 3 times the limit, so not among BUGS: what one block of keys more adds to the error
    depends on how many there are."""
    return flash(o, s, rows, accumulator=torch.bfloat16)


def accumulated_in_fp16(o, s, rows):
    return flash(o, s, rows, accumulator=torch.float16)


# Wrong places


def head_given_to_another(o, s, rows):
    out = attend(o, s, rows)
    out[:, 1] = out[:, 0]
    return out


def row_given_to_another(o, s, rows):
    """A tile's rows are misplaced by one."""
    return attend(o, s, range(rows.start - 1, rows.stop - 1))


def value_from_k(o, s, rows):
    scores, _ = scores_of(o, s, rows)
    return product(scores.softmax(-1), keys(o, s, torch.arange(scores.shape[-1]))[0][..., :VALUE])


def row_never_written(o, s, rows):
    return torch.full_like(attend(o, s, rows), math.nan)


BUGS: tuple[Variant, ...] = (
    mask_one_short,
    mask_one_long,
    mask_forgotten,
    first_key_lost,
    key_before_the_first_read,
    keys_of_the_sequence_before,
    keys_of_another_sequence_too,
    last_block_dropped,
    block_dropped,
    block_read_twice,
    row_of_zeros_leaks,
    rows_of_zeros_leak,
    cached_keys_ignored,
    mask_without_the_cached,
    last_cached_key_lost,
    first_new_key_seen_twice,
    scale_of_128,
    scale_5_percent_high,
    scale_5_percent_low,
    rope_forgotten,
    k_in_fp16,
    v_in_fp16,
    no_maximum_in_fp16,
    weights_in_fp8,
    not_rescaled,
    accumulated_in_fp16,
    head_given_to_another,
    row_given_to_another,
    value_from_k,
    row_never_written,
)
WITH_CACHED = {cached_keys_ignored, mask_without_the_cached, last_cached_key_lost, first_new_key_seen_twice}
"""Bugs only where tokens are cached."""
EVERY_ROW = (
    mask_one_short,
    mask_one_long,
    first_key_lost,
    key_before_the_first_read,
    row_of_zeros_leaks,
    last_cached_key_lost,
    first_new_key_seen_twice,
)
"""Bugs of a single key, which show in any row that has them."""
