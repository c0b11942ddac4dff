"""Mistakes of MHA prefill: the output of a kernel that makes one, in plain torch on the operands' device.

Where nothing else is said one sequence is wrong, behind another and with cached tokens if there are such, and
the others are right.
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
    exp2_linear,
)
from kernels.arithmetic.roundings import Round, bf16, fp8, fp8_truncated, fp16, kept
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence, beyond
from kernels.mha_prefill.sizes import NOPE, ROPE, WIDTH, MhaPrefillSizes
from kernels.mistakes import Compute, Mistake, any_size

Attend = Callable[[MhaPrefillOperands, Sequence], torch.Tensor]
"""(operands, a sequence) -> its output, fp32 [new, heads, 128]."""
Fits = Callable[[MhaPrefillSizes], bool]

E4M3, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
OTHER_FP8 = {E4M3: E4M3FNUZ, E4M3FNUZ: E4M3}


# Which sizes show a mistake


def several_sequences(sizes: MhaPrefillSizes) -> bool:
    return sizes.batch > 1


def several_heads(sizes: MhaPrefillSizes) -> bool:
    return sizes.heads > 1


def cached(sizes: MhaPrefillSizes) -> bool:
    return max(prefix for prefix, _ in sizes.lengths()) > 1


def many_steps(sizes: MhaPrefillSizes) -> bool:
    """Few round no worse than the output is rounded."""
    return max(prefix + new for prefix, new in sizes.lengths()) > 100


def bf16_operands(sizes: MhaPrefillSizes) -> bool:
    return sizes.dtype == "bf16"


def fp8_operands(sizes: MhaPrefillSizes) -> bool:
    return sizes.dtype == "fp8"


# The right steps, which take what a mistake changes


def keys_of(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    return torch.arange(s.length, device=o.q.device)


def last_seen(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """The last key that each query sees, [new, 1]."""
    return s.prefix + torch.arange(s.new, device=o.q.device)[:, None]


def scored(
    o: MhaPrefillOperands,
    s: Sequence,
    *,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [heads, new, keys] and values [heads, keys, 128]: the right ones, unless it is given
    keys [n], counted from the sequence's first, which of them each query sees [new, n], queries [heads, new,
    192], or a factor on the softmax scale."""
    index = keys_of(o, s) if index is None else index
    k, v = (beyond(t)[GUARD + s.keys.start + index].float().transpose(0, 1) for t in (o.k, o.v))
    q = queries(o, s) if q is None else q
    seen = index <= last_seen(o, s) if seen is None else seen
    return (q @ k.mT * (o.score_scale * scale)).masked_fill_(~seen, -math.inf), v * o.value_scale


