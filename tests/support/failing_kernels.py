"""Rows of mla_decode that go wrong by accident, each in one way, brought into runs by KERNEL_BENCH_PLUGINS.

They do it on so many sequences as `batches` says, of the case or of a ragged one, and are right on others.
"""

from typing import ClassVar

from harness.workers.process import WorkerFailure
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode
from kernels.op import Unsupported

CHECKED = 2  # calls before anything is timed: one in prepare, one for the check


class _Failing(NaiveMlaDecode):
    op = "mla_decode"
    requires = "a test"
    batches: tuple[int, ...] = (2, 3)
    calls = 0  # of all that was prepared

    def prepare(self, operands, out):
        if not self.fails_on(operands):
            return super().prepare(operands, out)
        prepared = super().prepare(self.given(operands), out)
        prepared.compute, prepared.calls = prepared.call, 0

        def call() -> None:
            self.calls += 1
            prepared.calls += 1
            self.run(prepared)

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)

    def fails_on(self, operands) -> bool:
        return len(operands.host_lengths) in self.batches

    def given(self, operands):
        return operands

    def run(self, prepared) -> None:
        prepared.compute()


class StopsComputing(_Failing):
    """Leaves the output of the call before."""

    name = "failing.stops_computing"

    def run(self, prepared):
        if prepared.calls <= CHECKED:
            prepared.compute()


class AnswerByAddress(_Failing):
    """Keeps outputs by where the operands lie."""

    name = "failing.answer_by_address"
    answers: ClassVar[dict] = {}

    def run(self, prepared):
        key = prepared.operands.q.data_ptr(), prepared.operands.kv.data_ptr()
        if key not in self.answers:
            prepared.compute()
            self.answers[key] = prepared.out.clone()
        prepared.out.copy_(self.answers[key])


class WrongWhenTimed(_Failing):
    """Wrong from its third call on, as one whose workspace is not cleared."""

    name = "failing.wrong_when_timed"

    def run(self, prepared):
        prepared.compute()
        if self.calls > CHECKED:
            prepared.out.zero_()


class StaleCopy(_Failing):
    """Has a copy of the cache in its own layout, and loads nothing into it."""

    name = "failing.stale_copy"

    def given(self, operands):
        return operands.copy(["kv"])

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.load = lambda live: None
        return prepared


class StalePageTable(_Failing):
    """Keeps the page table that it was first prepared with."""

    name = "failing.stale_page_table"
    slots = None

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        if self.fails_on(operands):
            self.slots = prepared.slots if self.slots is None else self.slots
            prepared.slots = self.slots
        return prepared


class WritesOperands(_Failing):
    """Clears the slots that hold no token."""

    name = "failing.writes_operands"

    def run(self, prepared):
        prepared.compute()
        prepared.operands.kv.nan_to_num_()


class WritesOperandsWhenTimed(WritesOperands):
    name = "failing.writes_operands_when_timed"
    runtime = "writer"

    def run(self, prepared):
        if self.calls > CHECKED:
            super().run(prepared)
        else:
            prepared.compute()


class SharesWithTheWriter(NaiveMlaDecode):
    """Right, in the worker of the one above."""

    op, name, runtime = "mla_decode", "failing.shares_with_the_writer", "writer"


class FirstSetOnly(_Failing):
    """Computes on the first of the sets of operands that calls rotate over (they share q)."""

    name = "failing.first_set_only"
    first = (0, 0)

    def run(self, prepared):
        pointers = prepared.operands.q.data_ptr(), prepared.operands.kv.data_ptr()
        if prepared.calls == 1 and pointers[0] != self.first[0]:
            self.first = pointers
        if pointers == self.first:
            prepared.compute()


class NinthSequence(_Failing):
    """Computes no more than eight sequences."""

    name = "failing.ninth_sequence"
    batches = (11,)

    def run(self, prepared):
        prepared.compute()
        prepared.out[8:] = 0.0


class RaisesInPrepare(_Failing):
    name = "failing.raises_in_prepare"
    runtime = "faulty"
    error: Exception = RuntimeError("no such\nluck")

    def given(self, operands):
        raise self.error


class Unsupporting(RaisesInPrepare):
    name = "failing.unsupported"
    error = Unsupported("this build has no such kernel")


class RaisesInACall(_Failing):
    name = "failing.raises_in_a_call"
    runtime = "faulty"
    error: Exception = RuntimeError("out of luck")

    def run(self, prepared):
        if prepared.calls > CHECKED + 1:
            raise self.error
        prepared.compute()


class Crashes(RaisesInACall):
    """As its parent tells it."""

    name = "failing.crashes"
    error = WorkerFailure("crashed", "the worker died of SIGSEGV while in turn")


class Hangs(RaisesInACall):
    name = "failing.hangs"
    error = WorkerFailure("timeout", "no answer within 20 s while in turn")


class Beside(NaiveMlaDecode):
    """Right, in the worker of those above, and says what it runs."""

    op, name, runtime = "mla_decode", "failing.beside", "faulty"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: "plain torch"
        return prepared
