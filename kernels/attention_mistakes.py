"""Attention as kernels compute it, right and wrong, and the mistakes that MLA decode and MHA prefill have in
common. Kernels take keys in blocks, and some combine the results of several parts of the keys.

Tensors are fp32: scores [..., keys], values [..., keys, width]. A sum of exponentials is given as its log2
[..., 1], which is called a log-sum here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from kernels.attention import SCALE
from kernels.mistakes import (
    E4M3,
    E5M2,
    Answers,
    Compute,
    Mistake,
    Round,
    bf16,
    exact,
    fp8,
    fp8_truncated,
    fp16,
    listed,
    put,
    truncated_to,
)

LOG2E = math.log2(math.e)
PartResult = tuple[torch.Tensor, torch.Tensor]
"""The attention of some of the keys: their log-sum [..., 1], and their result [..., width]."""
ROPE = slice(-64, None)  # the columns of q and k that are rotated


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel attends, with exponentials to base 2. The last five are for wrong kernels."""

    block: int = 64  # keys of a step
    round_weights: Round = bf16  # rounds the weights before the second product
    round_summed: Round = exact  # rounds the weights before they are summed
    round_scores: Round = exact
    round_total: Round = exact  # rounds the sum of the weights after each step
    round_result: Round = exact  # rounds the result after each step
    headroom: float = 0.0  # the largest weight is 2 ** headroom
    lazy: float = 0.0  # the maximum is raised only where a score exceeds it by more than this
    # Blocks are taken in pairs. The weights of the first are rounded again, scaled to the maximum of both.
    pairs: bool = False
    backwards: bool = False  # the last block comes first
    exp2: Callable[[torch.Tensor], torch.Tensor] = torch.exp2

    first_peak: float = -math.inf  # the maximum before the first step
    has_maximum: bool = True  # the maximum is subtracted from the scores
    rescales_result: bool = True  # the result is scaled down when the maximum rises
    rescales_total: bool = True  # the sum of the weights is scaled down when the maximum rises
    delayed: bool = False  # the values of a step are multiplied by the weights of the step before


EXACT = Arithmetic(block=1 << 30, round_weights=exact)
IN_BF16 = Arithmetic()


def attend(scores: torch.Tensor, values: torch.Tensor, how: Arithmetic = IN_BF16) -> PartResult:
    """The attention by scores (natural logarithms, -inf where masked). A query that sees no key gets 0."""
    scores = how.round_scores(scores * LOG2E)
    steps = list(zip(scores.split(how.block, -1), values.split(how.block, -2), strict=True))
    if how.backwards:
        steps.reverse()
    peak = scores.new_full((*scores.shape[:-1], 1), how.first_peak)
    total = torch.zeros_like(peak)
    result = scores.new_zeros(*scores.shape[:-1], values.shape[-1])
    previous: torch.Tensor | None = None  # the rounded weights of the step before
    for number, (step_scores, v) in enumerate(steps):
        highest = peak.maximum(step_scores.amax(-1, keepdim=True))
        if how.lazy:
            highest = torch.where(peak.isinf() | (highest > peak + how.lazy), highest, peak)
        if not how.has_maximum:
            highest = torch.zeros_like(peak)
        base = finite(highest)
        rescale = how.exp2(peak - base)
        exponentials = how.exp2(step_scores - base + how.headroom)
        rounded = how.round_weights(exponentials)
        if how.pairs and number % 2 == 0 and number + 1 < len(steps):
            scores_of_next, _ = steps[number + 1]
            next_highest = highest.maximum(scores_of_next.amax(-1, keepdim=True))
            next_rescale = how.exp2(base - finite(next_highest))
            rounded_again = how.round_weights(rounded * next_rescale)
            # The scale is taken out here, because the next step applies it to the result: only what was
            # rounded again stays changed. The clamp avoids a division by 0.
            rounded = torch.where(next_rescale > 0, rounded_again / next_rescale.clamp(min=1e-30), 0.0)
        if how.rescales_total:
            total = total * rescale
        total = how.round_total(total + how.round_summed(exponentials).sum(-1, True))
        if how.rescales_result:
            result = result * rescale
        weights = rounded
        if how.delayed and previous is not None:
            weights = previous[..., : v.shape[-2]]
        result = how.round_result(result + weights @ v)
        peak = highest
        previous = rounded
    sees_no_key = peak == -math.inf
    log_sum = finite(peak) - how.headroom + total.log2()
    return torch.where(sees_no_key, -math.inf, log_sum), torch.where(sees_no_key, 0.0, result / total)


