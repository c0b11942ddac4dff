"""Kernels of MHA prefill that are wrong in one way each.

A kernel is wrong in one sequence (see `victim`), unless its name or its table says `everywhere`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernels.attention_mistakes import Arithmetic, Attended, AttentionOp, Wrong, in_fp8, output_with
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence, with_guards
from kernels.mistakes import E4M3, E5M2, OTHER_FP8, Answers, Mistake, Round, fp8, fp16, put


def last_seen(s: Sequence, device: torch.device, chosen: torch.Tensor | None) -> torch.Tensor:
    """The last key that each query should see, [new, 1]. chosen: the numbers of the queries; None for all"""
    queries = torch.arange(s.new, device=device) if chosen is None else chosen
    return s.prefix + queries[:, None]


def read(
    o: MhaPrefillOperands,
    s: Sequence,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> Attended:
    """What a kernel reads for a sequence.

    index:  the keys that it reads [n], counted from the sequence's first; None for the sequence's own
    seen:   which of these each query sees, bool [new, n]; None for what the causal mask lets in
    chosen: the numbers of the queries that it computes; None for all"""
    index = torch.arange(s.length, device=o.q.device) if index is None else index
    seen = index <= last_seen(s, o.q.device, chosen) if seen is None else seen
    q = o.q[s.queries] if chosen is None else o.q[s.queries][chosen]
    row = GUARD + s.keys.start + index
    k, v = with_guards(o.k)[row], with_guards(o.v)[row]
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (q, k, v))
    middle = s.prefix or len(index) // 2  # cached keys are a part; without them the first half is one
    parts = [(0, middle), (middle, len(index))]
    v = v * o.value_scale
    return Attended(
        o, s, s.queries, q, k, v, scale=o.score_scale, fp8=o.q.dtype, parts=parts, seen=seen, chosen=chosen
    )


def victim(o: MhaPrefillOperands) -> Sequence:
    """A sequence behind the first: that with the most queries, if possible of those with cached tokens."""
    return max(o.sequences[1:] or o.sequences, key=lambda s: (s.prefix > 0, s.new))


ATTENTION = AttentionOp(sequences=lambda o: list(o.sequences), victim=victim, read=read)


# Wrong keys and masks

WrongRead = Callable[[Attended], Attended]
"""Maps what a right kernel reads to what a wrong one reads."""


def reading(
    seen: Callable[[Sequence, Any, Any], torch.Tensor] | None = None,
    index: Callable[[Attended, torch.Tensor], torch.Tensor] | None = None,
    behind: int = 0,
) -> WrongRead:
    """A kernel that reads other keys, or masks them otherwise.

    seen:   maps (sequence, keys [n], the last key that each query should see [new, 1]) to what it sees, bool
    index:  maps (what a right kernel reads, keys [n]) to the keys that are read in their place
    behind: so many keys behind the sequence are read, too"""

    def wrong(a: Attended) -> Attended:
        keys = torch.arange(a.sequence.length + behind, device=a.q.device)
        last = last_seen(a.sequence, a.q.device, a.chosen)
        sees = seen(a.sequence, keys, last).expand(len(last), len(keys)) if seen else None
        keys_read = index(a, keys) if index else keys
        return read(a.operands, a.sequence, keys_read, sees, a.chosen)

    return wrong


def left_out(is_left_out: Callable[[Sequence, torch.Tensor], torch.Tensor]) -> WrongRead:
    """No query sees these keys, except for its own key. is_left_out: maps (sequence, keys [n]) to bool [n]"""
    return reading(lambda s, key, last: (key <= last) & (~is_left_out(s, key) | (key == last)))


def right_mask(s: Sequence, key: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return key <= last


def in_the_middle(s: Sequence, key: torch.Tensor) -> torch.Tensor:
    """Which keys are in the block of 64 in the middle."""
    return key // 64 == max(1, s.length // 64 // 2)


def of_the_previous(a: Attended, key: torch.Tensor) -> torch.Tensor:
    """The keys of the sequence before, which are stored before those of this one."""
    sequences = a.operands.sequences
    return key - sequences[sequences.index(a.sequence) - 1].length


KEYS: Mapping[str, WrongRead] = {
    "causal mask one token too short": reading(lambda s, k, last: (k < last) | (k == 0)),
    "causal mask one token too far": reading(lambda s, k, last: k <= last + 1, behind=1),
    "no causal mask": reading(lambda s, k, last: k >= 0),
    "cached keys left out": reading(lambda s, k, last: (k <= last) & (k >= s.prefix)),
    "causal mask aligned to the first key": reading(lambda s, k, last: k <= last - s.prefix),
    "window of 32 keys": reading(lambda s, k, last: (k <= last) & (k > last - 32)),
    "last cached key left out": left_out(lambda s, k: k == s.prefix - 1),
    "block of 64 in the middle left out": left_out(in_the_middle),
    "keys behind whole blocks of 64 left out": left_out(lambda s, k: k >= (s.length - 1) // 64 * 64),
    "first new key counted twice": reading(index=lambda a, k: torch.cat([k[:1] + a.sequence.prefix, k])),
    "last key of the previous sequence counted too": reading(index=lambda a, k: torch.cat([k[:1] - 1, k])),
    "block of 64 in the middle replaced by the one before": reading(
        right_mask, lambda a, k: torch.where(in_the_middle(a.sequence, k), k - 64, k)
    ),
    "keys of the previous sequence": reading(right_mask, of_the_previous),
}


def output_of(wrong_read: WrongRead) -> Wrong:
    return lambda a: wrong_read(a).out()


def replaced(a: Attended, **operands: torch.Tensor) -> Attended:
    return read(a.operands.replaced(**operands), a.sequence, chosen=a.chosen)


def changed_operand(name: str, change: Round) -> WrongRead:
    """name: of the operand, q, k or v. change: gets it with its guards, fp32 [tokens, heads, width]"""

    def wrong(a: Attended) -> Attended:
        changed = change(with_guards(getattr(a.operands, name)).float())
        return replaced(a, **{name: changed[GUARD:-GUARD]})

    return wrong


OWN_MISTAKES: Mapping[str, Wrong] = {
    **{name: output_of(wrong_read) for name, wrong_read in KEYS.items()},
    "result in fp16": output_with(Arithmetic(round_result=fp16)),
    "hidden keys scored -10": lambda a: a.by_softmax(a.scores.nan_to_num(neginf=-10.0)),
    "values rounded to FP8": output_of(changed_operand("v", partial(fp8, E4M3))),
    "keys of the previous head": output_of(changed_operand("k", lambda k: k.roll(1, 1))),
    "values one token behind": output_of(changed_operand("v", lambda v: v.roll(1, 0))),
}


def stored_past_the_end(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
    """The last tile of the first sequence is stored whole, over the first rows of the next sequence."""
    end = o.sequences[0].queries.stop
    return put(right, slice(end, end + 16), right[end - 1])


# Calls that round the softmax weights to FP8. The first ones are wrong everywhere, because a mistake may show
# only in the average over the whole output.


def through_e5m2(name: str) -> Wrong:
    """The operand `name` is rounded to e5m2."""
    in_e5m2 = changed_operand(name, partial(fp8, E5M2))
    return lambda a: in_e5m2(a).out(Arithmetic(round_weights=partial(fp8, a.fp8)))


def with_descales(change: Callable[[MhaPrefillOperands], dict[str, torch.Tensor]]) -> Wrong:
    """change: maps operands to other descales by name"""
    return lambda a: replaced(a, **change(a.operands)).in_fp8()


OWN_FP8_MISTAKES_EVERYWHERE: Mapping[str, Wrong] = {
    "weights up to 2^11 saturated": in_fp8(how=Arithmetic(headroom=11.0)),
    "queries through e5m2": through_e5m2("q"),
    "values through e5m2": through_e5m2("v"),
    "maximum not raised until a weight exceeds 2^20": in_fp8(how=Arithmetic(block=16, lazy=20.0)),
}
OWN_FP8_MISTAKES: Mapping[str, Wrong] = {
    "block of 64 in the middle left out": lambda a: left_out(in_the_middle)(a).in_fp8(),
    "q's descale left out": with_descales(lambda o: {"q_descale": torch.ones_like(o.q_descale)}),
    "v's descale left out": with_descales(lambda o: {"v_descale": torch.ones_like(o.v_descale)}),
    "descales of k and v swapped": with_descales(
        lambda o: {"k_descale": o.v_descale, "v_descale": o.k_descale}
    ),
    "values read in the other FP8 format": lambda a: (
        replaced(a, v=a.operands.v.view(OTHER_FP8[a.fp8])).out().nan_to_num(nan=0.0)
    ),
}


MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION.mistakes(OWN_MISTAKES),
    Mistake("rows shifted by one", ATTENTION.changed_output(lambda out: out.roll(1, 0))),
    Mistake("stored past the end of a sequence", stored_past_the_end),
    *ATTENTION.mistakes_in_fp8(OWN_FP8_MISTAKES_EVERYWHERE, OWN_FP8_MISTAKES),
)


def answers(o: MhaPrefillOperands, rows: list[int], columns: slice) -> Answers:
    row_numbers = torch.tensor(rows, device=o.q.device)
    attended = []
    for sequence in o.sequences:
        is_own = (row_numbers >= sequence.queries.start) & (row_numbers < sequence.queries.stop)
        chosen = row_numbers[is_own] - sequence.queries.start
        if len(chosen):
            attended.append(read(o, sequence, chosen=chosen))
    # Wrong descales, which are in OWN_FP8_MISTAKES, are for calls that make FP8 operands bf16, too.
    return ATTENTION.answers(attended, {**OWN_MISTAKES, **OWN_FP8_MISTAKES}, columns)
