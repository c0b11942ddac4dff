"""Mistakes of MLA decode: the output of a kernel that makes one, in plain torch on the operands' device.

Where nothing else is said one sequence is wrong, the longest behind the first, and the others are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.attention import (
    EXACT,
    IN_BF16,
    LOG2E,
    Arithmetic,
    Partial,
    attend,
    combine,
    evenly,
    exp2_linear,
)
from kernels.arithmetic.roundings import Round, bf16, fp8, fp8_truncated, fp16, kept
from kernels.mistakes import Compute, Mistake, any_size
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, WIDTH, MlaDecodeSizes

Sequence = Callable[[MlaDecodeOperands, int], torch.Tensor]
"""(operands, a sequence) -> its output, fp32 [heads, 512]."""
Slots = Callable[[MlaDecodeOperands, int], torch.Tensor]
"""(operands, a sequence) -> the rows of the cache that are taken for its tokens, int64 [n]."""
Fits = Callable[[MlaDecodeSizes], bool]

E4M3, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
OTHER_FP8 = {E4M3: E4M3FNUZ, E4M3FNUZ: E4M3}


# Which sizes show a mistake


def several_sequences(sizes: MlaDecodeSizes) -> bool:
    return sizes.batch > 1


def several_pages(sizes: MlaDecodeSizes) -> bool:
    return max(sizes.lengths()) > 3 * sizes.page


def many_steps(sizes: MlaDecodeSizes) -> bool:
    """Few round no worse than the output is rounded."""
    return max(sizes.lengths()) > 100


def fp8_cache(sizes: MlaDecodeSizes) -> bool:
    return sizes.kv == "fp8"


# The right steps, which take what a mistake changes


def rows(o: MlaDecodeOperands, slots: torch.Tensor) -> torch.Tensor:
    """Of the cache, fp32 [n, 576]."""
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
    """Scores [heads, tokens] and values [tokens, 512] of a sequence: the right ones, unless it is given other
    slots, rows, queries, or a factor on the softmax scale."""
    kv = rows(o, o.token_slots(i) if slots is None else slots) if kv is None else kv
    q = o.q[i].float() if q is None else q
    return q @ kv.T * o.scale * scale, kv[:, :LATENT]


def decode(o: MlaDecodeOperands, i: int, how: Arithmetic = EXACT, **changed: Any) -> torch.Tensor:
    return attend(*scored(o, i, **changed), how)[1]


def in_fp8(
    o: MlaDecodeOperands,
    i: int,
    how: Arithmetic = IN_BF16,
    weights: torch.dtype | None = None,
    query: torch.dtype | None = None,
    q: torch.Tensor | None = None,
    **changed: Any,
) -> torch.Tensor:
    """q and the softmax weights in the cache's format, or in another that it is given."""
    if how.weights is bf16:
        how = replace(how, weights=partial(fp8, weights or o.kv.dtype))
    q = fp8(query or o.kv.dtype, o.q[i].float() if q is None else q)
    return decode(o, i, how, q=q, **changed)


def everywhere(sequence: Sequence) -> Compute:
    return lambda o, right: torch.stack([sequence(o, i) for i in range(len(o.host_lengths))]).to(right.dtype)


def victim(o: MlaDecodeOperands) -> int:
    """The longest sequence behind the first, or the only one."""
    return max(range(min(1, len(o.host_lengths) - 1), len(o.host_lengths)), key=o.host_lengths.__getitem__)


