"""Kernels of MLA decode that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one sequence: the longest one behind the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from kernels.arithmetic.attention import Arithmetic, Partial, combine, evenly
from kernels.arithmetic.attention_mistakes import AttentionOp, without
from kernels.arithmetic.roundings import E4M3, E5M2, OTHER_FP8, fp8, kept
from kernels.mistakes import Compute, Mistake, any_size, put
from kernels.mla_decode.operands import LATENT, ROPE, WIDTH, MlaDecodeOperands, MlaDecodeSizes

Sequence = Callable[[MlaDecodeOperands, int], torch.Tensor]
"""(operands, number of a sequence) -> its output, fp32 [heads, 512]."""
Slots = Callable[[MlaDecodeOperands, int], torch.Tensor]
"""(operands, number of a sequence) -> the rows of the cache that are read for its tokens, int64 [n]."""
Fits = Callable[[MlaDecodeSizes], bool]


def several_sequences(sizes: MlaDecodeSizes) -> bool:
    return sizes.batch > 1


def several_pages(sizes: MlaDecodeSizes) -> bool:
    return max(sizes.lengths()) > 3 * sizes.page


def many_steps(sizes: MlaDecodeSizes) -> bool:
    """With few steps, rounding after each is no worse than rounding the output."""
    return max(sizes.lengths()) > 100


def fp8_cache(sizes: MlaDecodeSizes) -> bool:
    return sizes.kv == "fp8"


# The right steps, with arguments for what a mistake changes


def rows(o: MlaDecodeOperands, slots: torch.Tensor) -> torch.Tensor:
    """Rows of the cache, dequantised, fp32 [n, 576]."""
    return o.kv.view(-1, WIDTH)[slots].float() * o.kv_scale


def scored(
    o: MlaDecodeOperands,
    i: int,
    *,
    slots: torch.Tensor | None = None,
    kv: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [heads, tokens] and values [tokens, 512] of a sequence.

    They are right unless other slots, rows of the cache, queries or a factor on the softmax scale are given.
    """
    if kv is None:
        kv = rows(o, o.token_slots(i) if slots is None else slots)
    if q is None:
        q = o.q[i].float()
    return q @ kv.T * o.scale * scale, kv[:, :LATENT]


def victim(o: MlaDecodeOperands) -> int:
    """The longest sequence behind the first, or the only one."""
    return max(range(min(1, len(o.host_lengths) - 1), len(o.host_lengths)), key=o.host_lengths.__getitem__)


OP = AttentionOp(
    rope=slice(LATENT, WIDTH),
    sequences=lambda o: list(range(len(o.host_lengths))),
    victim=victim,
    rows=lambda i: i,
    queries=lambda o, i: o.q[i].float(),
    scored=scored,
    parts=lambda i, keys: evenly(keys, 4),
    laid_out=lambda result: result,
    fp8=lambda o: o.kv.dtype,
)
decode, in_fp8, everywhere = OP.attend, OP.in_fp8, OP.everywhere


# Wrong tokens, pages and page tables