def queries(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    return o.q[s.queries].float().transpose(0, 1)


def prefill(o: MhaPrefillOperands, s: Sequence, how: Arithmetic = EXACT, **changed: Any) -> torch.Tensor:
    return attend(*scored(o, s, **changed), how)[1].transpose(0, 1)


def in_fp8(
    o: MhaPrefillOperands,
    s: Sequence,
    how: Arithmetic = IN_BF16,
    weights: torch.dtype | None = None,
    **changed: Any,
) -> torch.Tensor:
    """The softmax weights in the operands' format, or in another."""
    if how.weights is bf16:
        how = replace(how, weights=partial(fp8, weights or o.q.dtype))
    return prefill(o, s, how, **changed)


def everywhere(of: Attend) -> Compute:
    return lambda o, right: torch.cat([of(o, s) for s in o.sequences]).to(right.dtype)


def victim(o: MhaPrefillOperands) -> Sequence:
    """With cached tokens if there are any, and behind another sequence if there are several."""
    return max(o.sequences[1:] or o.sequences, key=lambda s: (s.prefix > 0, s.new))


def previous(o: MhaPrefillOperands, s: Sequence) -> Sequence:
    return o.sequences[o.sequences.index(s) - 1]


def in_one(of: Attend) -> Compute:
    def compute(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
        right[victim(o).queries] = of(o, victim(o)).to(right.dtype)
        return right

    return compute


# Which keys are taken, and which of them each query sees

Keys = Callable[[MhaPrefillOperands, Sequence], dict[str, torch.Tensor]]
"""(operands, a sequence) -> what `scored` is given."""


def masked(seen: Callable[[Sequence, Any, Any], torch.Tensor], behind: int = 0) -> Keys:
    """(sequence, key [n], the last key that each query should see [new, 1]) -> what it sees. behind: so many
    keys behind the sequence are taken, too."""

    def keys(o: MhaPrefillOperands, s: Sequence) -> dict[str, torch.Tensor]:
        key, last = torch.arange(s.length + behind, device=o.q.device), last_seen(o, s)
        return {"index": key, "seen": seen(s, key, last).expand(s.new, len(key))}

    return keys


def lost(which: Callable[[Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """(sequence, key [n]) -> which no query sees, but its own key."""
    return masked(lambda s, key, last: (key <= last) & (~which(s, key) | (key == last)))


def taken(other: Callable[[MhaPrefillOperands, Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """(operands, sequence, key [n]) -> what is taken for it."""
    return lambda o, s: {"index": other(o, s, keys_of(o, s)), "seen": keys_of(o, s) <= last_seen(o, s)}


def counted_too(key: Callable[[Sequence], int]) -> Keys:
    return lambda o, s: {"index": torch.cat([keys_of(o, s)[:1] + key(s), keys_of(o, s)])}


def in_the_middle(s: Sequence, key: torch.Tensor) -> torch.Tensor:
    """Of a block of 64."""
    return key // 64 == max(1, s.length // 64 // 2)


def the_block_before(o: MhaPrefillOperands, s: Sequence, key: torch.Tensor) -> torch.Tensor:
    return torch.where(in_the_middle(s, key), key - 64, key)


def prefix_of_the_previous(o: MhaPrefillOperands, s: Sequence) -> dict[str, torch.Tensor]:
    key, other = keys_of(o, s), previous(o, s).prefix
    return {
        "index": key,
        "seen": key <= last_seen(o, s) - s.prefix + (other if other != s.prefix else other + 1),
    }


KEYS: tuple[tuple[str, Keys, Fits], ...] = (
    ("causal mask one token too short", masked(lambda s, k, last: (k < last) | (k == 0)), any_size),
    ("causal mask one token too far", masked(lambda s, k, last: k <= last + 1, behind=1), any_size),
    ("causal mask by whole tiles of 64", masked(lambda s, k, last: k // 64 <= last // 64), any_size),
    ("no causal mask", masked(lambda s, k, last: k >= 0), any_size),
    ("causal mask aligned to the first key", masked(lambda s, k, last: k <= last - s.prefix), cached),
    ("prefix of the previous sequence", prefix_of_the_previous, cached),
    ("window of 32 keys", masked(lambda s, k, last: (k <= last) & (k > last - 32)), any_size),
    ("first key lost", lost(lambda s, k: k == 0), any_size),
    ("last cached key lost", lost(lambda s, k: k == s.prefix - 1), cached),
    ("cached keys lost", lost(lambda s, k: k < s.prefix), cached),
    ("new keys lost", lost(lambda s, k: k >= s.prefix), cached),
    ("block of 64 in the middle lost", lost(in_the_middle), any_size),
    ("keys behind whole blocks of 64 lost", lost(lambda s, k: k >= (s.length - 1) // 64 * 64), any_size),
    ("first key counted twice", counted_too(lambda s: 0), any_size),
    ("first new key counted twice", counted_too(lambda s: s.prefix), cached),
    ("last key of the previous sequence counted too", counted_too(lambda s: -1), several_sequences),
    ("keys one behind", taken(lambda o, s, k: k - 1), any_size),
    ("block of 64 in the middle taken for the one before it", taken(the_block_before), any_size),
    ("keys of the previous sequence", taken(lambda o, s, k: k - previous(o, s).length), several_sequences),
    (
        "keys begin where the queries do",
        taken(lambda o, s, k: k - s.keys.start + s.queries.start),
        lambda sizes: several_sequences(sizes) and cached(sizes),
    ),
)


def of_keys(keys: Keys, of: Callable[..., torch.Tensor] = prefill) -> Attend:
    return lambda o, s: of(o, s, **keys(o, s))


# Cached and new keys (without cached ones two halves), each by themselves, and how they are combined


def in_parts(by: Callable[[list[Partial]], torch.Tensor]) -> Attend:
    def of(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        scores, v = scored(o, s)
        middle = s.prefix or s.length // 2
        parts = (slice(0, middle), slice(middle, None))
        return by([attend(scores[..., part], v[:, part]) for part in parts]).transpose(0, 1)

    return of


PARTS: tuple[tuple[str, Attend, Fits], ...] = (
    ("parts averaged", in_parts(lambda p: (p[0][1] + p[1][1]) / 2), any_size),
    ("first part only", in_parts(lambda p: p[0][1]), any_size),
    (
        "log-sums of base 2 taken for natural ones",
        in_parts(partial(combine, log_sums=lambda x: x * LOG2E)),
        any_size,
    ),
    ("log-sums of the previous row", in_parts(partial(combine, log_sums=lambda x: x.roll(1, 2))), any_size),
    ("log-sums in bf16", in_parts(partial(combine, log_sums=bf16)), any_size),
)


# Arithmetic

ARITHMETIC: tuple[tuple[str, Arithmetic, Fits], ...] = (
    ("no maximum taken off", Arithmetic(has_maximum=False), any_size),
    ("maximum begins at 0", Arithmetic(first_peak=0.0), any_size),
    ("result not rescaled when the maximum rises", Arithmetic(of_result=False, block=32), any_size),
    ("sum not rescaled when the maximum rises", Arithmetic(of_total=False, block=32), any_size),
    ("values of the next block", Arithmetic(delayed=True, block=32), any_size),
    ("scores in bf16", Arithmetic(scores=bf16), any_size),
    ("scores in fp16", Arithmetic(scores=fp16), any_size),
    ("weights in FP8", Arithmetic(weights=partial(fp8, E4M3)), any_size),
    ("weights of 5 bits", Arithmetic(weights=partial(kept, 5)), any_size),
    ("result in fp16", Arithmetic(accumulator=fp16), bf16_operands),
    ("result in bf16 after each token", Arithmetic(accumulator=bf16, block=1), many_steps),
    ("sum in bf16 after each token", Arithmetic(total=bf16, block=1), many_steps),
    ("exp2 by straight lines", Arithmetic(exp2=exp2_linear), any_size),
)


# Queries, keys and values


def with_query(change: Round) -> Attend:
    """q [heads, new, 192] changed first."""
    return lambda o, s: prefill(o, s, q=change(queries(o, s)))


def without(start: int, stop: int, q: torch.Tensor) -> torch.Tensor:
    """Some columns forgotten."""
    return torch.cat([q[..., :start], q[..., start:stop] * 0, q[..., stop:]], -1)


def interleaved(q: torch.Tensor) -> torch.Tensor:
    """The rope part in the other of its two orders."""
    nope, first, second = q.split([NOPE, ROPE // 2, ROPE // 2], -1)
    return torch.cat([nope, torch.stack([first, second], -1).flatten(-2)], -1)


def with_tensor(name: str, change: Round) -> Attend:
    """k or v [tokens, heads, width] changed first, with its guards."""
    return lambda o, s: prefill(
        o.replaced(**{name: change(beyond(getattr(o, name)).float())[GUARD:-GUARD]}), s
    )


def zero_counted(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, v = scored(o, s)
    weights = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)
    return (weights[..., :-1] @ v).transpose(0, 1)


def hidden_keys_heard(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, v = scored(o, s)
    return (scores.nan_to_num(neginf=-10.0).softmax(-1) @ v).transpose(0, 1)


QUERIES_KEYS_VALUES: tuple[tuple[str, Attend, Fits], ...] = (
    ("row of zeros counted behind the last key", zero_counted, any_size),
    ("hidden keys scored -10", hidden_keys_heard, any_size),
    ("scale of 128 channels", partial(prefill, scale=(192 / 128) ** 0.5), any_size),
    ("scale 5 percent too large", partial(prefill, scale=1.05), any_size),
    ("scale 2 percent too small", partial(prefill, scale=0.98), any_size),
    ("rope part forgotten", with_query(partial(without, NOPE, WIDTH)), any_size),
    ("last channel forgotten", with_query(partial(without, WIDTH - 1, WIDTH)), any_size),
    ("rope part in the other order", with_query(interleaved), any_size),
    ("queries of the previous row", with_query(lambda q: q.roll(1, 1)), any_size),
    ("queries rounded to FP8", with_query(partial(fp8, E4M3)), bf16_operands),
    ("values rounded to FP8", with_tensor("v", partial(fp8, E4M3)), bf16_operands),
    ("values in fp16", with_tensor("v", fp16), bf16_operands),
    ("keys of the previous head", with_tensor("k", lambda k: k.roll(1, 1)), several_heads),
    ("values one token behind", with_tensor("v", lambda v: v.roll(1, 0)), any_size),
)


# Places of the output


def of_victim(change: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    """What becomes of one sequence's right output [new, heads, 128]."""

    def compute(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
        rows = victim(o).queries
        right[rows] = change(right[rows].clone())
        return right

    return compute


def put(at: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        out[at] = value
        return out

    return change


def stored_past_the_end(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
    """The first sequence's last tile is stored whole, over the next one's first rows."""
    end = o.sequences[0].queries.stop
    right[end : end + 16] = right[end - 1].clone()
    return right


PLACES: tuple[tuple[str, Compute, Fits], ...] = (
    ("heads shifted by one", of_victim(lambda out: out.roll(1, 1)), several_heads),
    ("rows shifted by one", of_victim(lambda out: out.roll(1, 0)), any_size),
    ("last row zero", of_victim(put(-1, 0.0)), any_size),
    ("last row never written", of_victim(put(-1, math.nan)), any_size),
    ("last 8 columns zero", of_victim(put((..., slice(-8, None)), 0.0)), any_size),
    (
        "columns in pairs swapped",
        of_victim(lambda out: out.unflatten(-1, (64, 2)).flip(-1).flatten(2)),
        any_size,
    ),
    ("added to what the output held", of_victim(lambda out: out.float() * 2.0), any_size),
    ("last sequence never computed", lambda o, right: put(o.sequences[-1].queries, 0.0)(right), any_size),
    ("stored past the end of a sequence", stored_past_the_end, several_sequences),
    ("output 2 percent too large", of_victim(lambda out: out.float() * 1.02), any_size),
    ("output 5 percent too small", of_victim(lambda out: out.float() * 0.95), any_size),
    ("output of 5 bits", of_victim(lambda out: kept(5, out.float())), any_size),
)


# Calls that round the softmax weights to FP8


def truncated_weights(o: MhaPrefillOperands, s: Sequence, headroom: float = 0.0) -> torch.Tensor:
    return in_fp8(o, s, Arithmetic(weights=partial(fp8_truncated, o.q.dtype), headroom=headroom))


def times_in_fp8(factor: float) -> Compute:
    return everywhere(lambda o, s: in_fp8(o, s) * factor)


def through_e5m2(name: str) -> Compute:
    """An operand."""

    def of(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        coarse = fp8(E5M2, beyond(getattr(o, name)).float())[GUARD:-GUARD]
        return prefill(o.replaced(**{name: coarse}), s, Arithmetic(weights=partial(fp8, o.q.dtype)))

    return everywhere(of)


def with_descales(change: Callable[[MhaPrefillOperands], dict[str, torch.Tensor]]) -> Compute:
    return in_one(lambda o, s: in_fp8(o.replaced(**change(o)), s))


def v_in_the_other_format(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """The same bits mean half as much, or twice."""
    return prefill(o.replaced(v=o.v.view(OTHER_FP8[o.v.dtype])), s).nan_to_num(nan=0.0)


IN_FP8: tuple[tuple[str, Compute], ...] = (
    ("output 2 percent too large everywhere", times_in_fp8(1.02)),
    ("output 3 percent too large everywhere", times_in_fp8(1.03)),
    ("output 5 percent too large everywhere", times_in_fp8(1.05)),
    ("output 5 percent too small everywhere", times_in_fp8(0.95)),
    ("weights truncated", everywhere(truncated_weights)),
    ("weights up to 2^7 truncated", everywhere(partial(truncated_weights, headroom=7.0))),
    ("weights in e5m2", everywhere(partial(in_fp8, weights=E5M2))),
    ("weights up to 2^11 saturated", everywhere(partial(in_fp8, how=Arithmetic(headroom=11.0)))),
    ("queries through e5m2", through_e5m2("q")),
    ("values through e5m2", through_e5m2("v")),
    ("maximum kept until 2^20 above it", everywhere(partial(in_fp8, how=Arithmetic(block=16, lazy=20.0)))),
    ("sum of weights half of theirs", times_in_fp8(2.0)),
    ("block of 64 in the middle lost", in_one(of_keys(lost(in_the_middle), in_fp8))),
    ("scores in FP8", in_one(lambda o, s: in_fp8(o, s, Arithmetic(scores=partial(fp8, o.q.dtype))))),
    ("scale 10 percent too large", in_one(partial(in_fp8, scale=1.1))),
    ("scale of 128 channels", in_one(partial(in_fp8, scale=(192 / 128) ** 0.5))),
    ("q's descale missing", with_descales(lambda o: {"q_descale": torch.ones_like(o.q_descale)})),
    ("k's descale for q", with_descales(lambda o: {"q_descale": o.k_descale})),
    ("v's descale missing", with_descales(lambda o: {"v_descale": torch.ones_like(o.v_descale)})),
    (
        "descales of k and v swapped",
        with_descales(lambda o: {"k_descale": o.v_descale, "v_descale": o.k_descale}),
    ),
    ("values read in the other FP8 format", in_one(v_in_the_other_format)),
)


MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(name, in_one(of_keys(keys)), fits=fits) for name, keys, fits in KEYS),
    *(Mistake(name, in_one(partial(prefill, how=how)), fits=fits) for name, how, fits in ARITHMETIC),
    *(Mistake(name, in_one(of), fits=fits) for name, of, fits in (*PARTS, *QUERIES_KEYS_VALUES)),
    *(Mistake(name, compute, fits=fits) for name, compute, fits in PLACES),
    *(Mistake(f"{name}, in FP8", compute, activations="fp8", fits=fp8_operands) for name, compute in IN_FP8),
)