def finite(peak: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 where there is none yet (-inf)."""
    return torch.where(peak == -math.inf, 0.0, peak)


def combine(
    parts: list[PartResult], round_results: Round = exact, change_log_sums: Round = exact
) -> torch.Tensor:
    """The result of all keys [..., width]. The functions change the results and log-sums of the parts."""
    log_sums = change_log_sums(torch.stack([log_sum for log_sum, _ in parts]))
    results = round_results(torch.stack([result for _, result in parts]))
    weights = (log_sums - log_sums.amax(0)).exp2()
    return (weights / weights.sum(0) * results).sum(0)


def evenly(keys: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Splits keys into at most so many parts of whole units, each (begin, end). The last may be shorter."""
    length = math.ceil(math.ceil(keys / parts) / unit) * unit
    return [(begin, min(keys, begin + length)) for begin in range(0, keys, length)]


@dataclass(frozen=True)
class Attended:
    """What a kernel reads for a sequence, right or wrong. Results are in the layout of the output, [query
    tokens * heads, width] in MLA decode or [new, heads, width] in MHA prefill."""

    operands: Any
    sequence: Any  # its number in MLA decode, a `Sequence` in MHA prefill
    rows: Any  # the index of its rows in the output
    q: torch.Tensor  # [query tokens * heads, width] or [heads, new, width]
    k: torch.Tensor  # [(heads,) keys, width]
    v: torch.Tensor
    scale: float  # the scale of the scores, times the scales of FP8 operands
    fp8: torch.dtype  # the FP8 format that a call rounds to
    parts: Iterable[tuple[int, int]]  # the parts of the keys that are combined, each (begin, end)
    # Which keys each query sees, [query tokens * heads, keys] or [new, keys]; None for all.
    seen: torch.Tensor | None = None
    chosen: torch.Tensor | None = None  # the numbers of the sequence's queries that q has; None for all

    @property
    def scores(self) -> torch.Tensor:
        scores = self.q @ self.k.mT * self.scale
        return scores if self.seen is None else scores.masked_fill_(~self.seen, -math.inf)

    def out(self, how: Arithmetic = EXACT, **changed: Any) -> torch.Tensor:
        """The output of the sequence. changed: by name, attributes that replace those of this object"""
        read = replace(self, **changed)
        _, result = attend(read.scores, read.v, how)
        return result.movedim(0, -2)

    def by_softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """The output with other scores. Scores behind the last key only make the weights of keys smaller."""
        return (scores.softmax(-1)[..., : self.v.shape[-2]] @ self.v).movedim(0, -2)

    def in_fp8(
        self,
        how: Arithmetic = IN_BF16,
        weights: torch.dtype | None = None,
        query: torch.dtype | None = None,
        **changed: Any,
    ) -> torch.Tensor:
        """The output of a call that rounds softmax weights and q to FP8. Where q has FP8 values, that does
        not change them. how: if its `round_weights` is not bf16's, weights are rounded by that instead;
        weights, query: the formats, by default `fp8`"""
        if how.round_weights is bf16:
            how = replace(how, round_weights=partial(fp8, weights or self.fp8))
        q = fp8(query or self.fp8, changed.pop("q", self.q))
        return self.out(how, q=q, **changed)

    def in_parts(self, by: Callable[[list[PartResult]], torch.Tensor], overlap: int = 0) -> torch.Tensor:
        """The output of a call in parts, each with `overlap` keys of the next. by: combines their results"""
        scores = self.scores
        results = []
        for begin, end in self.parts:
            keys = slice(begin, end + overlap)
            results.append(attend(scores[..., keys], self.v[..., keys, :]))
        return by(results).movedim(0, -2)


Wrong = Callable[[Attended], torch.Tensor]
"""Returns what a wrong kernel makes of a sequence, fp32 in the layout of the output."""


def output_with(how: Arithmetic = EXACT, **changed: Round) -> Wrong:
    """A kernel with this arithmetic, which reads other values. changed: by the name of an attribute of
    Attended, a function that maps it to the value that is read"""

    def wrong(a: Attended) -> torch.Tensor:
        values = {name: change(getattr(a, name)) for name, change in changed.items()}
        return a.out(how, **values)

    return wrong


def in_fp8(**options: Any) -> Wrong:
    """A kernel that computes `Attended.in_fp8` with these options."""
    return lambda a: a.in_fp8(**options)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def without(columns: slice, q: torch.Tensor) -> torch.Tensor:
    """q with zeros in these columns."""
    return put(q, (..., columns), 0.0)


def other_rope_order(q: torch.Tensor) -> torch.Tensor:
    """q with its rotated columns interleaved, where they should be in two halves."""
    return put(q, (..., ROPE), torch.stack(q[..., ROPE].chunk(2, -1), -1).flatten(-2))


def exp2_linear(x: torch.Tensor) -> torch.Tensor:
    """2 ** x by a straight line between powers of two, which is at most 6 percent too high."""
    x = x.clamp(min=-126.0)  # the exponent of the smallest normal fp32
    whole = x.floor()
    return torch.ldexp(1.0 + (x - whole), whole.int())


def combined(change_log_sums: Round) -> Wrong:
    """A kernel that combines parts after this function has changed their log-sums."""
    return lambda a: a.in_parts(partial(combine, change_log_sums=change_log_sums))


def not_normalised(a: Attended) -> torch.Tensor:
    scores = a.scores
    return ((scores - scores.amax(-1, keepdim=True)).exp() @ a.v).movedim(0, -2)


# What both ops can do wrong in a sequence, in a call of bf16.
SHARED_MISTAKES: Mapping[str, Wrong] = {
    "partial results averaged": lambda a: a.in_parts(
        lambda parts: torch.stack([result for _, result in parts]).mean(0)
    ),
    "log-sums of base 2 taken for natural ones": combined(times(LOG2E)),
    "log-sums of the previous row": combined(lambda logs: logs.roll(1, -2)),
    "log-sums in bf16": combined(bf16),
    "no maximum subtracted": output_with(Arithmetic(has_maximum=False)),
    "maximum begins at 0": output_with(Arithmetic(first_peak=0.0)),
    "result not rescaled when the maximum rises": output_with(Arithmetic(rescales_result=False, block=32)),
    "sum not rescaled when the maximum rises": output_with(Arithmetic(rescales_total=False, block=32)),
    "values of the next block": output_with(Arithmetic(delayed=True, block=32)),
    "scores in bf16": output_with(Arithmetic(round_scores=bf16)),
    "scores in fp16": output_with(Arithmetic(round_scores=fp16)),
    "weights in FP8": output_with(Arithmetic(round_weights=partial(fp8, E4M3))),
    "weights of 5 bits": output_with(Arithmetic(round_weights=partial(truncated_to, 5))),
    "result in bf16 after each token": output_with(Arithmetic(round_result=bf16, block=1)),
    "sum in bf16 after each token": output_with(Arithmetic(round_total=bf16, block=1)),
    "exp2 by straight lines": output_with(Arithmetic(exp2=exp2_linear)),
    "row of zeros counted behind the last key": lambda a: a.by_softmax(pad(a.scores, (0, 1))),
    "softmax weights not divided by their sum": not_normalised,
    "scale 1/sqrt(128)": output_with(scale=times((192 / 128) ** 0.5)),
    "scale 1/192": output_with(scale=times(SCALE)),
    "scale left out": output_with(scale=times(1 / SCALE)),
    "scale 2 percent too small": output_with(scale=times(0.98)),
    "rope part left out": output_with(q=partial(without, ROPE)),
    "last channel left out": output_with(q=partial(without, slice(-1, None))),
    "rope part in the other order": output_with(q=other_rope_order),
}

# Changes of the right output of a sequence.
OUTPUT_MISTAKES: Mapping[str, Round] = {
    "heads shifted by one": lambda out: out.roll(1, -2),
    "last row of a sequence never written": lambda out: put(out, -1, math.nan),
    "last 8 columns zero": lambda out: put(out, (..., slice(-8, None)), 0.0),
    "columns in pairs swapped": lambda out: out.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "added to what the output held": lambda out: out.float() * 2.0,
    "output 2 percent too large": lambda out: out.float() * 1.02,
    "output of 5 bits": lambda out: truncated_to(5, out.float()),
}

# What both ops can do wrong in all sequences of a call that rounds to FP8.
SHARED_FP8_MISTAKES_EVERYWHERE: Mapping[str, Wrong] = {
    "output 2 percent too large everywhere": lambda a: a.in_fp8() * 1.02,
    "output 3 percent too large everywhere": lambda a: a.in_fp8() * 1.03,
    "output 5 percent too small everywhere": lambda a: a.in_fp8() * 0.95,
    "output twice too large everywhere": lambda a: a.in_fp8() * 2.0,
    "weights truncated": lambda a: a.in_fp8(Arithmetic(round_weights=partial(fp8_truncated, a.fp8))),
    "weights in e5m2": in_fp8(weights=E5M2),
}
# What both ops can do wrong in a sequence of such a call.
SHARED_FP8_MISTAKES: Mapping[str, Wrong] = {
    "scores in FP8": lambda a: a.in_fp8(Arithmetic(round_scores=partial(fp8, a.fp8))),
    "scale 10 percent too large": lambda a: a.in_fp8(scale=a.scale * 1.1),
    "scale 1/sqrt(128)": lambda a: a.in_fp8(scale=a.scale * (192 / 128) ** 0.5),
}


@dataclass(frozen=True)
class AttentionOp:
    """How to find the sequences of an op, each as `Attended.sequence`."""

    sequences: Callable[[Any], list[Any]]  # maps operands to all sequences
    victim: Callable[[Any], Any]  # maps operands to the sequence that mistakes in one sequence change
    read: Callable[[Any, Any], Attended]  # maps operands and a sequence to what a right kernel reads

    def kernel(
        self, sequences: Callable[[Any], list[Any]], change: Callable[[Attended, torch.Tensor], torch.Tensor]
    ) -> Compute:
        """A kernel that is wrong in the sequences that the first function returns of operands.
        change: (what a right kernel reads, right output) -> wrong output"""

        def compute(o: Any, right: torch.Tensor) -> torch.Tensor:
            for s in sequences(o):
                a = self.read(o, s)
                right[a.rows] = change(a, right[a.rows]).to(right.dtype).view_as(right[a.rows])
            return right

        return compute

    def everywhere(self, wrong: Wrong) -> Compute:
        """A kernel that is wrong in all sequences."""
        return self.kernel(self.sequences, lambda a, right: wrong(a))

    def in_one(self, wrong: Wrong) -> Compute:
        """A kernel that is wrong in the sequence `victim`."""
        return self.kernel(lambda o: [self.victim(o)], lambda a, right: wrong(a))

    def changed_output(self, change: Round) -> Compute:
        """A kernel that is wrong in the sequence `victim`. change: makes a wrong output of the right one"""
        return self.kernel(lambda o: [self.victim(o)], lambda a, right: change(right))

    def answers(self, read: list[Attended], own: Mapping[str, Wrong], columns: slice) -> Answers:
        """What kernels that are wrong everywhere give for some sequences. The diagnosis does limited work on
        these answers, so the op's own come first, and those that take long come last.
        read: what a right kernel reads for each sequence; columns: those of the output that are returned"""

        def answer(wrong: Wrong) -> torch.Tensor:
            row_shape = read[0].operands.q.shape[1:-1]  # ([query tokens,] heads)
            outputs = [out.reshape(-1, *row_shape, out.shape[-1]) for out in map(wrong, read)]
            return torch.cat([out[..., columns] for out in outputs])

        wrongs = {**own, **SHARED_MISTAKES}
        slow_last = sorted(wrongs, key=lambda name: name.endswith("after each token"))
        return {name: partial(answer, wrongs[name]) for name in slow_last}

    def mistakes(self, own: Mapping[str, Wrong]) -> tuple[Mistake, ...]:
        """What both ops can do wrong in a call of bf16. own: what this op can do wrong in a sequence"""
        computes = {name: self.in_one(wrong) for name, wrong in {**SHARED_MISTAKES, **own}.items()}
        computes |= {name: self.changed_output(change) for name, change in OUTPUT_MISTAKES.items()}
        computes["last sequence never computed"] = self.kernel(
            lambda o: self.sequences(o)[-1:], lambda a, right: torch.zeros_like(right)
        )
        return listed(computes)

    def mistakes_in_fp8(
        self, everywhere: Mapping[str, Wrong], in_one: Mapping[str, Wrong]
    ) -> tuple[Mistake, ...]:
        """Mistakes of a call that rounds to FP8. everywhere, in_one: the op's own, in all sequences or one"""
        everywhere = {**SHARED_FP8_MISTAKES_EVERYWHERE, **everywhere}
        in_one = {**SHARED_FP8_MISTAKES, **in_one}
        computes = {name: self.everywhere(wrong) for name, wrong in everywhere.items()}
        computes |= {name: self.in_one(wrong) for name, wrong in in_one.items()}
        return listed(computes, activations="fp8", form="{}, in FP8")
