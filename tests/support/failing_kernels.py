"""Rows of mla_decode that go wrong by accident, each in one way, brought into runs by KERNEL_BENCH_PLUGINS.

They do it on so many sequences as `batches` says, of the case or of a ragged one, and are right on others.
"""

from harness.workers.process import WorkerFailure
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode, attend
from kernels.mla_decode.providers.torch_eager import calling as calling_torch
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


def row(name: str, **facts) -> type[_Failing]:
    """Of this module: rows of another one would not be found."""
    return type(name, (_Failing,), {"name": f"failing.{name}", "__module__": __name__, **facts})


def calling(**facts):
    """The row of a function's name whose calls do what that does."""
    return lambda run: row(run.__name__, run=run, **facts)


@calling()
def stops_computing(self, prepared):
    """Leaves the output of the call before."""
    if prepared.calls <= CHECKED:
        prepared.compute()


@calling(answers={})
def answer_by_address(self, prepared):
    """Keeps outputs by where the operands lie."""
    key = prepared.operands.q.data_ptr(), prepared.operands.kv.data_ptr()
    if key not in self.answers:
        prepared.compute()
        self.answers[key] = prepared.out.clone()
    prepared.out.copy_(self.answers[key])


@calling()
def wrong_when_timed(self, prepared):
    """Wrong from its third call on, as one whose workspace is not cleared."""
    prepared.compute()
    if self.calls > CHECKED:
        prepared.out.zero_()


@calling()
def writes_operands(self, prepared):
    """Clears the slots that hold no token."""
    prepared.compute()
    prepared.operands.kv.nan_to_num_()


@calling(runtime="writer")
def writes_operands_when_timed(self, prepared):
    prepared.compute()
    if self.calls > CHECKED:
        prepared.operands.kv.nan_to_num_()


class SharesWithTheWriter(NaiveMlaDecode):
    """Right, in the worker of the one above."""

    op, name, runtime = "mla_decode", "failing.shares_with_the_writer", "writer"


@calling(first=(0, 0))
def first_set_only(self, prepared):
    """Computes on the first of the sets of operands that calls rotate over (they share q)."""
    pointers = prepared.operands.q.data_ptr(), prepared.operands.kv.data_ptr()
    if prepared.calls == 1 and pointers[0] != self.first[0]:
        self.first = pointers
    if pointers == self.first:
        prepared.compute()


@calling(batches=(11,))
def ninth_sequence(self, prepared):
    """Computes no more than eight sequences."""
    prepared.compute()
    prepared.out[8:] = 0.0


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
            slots, valid = prepared.stationary
            self.slots = slots if self.slots is None else self.slots
            prepared.compute = calling_torch(attend, operands, out, (self.slots, valid)).call
        return prepared


def raising(name: str, error: Exception, in_prepare: bool = False) -> type[_Failing]:
    def given(self, operands):
        if in_prepare:
            raise error
        return operands

    def run(self, prepared):
        if prepared.calls > CHECKED + 1:
            raise error
        prepared.compute()

    return row(name, runtime="faulty", given=given, run=run)


SEGV = WorkerFailure("crashed", "the worker died of SIGSEGV while in sample")  # as its parent tells it
HUNG = WorkerFailure("timeout", "no answer within 20 s while in sample")
RaisesInPrepare = raising("raises_in_prepare", RuntimeError("no such\nluck"), in_prepare=True)
Unsupporting = raising("unsupported", Unsupported("this build has no such kernel"), in_prepare=True)
RaisesInACall = raising("raises_in_a_call", RuntimeError("out of luck"))
Crashes, Hangs = raising("crashes", SEGV), raising("hangs", HUNG)


class Beside(NaiveMlaDecode):
    """Right, in the worker of those above, and says what it runs."""

    op, name, runtime = "mla_decode", "failing.beside", "faulty"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: "plain torch"
        return prepared
