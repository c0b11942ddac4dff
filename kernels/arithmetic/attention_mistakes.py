"""Kernels of attention that are wrong in one way each: what MLA decode and MHA prefill have in common.

A sequence is what the op takes for one: a number for MLA decode, a `Sequence` for MHA prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.attention import EXACT, IN_BF16, LOG2E, Arithmetic, Partial, attend, combine
from kernels.arithmetic.roundings import E4M3, E5M2, Round, bf16, fp8, fp8_truncated, fp16, kept
from kernels.mistakes import Compute, put

Attend = Callable[[Any, Any], torch.Tensor]
"""(operands, a sequence) -> its output in the layout of the op, fp32."""


def exp2_linear(x: torch.Tensor) -> torch.Tensor:
    """2 ** x by a straight line between powers of two, which is at most 6 percent too high."""
    whole = x.clamp(min=-126.0).floor()
    return torch.ldexp(1.0 + (x.clamp(min=-126.0) - whole), whole.int())


WRONG_SOFTMAX: Mapping[str, Arithmetic] = {
    "no maximum subtracted": Arithmetic(has_maximum=False),
    "maximum begins at 0": Arithmetic(first_peak=0.0),
    "result not rescaled when the maximum rises": Arithmetic(of_result=False, block=32),
    "sum not rescaled when the maximum rises": Arithmetic(of_total=False, block=32),
    "values of the next block": Arithmetic(delayed=True, block=32),
    "scores in bf16": Arithmetic(scores=bf16),
    "scores in fp16": Arithmetic(scores=fp16),
    "weights in FP8": Arithmetic(weights=partial(fp8, E4M3)),
    "weights of 5 bits": Arithmetic(weights=partial(kept, 5)),
    "result in bf16 after each token": Arithmetic(accumulator=bf16, block=1),
    "sum in bf16 after each token": Arithmetic(total=bf16, block=1),
    "exp2 by straight lines": Arithmetic(exp2=exp2_linear),
}

WRONG_LOG_SUMS: Mapping[str, Round] = {
    "log-sums of base 2 taken for natural ones": lambda logs: logs * LOG2E,
    "log-sums of the previous row": lambda logs: logs.roll(1, -2),
    "log-sums in bf16": bf16,
}
"""Changes of the parts' log-sums before they are combined."""


def averaged(parts: list[Partial]) -> torch.Tensor:
    return torch.stack([result for _, result in parts]).mean(0)


def without(columns: slice, q: torch.Tensor) -> torch.Tensor:
    """q [..., width] with zeros in some columns."""
    return put(q, (..., columns), 0.0)


def other_rope_order(rope: slice, q: torch.Tensor) -> torch.Tensor:
    """q [..., width] whose rope part is interleaved though it should be in two halves."""
    return put(q, (..., rope), torch.stack(q[..., rope].chunk(2, -1), -1).flatten(-2))