def in_one(sequence: Sequence) -> Compute:
    def compute(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
        right[victim(o)] = sequence(o, victim(o)).to(right.dtype)
        return right

    return compute


# Tokens, pages and the page table


def taken(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Slots:
    """A change of the right slots [length], given the page's size."""
    return lambda o, i: change(o.token_slots(i), o.page)


def middle_lost(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return torch.cat([slots[:start], slots[start + page :]])


def middle_of_the_one_before(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    changed = slots.clone()
    changed[start : start + page] = slots[start - page : start][: len(slots) - start]
    return changed


def by_table(
    page_of: Callable[..., torch.Tensor] = lambda o, i, column: o.page_table[i, column],
    within: Callable[[torch.Tensor, int], torch.Tensor] = torch.remainder,
    length: Callable[[MlaDecodeOperands, int], int] = lambda o, i: o.host_lengths[i],
) -> Slots:
    """Slots by the pages [n] that tokens in these columns [n] of the table are taken to stand in, by the
    places within them of tokens [n], given the page's size, and by the sequence's length."""

    def slots(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        most = min(length(o, i), o.page_table.shape[1] * o.page)
        token = torch.arange(most, device=o.q.device)
        page = page_of(o, i, token // o.page).long() % len(o.kv)
        return page * o.page + within(token, o.page)

    return slots


def short_stride(o: MlaDecodeOperands, i: int, column: torch.Tensor) -> torch.Tensor:
    return o.page_table.flatten()[i * (o.page_table.shape[1] - 1) + column]


SLOTS: tuple[tuple[str, Slots, Fits], ...] = (
    ("last page lost", taken(lambda t, page: t[: (len(t) - 1) // page * page]), several_pages),
    ("page in the middle lost", taken(middle_lost), several_pages),
    ("page in the middle taken for the one before it", taken(middle_of_the_one_before), several_pages),
    ("first token lost", taken(lambda t, page: t[1:]), any_size),
    ("last token lost", taken(lambda t, page: t[:-1]), any_size),
    ("last token counted twice", taken(lambda t, page: torch.cat([t, t[-1:]])), any_size),
    ("one token too many", by_table(length=lambda o, i: o.host_lengths[i] + 1), any_size),
    ("last 128 tokens only", taken(lambda t, page: t[-128:]), any_size),
    ("every other block of 64 skipped", taken(lambda t, page: torch.cat(t.split(64)[::2])), any_size),
    ("tokens of the previous sequence", lambda o, i: o.token_slots(i - 1), several_sequences),
    ("page table's stride one short", by_table(short_stride), several_sequences),
    (
        "page numbers in 16 bits with a sign",
        by_table(lambda o, i, column: o.page_table[i, column].short()),
        lambda sizes: sizes.page == 1,
    ),
    (
        "tokens within a page in reverse",
        by_table(within=lambda token, page: page - 1 - token % page),
        lambda sizes: sizes.page > 1,
    ),
)
IN_FP8_TOO = {
    "last page lost",
    "page in the middle lost",
    "page in the middle taken for the one before it",
    "last 128 tokens only",
    "every other block of 64 skipped",
}
"""There they are near the limit."""


def of_slots(slots: Slots, of: Callable[..., torch.Tensor] = decode) -> Sequence:
    return lambda o, i: of(o, i, slots=slots(o, i))


# Parts of a sequence, and how they are combined

Places = list[tuple[int, int]]
Combine = Callable[[list[Partial]], torch.Tensor]


def in_parts(
    changed: Callable[[Places], Places] = lambda places: places,
    by: Combine = combine,
    rounds_to_fp8: bool = False,
) -> Sequence:
    """Four parts that begin or end elsewhere, or that are combined otherwise."""

    def sequence(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        rounded = partial(fp8, o.kv.dtype)
        how = Arithmetic(weights=rounded) if rounds_to_fp8 else IN_BF16
        scores, v = scored(o, i, q=rounded(o.q[i].float()) if rounds_to_fp8 else None)
        return by([attend(scores[:, a:b], v[a:b], how) for a, b in changed(evenly(len(v), 4)) if b > a])

    return sequence


def empty_part_of_log_sum_0(partials: list[Partial]) -> torch.Tensor:
    log, result = partials[0]
    return combine([*partials, (torch.zeros_like(log), torch.zeros_like(result))])


PARTS: tuple[tuple[str, Sequence], ...] = (
    (
        "first token of a part counted in the part before too",
        in_parts(lambda places: [(a, min(places[-1][1], b + 1)) for a, b in places]),
    ),
    ("partial results averaged", in_parts(by=lambda partials: torch.stack([r for _, r in partials]).mean(0))),
    ("empty part with a log-sum of 0", in_parts(by=empty_part_of_log_sum_0)),
    (
        "log-sums of base 2 taken for natural ones",
        in_parts(by=partial(combine, log_sums=lambda logs: logs * LOG2E)),
    ),
    ("log-sums of the previous head", in_parts(by=partial(combine, log_sums=lambda logs: logs.roll(1, 1)))),
    ("log-sums in bf16", in_parts(by=partial(combine, log_sums=bf16))),
    ("partial results in FP8", in_parts(by=partial(combine, results=partial(fp8, E4M3)))),
)


# Arithmetic

ARITHMETIC: tuple[tuple[str, Arithmetic, Fits], ...] = (
    ("no maximum taken off", Arithmetic(has_maximum=False), any_size),
    ("maximum begins at 0", Arithmetic(first_peak=0.0), any_size),
    ("result not rescaled when the maximum rises", Arithmetic(of_result=False), any_size),
    ("sum not rescaled when the maximum rises", Arithmetic(of_total=False), any_size),
    ("values of the next block", Arithmetic(delayed=True), any_size),
    ("scores in bf16", Arithmetic(scores=bf16), any_size),
    ("scores in fp16", Arithmetic(scores=fp16), any_size),
    ("weights in FP8", Arithmetic(weights=partial(fp8, E4M3)), any_size),
    ("weights of 5 bits", Arithmetic(weights=partial(kept, 5)), any_size),
    ("result in bf16 after each token", Arithmetic(accumulator=bf16, block=1), many_steps),
    ("sum in bf16 after each token", Arithmetic(total=bf16, block=1), many_steps),
    ("exp2 by straight lines", Arithmetic(exp2=exp2_linear), any_size),
)


# Queries, keys and values


def with_query(change: Round) -> Sequence:
    """q [heads, 576] changed first."""
    return lambda o, i: decode(o, i, q=change(o.q[i].float()))


def without(start: int, stop: int, q: torch.Tensor) -> torch.Tensor:
    """Some columns forgotten."""
    return torch.cat([q[:, :start], q[:, start:stop] * 0, q[:, stop:]], -1)


def interleaved(q: torch.Tensor) -> torch.Tensor:
    """The rope part in the other of its two orders."""
    latent, first, second = q.split([LATENT, ROPE // 2, ROPE // 2], -1)
    return torch.cat([latent, torch.stack([first, second], -1).flatten(1)], -1)


def zero_counted(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    scores, v = scored(o, i)
    weights = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)
    return weights[:, :-1] @ v


def unused_slots_weigh_0(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """0 times NaN."""
    length = o.host_lengths[i]
    slots = by_table(length=lambda o, i: (length - 1) // o.page * o.page + 2 * o.page)
    scores, v = scored(o, i, slots=slots(o, i))
    scores[:, length:] = -math.inf
    return scores.softmax(-1) @ v


def values_of_rope(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    kv = rows(o, o.token_slots(i))
    return scored(o, i)[0].softmax(-1) @ kv[:, ROPE:]


def sum_lacks_the_last_block(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Of 16 tokens."""
    scores, v = scored(o, i)
    weights = scores.softmax(-1)
    return weights @ v / weights[:, : max(1, (len(v) - 1) // 16 * 16)].sum(-1, keepdim=True)


SEQUENCES: tuple[tuple[str, Sequence, Fits], ...] = (
    ("row of zeros counted behind the last token", zero_counted, any_size),
    ("unused slots weigh 0 and hold NaN", unused_slots_weigh_0, any_size),
    ("scale of 128 channels", partial(decode, scale=(192 / 128) ** 0.5), any_size),
    ("scale 5 percent too large", partial(decode, scale=1.05), any_size),
    ("scale 2 percent too small", partial(decode, scale=0.98), any_size),
    ("rope part forgotten", with_query(partial(without, LATENT, WIDTH)), any_size),
    ("last channel forgotten", with_query(partial(without, WIDTH - 1, WIDTH)), any_size),
    ("rope part in the other order", with_query(interleaved), any_size),
    ("queries rounded to FP8", with_query(partial(fp8, E4M3)), any_size),
    ("values of the last 512 columns", values_of_rope, any_size),
    ("sum without the last block of 16", sum_lacks_the_last_block, any_size),
    (
        "cache in fp16",
        lambda o, i: decode(o, i, kv=fp16(rows(o, o.token_slots(i)))),
        lambda sizes: sizes.kv == "bf16",
    ),
    ("cache's scale missing in scores", lambda o, i: decode(o, i, scale=1 / o.kv_scale), fp8_cache),
    ("cache's scale missing in values", lambda o, i: decode(o, i) / o.kv_scale, fp8_cache),
    (
        "cache read in the other FP8 format",
        lambda o, i: decode(o.replaced(kv=o.kv.view(OTHER_FP8[o.kv.dtype])), i),
        fp8_cache,
    ),
)


# Places of the output


def of_victim(change: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    """What becomes of one sequence's right output [heads, 512]."""

    def compute(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
        right[victim(o)] = change(right[victim(o)].clone())
        return right

    return compute


def put(at: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        out[at] = value
        return out

    return change


PLACES: tuple[tuple[str, Compute, Fits], ...] = (
    ("heads shifted by one", of_victim(lambda out: out.roll(1, 0)), lambda sizes: sizes.heads > 1),
    ("last head never written", of_victim(put(-1, math.nan)), any_size),
    ("last 16 columns zero", of_victim(put((..., slice(-16, None)), 0.0)), any_size),
    ("columns in pairs swapped", of_victim(lambda out: out.view(-1, 256, 2).flip(-1).flatten(1)), any_size),
    ("added to what the output held", of_victim(lambda out: out.float() * 2.0), any_size),
    ("last sequence never computed", lambda o, right: put(-1, 0.0)(right), any_size),
    ("output 2 percent too large", of_victim(lambda out: out.float() * 1.02), any_size),
    ("output 5 percent too small", of_victim(lambda out: out.float() * 0.95), any_size),
    ("output of 5 bits", of_victim(lambda out: kept(5, out.float())), any_size),
)


# Calls that round q and the softmax weights to FP8 themselves


def truncated_weights(o: MlaDecodeOperands, i: int, headroom: float = 0.0) -> torch.Tensor:
    return in_fp8(o, i, Arithmetic(weights=partial(fp8_truncated, o.kv.dtype), headroom=headroom))


def times_in_fp8(factor: float) -> Compute:
    return everywhere(lambda o, i: in_fp8(o, i) * factor)


def scaled_in_fp8(factor: float) -> Compute:
    return in_one(partial(in_fp8, scale=factor))


IN_FP8: tuple[tuple[str, Compute], ...] = (
    ("output 2 percent too large everywhere", times_in_fp8(1.02)),
    ("output 3 percent too large everywhere", times_in_fp8(1.03)),
    ("output 5 percent too large everywhere", times_in_fp8(1.05)),
    ("output 5 percent too small everywhere", times_in_fp8(0.95)),
    ("weights truncated", everywhere(truncated_weights)),
    ("weights up to 2^7 truncated", everywhere(partial(truncated_weights, headroom=7.0))),
    ("weights in e5m2", everywhere(partial(in_fp8, weights=E5M2))),
    ("queries in e5m2", everywhere(partial(in_fp8, query=E5M2))),
    ("weights and queries in e5m2", everywhere(partial(in_fp8, weights=E5M2, query=E5M2))),
    ("weights up to 2^10 saturated", everywhere(partial(in_fp8, how=Arithmetic(headroom=10.0)))),
    ("maximum kept until 2^20 above it", in_one(partial(in_fp8, how=Arithmetic(block=1, lazy=20.0)))),
    ("sum of weights half of theirs", times_in_fp8(2.0)),
    ("queries' scale 5 times too large", scaled_in_fp8(0.2)),
    ("scale 10 percent too large", scaled_in_fp8(1.1)),
    ("scale of 128 channels", scaled_in_fp8((192 / 128) ** 0.5)),
    ("cache's scale twice in values", in_one(lambda o, i: in_fp8(o, i) * o.kv_scale)),
    ("rope part forgotten", in_one(lambda o, i: in_fp8(o, i, q=without(LATENT, WIDTH, o.q[i].float())))),
    ("scores in FP8", in_one(lambda o, i: in_fp8(o, i, Arithmetic(scores=partial(fp8, o.kv.dtype))))),
    ("sums of 5 bits", in_one(partial(in_fp8, how=Arithmetic(accumulator=partial(kept, 5))))),
    ("first of four parts lost", in_one(in_parts(lambda places: places[1:], rounds_to_fp8=True))),
)


def called_in_fp8(name: str, compute: Compute, fits: Fits = any_size) -> Mistake:
    return Mistake(
        f"{name}, in FP8", compute, activations="fp8", fits=lambda sizes: fp8_cache(sizes) and fits(sizes)
    )


MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(name, in_one(of_slots(slots)), fits=fits) for name, slots, fits in SLOTS),
    *(Mistake(name, in_one(sequence)) for name, sequence in PARTS),
    *(Mistake(name, in_one(partial(decode, how=how)), fits=fits) for name, how, fits in ARITHMETIC),
    *(Mistake(name, in_one(sequence), fits=fits) for name, sequence, fits in SEQUENCES),
    *(Mistake(name, compute, fits=fits) for name, compute, fits in PLACES),
    *(called_in_fp8(name, compute) for name, compute in IN_FP8),
    *(
        called_in_fp8(name, in_one(of_slots(slots, in_fp8)), fits)
        for name, slots, fits in SLOTS
        if name in IN_FP8_TOO
    ),
)
