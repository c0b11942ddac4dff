"""Kernels of MHA prefill that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one sequence: one behind the first, with cached tokens if
there are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.attention import Arithmetic
from kernels.arithmetic.attention_mistakes import AttentionOp
from kernels.arithmetic.roundings import E4M3, E5M2, OTHER_FP8, Round, fp8, fp16
from kernels.mha_prefill.operands import (
    GUARD,
    NOPE,
    WIDTH,
    MhaPrefillOperands,
    MhaPrefillSizes,
    Sequence,
    beyond,
)
from kernels.mistakes import Compute, Mistake, any_size, put

Attend = Callable[[MhaPrefillOperands, Sequence], torch.Tensor]
"""(operands, a sequence) -> its output, fp32 [new, heads, 128]."""
Fits = Callable[[MhaPrefillSizes], bool]


def several_sequences(sizes: MhaPrefillSizes) -> bool:
    return sizes.batch > 1


def several_heads(sizes: MhaPrefillSizes) -> bool:
    return sizes.heads > 1


def cached(sizes: MhaPrefillSizes) -> bool:
    return max(prefix for prefix, _ in sizes.lengths()) > 1


def many_steps(sizes: MhaPrefillSizes) -> bool:
    """With few steps, rounding after each is no worse than rounding the output."""
    return max(prefix + new for prefix, new in sizes.lengths()) > 100


def bf16_operands(sizes: MhaPrefillSizes) -> bool:
    return sizes.dtype == "bf16"


def fp8_operands(sizes: MhaPrefillSizes) -> bool:
    return sizes.dtype == "fp8"


# The right steps, with arguments for what a mistake changes


def keys_of(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    return torch.arange(s.length, device=o.q.device)


def last_seen(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """The last key that each query sees, [new, 1]."""
    return s.prefix + torch.arange(s.new, device=o.q.device)[:, None]


def queries(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """fp32 [heads, new, 192]."""
    return o.q[s.queries].float().transpose(0, 1)


def scored(
    o: MhaPrefillOperands,
    s: Sequence,
    *,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [heads, new, keys] and values [heads, keys, 128] of a sequence; right by default.

    index: the keys that are read [n], counted from the sequence's first
    seen:  which of these each query sees [new, n]
    q:     the queries
    scale: a factor on the softmax scale
    """
    index = keys_of(o, s) if index is None else index
    k, v = (beyond(t)[GUARD + s.keys.start + index].float().transpose(0, 1) for t in (o.k, o.v))
    q = queries(o, s) if q is None else q
    seen = index <= last_seen(o, s) if seen is None else seen
    return (q @ k.mT * (o.score_scale * scale)).masked_fill_(~seen, -math.inf), v * o.value_scale


def victim(o: MhaPrefillOperands) -> Sequence:
    return max(o.sequences[1:] or o.sequences, key=lambda s: (s.prefix > 0, s.new))


def previous(o: MhaPrefillOperands, s: Sequence) -> Sequence:
    return o.sequences[o.sequences.index(s) - 1]


def cached_and_new(s: Sequence, keys: int) -> list[tuple[int, int]]:
    """Without cached keys the parts are two halves."""
    middle = s.prefix or keys // 2
    return [(0, middle), (middle, keys)]


OP = AttentionOp(
    rope=slice(NOPE, WIDTH),
    sequences=lambda o: list(o.sequences),
    victim=victim,
    rows=lambda s: s.queries,
    queries=queries,
    scored=scored,
    parts=cached_and_new,
    laid_out=lambda result: result.transpose(0, 1),
    fp8=lambda o: o.q.dtype,
)
prefill, in_fp8, everywhere = OP.attend, OP.in_fp8, OP.everywhere


# Wrong keys and masks

Keys = Callable[[MhaPrefillOperands, Sequence], dict[str, torch.Tensor]]
"""(operands, a sequence) -> arguments of `scored`."""


def masked(seen: Callable[[Sequence, Any, Any], torch.Tensor], behind: int = 0) -> Keys:
    """seen:   (sequence, keys [n], the last key that each query should see [new, 1]) -> what it sees
    behind: so many keys behind the sequence are read, too"""

    def keys(o: MhaPrefillOperands, s: Sequence) -> dict[str, torch.Tensor]:
        key, last = torch.arange(s.length + behind, device=o.q.device), last_seen(o, s)
        return {"index": key, "seen": seen(s, key, last).expand(s.new, len(key))}

    return keys


