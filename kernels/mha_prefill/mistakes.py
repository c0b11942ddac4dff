"""Kernels of MHA prefill that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one sequence: one behind the first, with cached tokens if
there are such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernels.attention_mistakes import Arithmetic, Attended, AttentionOp, Wrong, in_fp8, output_with
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence, beyond
from kernels.mistakes import E4M3, E5M2, OTHER_FP8, Answers, Mistake, Round, fp8, fp16, put


def keys_of(
    s: Sequence, q: torch.Tensor, behind: int, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a sequence and so many behind it [n], and the last one that each query, or each chosen one,
    should see [new, 1]."""
    queries = torch.arange(s.new, device=q.device) if chosen is None else chosen
    keys = torch.arange(s.length + behind, device=q.device)
    return keys, s.prefix + queries[:, None]


def read(
    o: MhaPrefillOperands,
    s: Sequence,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> Attended:
    """What is read for a sequence; right by default.

    index:  the keys that are read [n], counted from the sequence's first
    seen:   which of these each query sees [new, n]
    chosen: which of its queries are computed; None for all
    """
    keys, last = keys_of(s, o.q, 0, chosen)
    index = keys if index is None else index
    seen = index <= last if seen is None else seen
    q = o.q[s.queries][slice(None) if chosen is None else chosen].float().transpose(0, 1)
    stored = GUARD + s.keys.start + index
    k = beyond(o.k)[stored].float().transpose(0, 1)
    v = beyond(o.v)[stored].float().transpose(0, 1) * o.value_scale
    middle = s.prefix or len(index) // 2
    parts = [(0, middle), (middle, len(index))]
    return Attended(o, s, s.queries, q, k, v, o.score_scale, o.q.dtype, parts, seen, chosen)


ATTENTION = AttentionOp(
    sequences=lambda o: list(o.sequences),
    victim=lambda o: max(o.sequences[1:] or o.sequences, key=lambda s: (s.prefix > 0, s.new)),
    read=read,
)


# Wrong keys and masks

Keys = Callable[[Attended], Attended]


def reads(
    seen: Callable[[Sequence, Any, Any], torch.Tensor] | None = None,
    index: Callable[[Attended, torch.Tensor], torch.Tensor] | None = None,
    behind: int = 0,
) -> Keys:
    """A kernel that reads other keys, or masks them otherwise.

    seen:   (sequence, keys [n], the last key that each query should see [new, 1]) -> what it sees
    index:  (what a right kernel reads, keys [n]) -> the keys that are read in their place
    behind: so many keys behind the sequence are read, too
    """

    def wrong(a: Attended) -> Attended:
        keys, last = keys_of(a.sequence, a.q, behind, a.chosen)
        sees = seen(a.sequence, keys, last).expand(len(last), len(keys)) if seen else None
        keys_read = index(a, keys) if index else keys
        return read(a.operands, a.sequence, keys_read, sees, a.chosen)

    return wrong


def left_out(which: Callable[[Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """which: (sequence, keys [n]) -> those that no query sees, except for a query's own key."""
    return reads(lambda s, key, last: (key <= last) & (~which(s, key) | (key == last)))


def right_mask(s: Sequence, key: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return key <= last


def in_the_middle(s: Sequence, key: torch.Tensor) -> torch.Tensor:
    """Which keys are in the block of 64 in the middle."""
    return key // 64 == max(1, s.length // 64 // 2)


def of_the_previous(a: Attended, key: torch.Tensor) -> torch.Tensor:
    every = a.operands.sequences
    return key - every[every.index(a.sequence) - 1].length


KEYS: Mapping[str, Keys] = {
    "causal mask one token too short": reads(lambda s, k, last: (k < last) | (k == 0)),
    "causal mask one token too far": reads(lambda s, k, last: k <= last + 1, behind=1),
    "no causal mask": reads(lambda s, k, last: k >= 0),
    "cached keys left out": reads(lambda s, k, last: (k <= last) & (k >= s.prefix)),
    "causal mask aligned to the first key": reads(lambda s, k, last: k <= last - s.prefix),
    "window of 32 keys": reads(lambda s, k, last: (k <= last) & (k > last - 32)),
    "last cached key left out": left_out(lambda s, k: k == s.prefix - 1),
    "block of 64 in the middle left out": left_out(in_the_middle),
    "keys behind whole blocks of 64 left out": left_out(lambda s, k: k >= (s.length - 1) // 64 * 64),
    "first new key counted twice": reads(index=lambda a, k: torch.cat([k[:1] + a.sequence.prefix, k])),
    "last key of the previous sequence counted too": reads(index=lambda a, k: torch.cat([k[:1] - 1, k])),
    "block of 64 in the middle replaced by the one before": reads(
        right_mask, lambda a, k: torch.where(in_the_middle(a.sequence, k), k - 64, k)
    ),
    "keys of the previous sequence": reads(right_mask, of_the_previous),
}


def of_keys(keys: Keys) -> Wrong:
    return lambda a: keys(a).out()


def replaced(a: Attended, **operands: torch.Tensor) -> Attended:
    return read(a.operands.replaced(**operands), a.sequence, chosen=a.chosen)


def operand(name: str, change: Round) -> Keys:
    """change: q, k or v with its guards, fp32 [tokens, heads, width] -> another."""
    return lambda a: replaced(a, **{name: change(beyond(getattr(a.operands, name)).float())[GUARD:-GUARD]})


OWN_MISTAKES: Mapping[str, Wrong] = {
    **{name: of_keys(keys) for name, keys in KEYS.items()},
    "result in fp16": output_with(Arithmetic(round_result=fp16)),
    "hidden keys scored -10": lambda a: a.by_softmax(a.scores.nan_to_num(neginf=-10.0)),
    "values rounded to FP8": of_keys(operand("v", partial(fp8, E4M3))),
    "keys of the previous head": of_keys(operand("k", lambda k: k.roll(1, 1))),
    "values one token behind": of_keys(operand("v", lambda v: v.roll(1, 0))),
}


def stored_past_the_end(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
    """The last tile of the first sequence is stored whole, over the first rows of the next sequence."""
    end = o.sequences[0].queries.stop
    return put(right, slice(end, end + 16), right[end - 1])


# Calls that round the softmax weights to FP8


def through_e5m2(name: str) -> Wrong:
    reads = operand(name, partial(fp8, E5M2))
    return lambda a: reads(a).out(Arithmetic(round_weights=partial(fp8, a.fp8)))


def descales(change: Callable[[MhaPrefillOperands], dict[str, torch.Tensor]]) -> Wrong:
    return lambda a: replaced(a, **change(a.operands)).in_fp8()


OWN_FP8_MISTAKES_EVERYWHERE: Mapping[str, Wrong] = {
    "weights up to 2^11 saturated": in_fp8(how=Arithmetic(headroom=11.0)),
    "queries through e5m2": through_e5m2("q"),
    "values through e5m2": through_e5m2("v"),
    "maximum kept until 2^20 above it": in_fp8(how=Arithmetic(block=16, lazy=20.0)),
}
OWN_FP8_MISTAKES: Mapping[str, Wrong] = {
    "block of 64 in the middle left out": lambda a: left_out(in_the_middle)(a).in_fp8(),
    "q's descale left out": descales(lambda o: {"q_descale": torch.ones_like(o.q_descale)}),
    "v's descale left out": descales(lambda o: {"v_descale": torch.ones_like(o.v_descale)}),
    "descales of k and v swapped": descales(lambda o: {"k_descale": o.v_descale, "v_descale": o.k_descale}),
    "values read in the other FP8 format": lambda a: (
        replaced(a, v=a.operands.v.view(OTHER_FP8[a.fp8])).out().nan_to_num(nan=0.0)
    ),
}


MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION.mistakes(OWN_MISTAKES),
    Mistake("rows shifted by one", ATTENTION.output(lambda out: out.roll(1, 0))),
    Mistake("stored past the end of a sequence", stored_past_the_end),
    *ATTENTION.mistakes_in_fp8(OWN_FP8_MISTAKES_EVERYWHERE, OWN_FP8_MISTAKES),
)


def answers(o: MhaPrefillOperands, rows: list[int], columns: slice) -> Answers:
    row = torch.tensor(rows, device=o.q.device)
    attended = []
    for sequence in o.sequences:
        queries = sequence.queries
        chosen = row[(row >= queries.start) & (row < queries.stop)] - queries.start
        if len(chosen):
            attended.append(read(o, sequence, chosen=chosen))
    return ATTENTION.answers(attended, {**OWN_MISTAKES, **OWN_FP8_MISTAKES}, columns)