def taken(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Slots:
    """change: (right slots [length], size of a page) -> other slots."""
    return lambda o, i: change(o.token_slots(i), o.page)


def page_left_out(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return torch.cat([slots[:start], slots[start + page :]])


def page_read_twice(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return put(slots, slice(start, start + page), slots[start - page : start][: len(slots) - start])


def by_table(of: Callable[..., torch.Tensor], more: int = 0) -> Slots:
    """Looks slots up in the page table.

    of:   (operands, number of a sequence, columns of the table [n]) -> pages [n]
    more: so many tokens more than the sequence has
    """

    def slots(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        token = torch.arange(min(o.host_lengths[i] + more, o.page_table.shape[1] * o.page), device=o.q.device)
        return of(o, i, token // o.page).long() % len(o.kv) * o.page + token % o.page

    return slots


def pages(o: MlaDecodeOperands, i: int, column: torch.Tensor) -> torch.Tensor:
    return o.page_table[i, column]


def sixteen_bits(o: MlaDecodeOperands, i: int, column: torch.Tensor) -> torch.Tensor:
    return o.page_table[i, column].short()


SLOTS: Mapping[str, Slots] = {
    "last page left out": taken(lambda t, page: t[: (len(t) - 1) // page * page]),
    "page in the middle left out": taken(page_left_out),
    "page read twice in place of the next": taken(page_read_twice),
    "last token left out": taken(lambda t, page: t[:-1]),
    "last token counted twice": taken(lambda t, page: torch.cat([t, t[-1:]])),
    "one token too many": by_table(pages, more=1),
    "tokens of the previous sequence": lambda o, i: o.token_slots(i - 1),
    "page numbers in 16 bits with a sign": by_table(sixteen_bits),
}
SLOTS_IN_FP8 = ("last page left out", "page in the middle left out", "page read twice in place of the next")
"""Those that are near the limit of calls that round to FP8."""


def of_slots(slots: Slots, of: Callable[..., torch.Tensor] = decode) -> Sequence:
    return lambda o, i: of(o, i, slots=slots(o, i))


def with_empty_part(partials: list[Partial]) -> torch.Tensor:
    """A part without tokens has a log-sum of 0 where it should have -inf."""
    log, result = partials[0]
    return combine([*partials, (torch.zeros_like(log), torch.zeros_like(result))])


def unused_slots_weigh_0(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """The slots behind the last token have a weight of 0, but they hold NaN."""
    length = o.host_lengths[i]
    scores, v = scored(o, i, slots=by_table(pages, more=2 * o.page - 1 - (length - 1) % o.page)(o, i))
    scores[:, length:] = -math.inf
    return scores.softmax(-1) @ v


def values_of_the_last_columns(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return scored(o, i)[0].softmax(-1) @ rows(o, o.token_slots(i))[:, ROPE:]


def cache_in_the_other_format(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return decode(o.replaced(kv=o.kv.view(OTHER_FP8[o.kv.dtype])), i)


SEQUENCES: Mapping[str, Sequence] = {
    "first token of a part counted in the part before too": OP.in_parts(combine, overlap=1),
    "empty part with a log-sum of 0": OP.in_parts(with_empty_part),
    "partial results in FP8": OP.in_parts(partial(combine, results=partial(fp8, E4M3))),
    "unused slots weigh 0 and hold NaN": unused_slots_weigh_0,
    "scale 1/sqrt(576)": partial(decode, scale=(192 / 576) ** 0.5),
    "queries rounded to FP8": OP.query(partial(fp8, E4M3)),
    "values of the last 512 columns": values_of_the_last_columns,
    "cache's scale left out in scores": lambda o, i: decode(o, i, scale=1 / o.kv_scale),
    "cache's scale left out in values": lambda o, i: decode(o, i) / o.kv_scale,
    "cache read in the other FP8 format": cache_in_the_other_format,
}


def without_rope_in_fp8(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return in_fp8(o, i, q=without(OP.rope, o.q[i].float()))


IN_FP8: Mapping[str, Compute] = {
    **OP.mistakes_in_fp8(),
    "queries in e5m2": everywhere(partial(in_fp8, query=E5M2)),
    "weights up to 2^10 saturated": everywhere(partial(in_fp8, how=Arithmetic(headroom=10.0))),
    "maximum kept until 2^20 above it": OP.in_one(partial(in_fp8, how=Arithmetic(block=1, lazy=20.0))),
    "cache's scale twice in values": OP.in_one(lambda o, i: in_fp8(o, i) * o.kv_scale),
    "rope part left out": OP.in_one(without_rope_in_fp8),
    "sums of 5 bits": OP.in_one(partial(in_fp8, how=Arithmetic(accumulator=partial(kept, 5)))),
    **{name: OP.in_one(of_slots(SLOTS[name], in_fp8)) for name in SLOTS_IN_FP8},
}
"""Calls that round q and the softmax weights to FP8 themselves."""


FITS: Mapping[str, Fits] = {
    "last page left out": several_pages,
    "page in the middle left out": several_pages,
    "page read twice in place of the next": several_pages,
    "tokens of the previous sequence": several_sequences,
    "page numbers in 16 bits with a sign": lambda sizes: sizes.page == 1,
    "result in bf16 after each token": many_steps,
    "sum in bf16 after each token": many_steps,
    "cache's scale left out in scores": fp8_cache,
    "cache's scale left out in values": fp8_cache,
    "cache read in the other FP8 format": fp8_cache,
    "heads shifted by one": lambda sizes: sizes.heads > 1,
}


def called_in_fp8(name: str, compute: Compute) -> Mistake:
    fits = FITS.get(name, any_size)
    return Mistake(
        f"{name}, in FP8", compute, activations="fp8", fits=lambda sizes: fp8_cache(sizes) and fits(sizes)
    )


COMPUTED: Mapping[str, Compute] = {
    **OP.mistakes(),
    **{name: OP.in_one(of_slots(slots)) for name, slots in SLOTS.items()},
    **{name: OP.in_one(of) for name, of in SEQUENCES.items()},
}

MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(name, compute, fits=FITS.get(name, any_size)) for name, compute in COMPUTED.items()),
    *(called_in_fp8(name, compute) for name, compute in IN_FP8.items()),
)