def left_out(which: Callable[[Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """which: (sequence, keys [n]) -> those that no query sees, except for a query's own key."""
    return masked(lambda s, key, last: (key <= last) & (~which(s, key) | (key == last)))


def read_as(other: Callable[[MhaPrefillOperands, Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """other: (operands, sequence, keys [n]) -> the keys that are read in their place."""
    return lambda o, s: {"index": other(o, s, keys_of(o, s)), "seen": keys_of(o, s) <= last_seen(o, s)}


def counted_too(key: Callable[[Sequence], int]) -> Keys:
    return lambda o, s: {"index": torch.cat([keys_of(o, s)[:1] + key(s), keys_of(o, s)])}


def in_the_middle(s: Sequence, key: torch.Tensor) -> torch.Tensor:
    """Which keys are in the block of 64 in the middle."""
    return key // 64 == max(1, s.length // 64 // 2)


def the_block_before(o: MhaPrefillOperands, s: Sequence, key: torch.Tensor) -> torch.Tensor:
    return torch.where(in_the_middle(s, key), key - 64, key)


KEYS: Mapping[str, Keys] = {
    "causal mask one token too short": masked(lambda s, k, last: (k < last) | (k == 0)),
    "causal mask one token too far": masked(lambda s, k, last: k <= last + 1, behind=1),
    "no causal mask": masked(lambda s, k, last: k >= 0),
    "causal mask aligned to the first key": masked(lambda s, k, last: k <= last - s.prefix),
    "window of 32 keys": masked(lambda s, k, last: (k <= last) & (k > last - 32)),
    "last cached key left out": left_out(lambda s, k: k == s.prefix - 1),
    "block of 64 in the middle left out": left_out(in_the_middle),
    "keys behind whole blocks of 64 left out": left_out(lambda s, k: k >= (s.length - 1) // 64 * 64),
    "first new key counted twice": counted_too(lambda s: s.prefix),
    "last key of the previous sequence counted too": counted_too(lambda s: -1),
    "block of 64 in the middle replaced by the one before": read_as(the_block_before),
    "keys of the previous sequence": read_as(lambda o, s, k: k - previous(o, s).length),
}


def of_keys(keys: Keys, of: Callable[..., torch.Tensor] = prefill) -> Attend:
    return lambda o, s: of(o, s, **keys(o, s))


def operand(name: str, change: Round, of: Attend = prefill) -> Attend:
    """change: q, k or v with its guards, fp32 [tokens, heads, width] -> another."""
    return lambda o, s: of(o.replaced(**{name: change(beyond(getattr(o, name)).float())[GUARD:-GUARD]}), s)


def hidden_keys_scored(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """Keys behind the mask get a score of -10 where it should be -inf."""
    scores, v = scored(o, s)
    return (scores.nan_to_num(neginf=-10.0).softmax(-1) @ v).transpose(0, 1)


SEQUENCES: Mapping[str, Attend] = {
    "result in fp16": partial(prefill, how=Arithmetic(accumulator=fp16)),
    "hidden keys scored -10": hidden_keys_scored,
    "values rounded to FP8": operand("v", partial(fp8, E4M3)),
    "keys of the previous head": operand("k", lambda k: k.roll(1, 1)),
    "values one token behind": operand("v", lambda v: v.roll(1, 0)),
}


def stored_past_the_end(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
    """The last tile of the first sequence is stored whole, over the first rows of the next sequence."""
    end = o.sequences[0].queries.stop
    return put(right, slice(end, end + 16), right[end - 1])


# Calls that round the softmax weights to FP8


def through_e5m2(name: str) -> Compute:
    def of(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        how = Arithmetic(weights=partial(fp8, o.q.dtype))
        return operand(name, partial(fp8, E5M2), partial(prefill, how=how))(o, s)

    return everywhere(of)


def descales(change: Callable[[MhaPrefillOperands], dict[str, torch.Tensor]]) -> Compute:
    return OP.in_one(lambda o, s: in_fp8(o.replaced(**change(o)), s))


def v_in_the_other_format(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    return prefill(o.replaced(v=o.v.view(OTHER_FP8[o.v.dtype])), s).nan_to_num(nan=0.0)


IN_FP8: Mapping[str, Compute] = {
    **OP.mistakes_in_fp8(),
    "weights up to 2^11 saturated": everywhere(partial(in_fp8, how=Arithmetic(headroom=11.0))),
    "queries through e5m2": through_e5m2("q"),
    "values through e5m2": through_e5m2("v"),
    "maximum kept until 2^20 above it": everywhere(partial(in_fp8, how=Arithmetic(block=16, lazy=20.0))),
    "block of 64 in the middle left out": OP.in_one(of_keys(left_out(in_the_middle), in_fp8)),
    "q's descale left out": descales(lambda o: {"q_descale": torch.ones_like(o.q_descale)}),
    "descales of k and v swapped": descales(lambda o: {"k_descale": o.v_descale, "v_descale": o.k_descale}),
    "values read in the other FP8 format": OP.in_one(v_in_the_other_format),
}


FITS: Mapping[str, Fits] = {
    "causal mask aligned to the first key": cached,
    "last cached key left out": cached,
    "first new key counted twice": cached,
    "last key of the previous sequence counted too": several_sequences,
    "keys of the previous sequence": several_sequences,
    "result in bf16 after each token": many_steps,
    "sum in bf16 after each token": many_steps,
    "result in fp16": bf16_operands,
    "values rounded to FP8": bf16_operands,
    "keys of the previous head": several_heads,
    "heads shifted by one": several_heads,
    "stored past the end of a sequence": several_sequences,
}

COMPUTED: Mapping[str, Compute] = {
    **OP.mistakes(),
    **{name: OP.in_one(of_keys(keys)) for name, keys in KEYS.items()},
    **{name: OP.in_one(of) for name, of in SEQUENCES.items()},
    "rows shifted by one": OP.output(lambda out: out.roll(1, 0)),
    "stored past the end of a sequence": stored_past_the_end,
}

MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(name, compute, fits=FITS.get(name, any_size)) for name, compute in COMPUTED.items()),
    *(
        Mistake(f"{name}, in FP8", compute, activations="fp8", fits=fp8_operands)
        for name, compute in IN_FP8.items()
    ),
)