@dataclass(frozen=True)
class AttentionOp:
    """How the mistakes reach into an op of attention, and what both ops can do wrong."""

    rope: slice
    """The columns of q that are rotated, which are the last ones."""
    sequences: Callable[[Any], list[Any]]
    """operands -> all sequences."""
    victim: Callable[[Any], Any]
    """operands -> the sequence that is wrong where only one is."""
    rows: Callable[[Any], Any]
    """A sequence -> the index of its rows in the output."""
    queries: Callable[[Any, Any], torch.Tensor]
    """(operands, a sequence) -> its queries, fp32 [..., width]."""
    scored: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(operands, a sequence) -> masked scores [..., keys] and values [..., keys, width]. Keywords change what
    is read; q replaces the queries, and scale is a factor on the softmax scale."""
    parts: Callable[[Any, int], list[tuple[int, int]]]
    """(a sequence, its keys) -> the parts of it that are combined, each (begin, end)."""
    laid_out: Round
    """Brings a result from the layout of the scores into that of the output."""
    fp8: Callable[[Any], torch.dtype]
    """operands -> the FP8 format that a call rounds to."""

    def attend(self, o: Any, s: Any, how: Arithmetic = EXACT, **changed: Any) -> torch.Tensor:
        """The output of a sequence; right unless something is changed."""
        return self.laid_out(attend(*self.scored(o, s, **changed), how)[1])

    def in_fp8(
        self,
        o: Any,
        s: Any,
        how: Arithmetic = IN_BF16,
        weights: torch.dtype | None = None,
        query: torch.dtype | None = None,
        q: torch.Tensor | None = None,
        **changed: Any,
    ) -> torch.Tensor:
        """Rounds q and the softmax weights to the op's FP8 format unless another one is given. A q that is
        given in FP8 stays as it is."""
        if how.weights is bf16:
            how = replace(how, weights=partial(fp8, weights or self.fp8(o)))
        q = fp8(query or self.fp8(o), self.queries(o, s) if q is None else q)
        return self.attend(o, s, how, q=q, **changed)

    def everywhere(self, of: Attend) -> Compute:
        def compute(o: Any, right: torch.Tensor) -> torch.Tensor:
            for s in self.sequences(o):
                right[self.rows(s)] = of(o, s).to(right.dtype)
            return right

        return compute

    def in_one(self, of: Attend) -> Compute:
        def compute(o: Any, right: torch.Tensor) -> torch.Tensor:
            s = self.victim(o)
            return put(right, self.rows(s), of(o, s).to(right.dtype))

        return compute

    def output(self, change: Round) -> Compute:
        """change: the right output of the sequence that is wrong -> another output."""

        def compute(o: Any, right: torch.Tensor) -> torch.Tensor:
            rows = self.rows(self.victim(o))
            return put(right, rows, change(right[rows]).to(right.dtype))

        return compute

    def in_parts(self, by: Callable[[list[Partial]], torch.Tensor], overlap: int = 0) -> Attend:
        """by: combines the parts' results; overlap: so many keys are counted in the part before, too."""

        def of(o: Any, s: Any) -> torch.Tensor:
            scores, v = self.scored(o, s)
            places = [slice(a, b + overlap) for a, b in self.parts(s, v.shape[-2])]
            return self.laid_out(by([attend(scores[..., part], v[..., part, :]) for part in places]))

        return of

    def query(self, change: Round) -> Attend:
        """change: q [..., width] -> other q."""
        return lambda o, s: self.attend(o, s, q=change(self.queries(o, s)))

    def zero_counted(self, o: Any, s: Any) -> torch.Tensor:
        """Counts a key and a value of zeros behind the last key."""
        scores, v = self.scored(o, s)
        weights = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)
        return self.laid_out(weights[..., :-1] @ v)

    def last_left_out(self, o: Any, right: torch.Tensor) -> torch.Tensor:
        return put(right, self.rows(self.sequences(o)[-1]), 0.0)

    def mistakes(self) -> dict[str, Compute]:
        """What both ops can do wrong in a call of bf16, in one sequence unless the name says otherwise."""
        sequences: Mapping[str, Attend] = {
            "partial results averaged": self.in_parts(averaged),
            **{
                name: self.in_parts(partial(combine, log_sums=change))
                for name, change in WRONG_LOG_SUMS.items()
            },
            **{name: partial(self.attend, how=how) for name, how in WRONG_SOFTMAX.items()},
            "row of zeros counted behind the last key": self.zero_counted,
            "scale 1/sqrt(128)": partial(self.attend, scale=(192 / 128) ** 0.5),
            "scale 2 percent too small": partial(self.attend, scale=0.98),
            "rope part left out": self.query(partial(without, self.rope)),
            "last channel left out": self.query(partial(without, slice(-1, None))),
            "rope part in the other order": self.query(partial(other_rope_order, self.rope)),
        }
        outputs: Mapping[str, Round] = {
            "heads shifted by one": lambda out: out.roll(1, -2),
            "last row of a sequence never written": lambda out: put(out, -1, math.nan),
            "last 8 columns zero": lambda out: put(out, (..., slice(-8, None)), 0.0),
            "columns in pairs swapped": lambda out: out.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
            "added to what the output held": lambda out: out.float() * 2.0,
            "output 2 percent too large": lambda out: out.float() * 1.02,
            "output of 5 bits": lambda out: kept(5, out.float()),
        }
        return {
            **{name: self.in_one(of) for name, of in sequences.items()},
            **{name: self.output(change) for name, change in outputs.items()},
            "last sequence never computed": self.last_left_out,
        }

    def mistakes_in_fp8(self) -> dict[str, Compute]:
        """What both ops can do wrong in a call that rounds to FP8."""

        def times(factor: float) -> Compute:
            return self.everywhere(lambda o, s: self.in_fp8(o, s) * factor)

        def truncated(o: Any, s: Any) -> torch.Tensor:
            return self.in_fp8(o, s, Arithmetic(weights=partial(fp8_truncated, self.fp8(o))))

        def scores_rounded(o: Any, s: Any) -> torch.Tensor:
            return self.in_fp8(o, s, Arithmetic(scores=partial(fp8, self.fp8(o))))

        return {
            "output 2 percent too large everywhere": times(1.02),
            "output 3 percent too large everywhere": times(1.03),
            "output 5 percent too small everywhere": times(0.95),
            "output twice too large everywhere": times(2.0),
            "weights truncated": self.everywhere(truncated),
            "weights in e5m2": self.everywhere(partial(self.in_fp8, weights=E5M2)),
            "scores in FP8": self.in_one(scores_rounded),
            "scale 10 percent too large": self.in_one(partial(self.in_fp8, scale=1.1)),
            "scale 1/sqrt(128)": self.in_one(partial(self.in_fp8, scale=(192 / 128) ** 0.5)),
        }
