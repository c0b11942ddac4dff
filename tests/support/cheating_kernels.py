"""Implementations of mla_decode that give right answers in the first check only, brought in through
KERNEL_BENCH_PLUGINS: each is caught by one of the later stages, or by the operands it leaves behind."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode

CHECKED = 2  # calls before anything is timed: one in prepare, one for the check


class Honest(NaiveMlaDecode):
    """Says what it runs, too."""

    name = "cheating.honest"
    op = "mla_decode"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: "plain torch"
        return prepared


class _Cheating(NaiveMlaDecode):
    op = "mla_decode"
    requires = "a test"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.compute, prepared.calls = prepared.call, 0

        def call() -> None:
            prepared.calls += 1
            self.cheat(prepared)

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)

    def cheat(self, prepared) -> None:
        raise NotImplementedError


class CachedAnswer(_Cheating):
    """Writes the answer of its first call again and again."""

    name = "cheating.cached_answer"

    def cheat(self, prepared):
        if prepared.calls == 1:
            prepared.compute()
            prepared.answer = prepared.out.clone()
        prepared.out.copy_(prepared.answer)


class AnswerByPointer(_Cheating):
    """Remembers answers by where the operands lie."""

    name = "cheating.answer_by_pointer"
    answers: ClassVar[dict] = {}

    def cheat(self, prepared):
        key = prepared.operands.q.data_ptr(), prepared.operands.kv.data_ptr(), prepared.out.shape
        if key not in self.answers:
            prepared.compute()
            self.answers[key] = prepared.out.clone()
        prepared.out.copy_(self.answers[key])


class KeepsItsAnswer(_Cheating):
    """Computes once for equal inputs, into memory of its own."""

    name = "cheating.keeps_its_answer"

    def cheat(self, prepared):
        if prepared.calls == 1:
            prepared.seen = prepared.operands.q.new_empty(0), prepared.operands.kv
        q, kv = prepared.operands.q, prepared.operands.kv.nan_to_num()
        if not (torch.equal(q, prepared.seen[0]) and torch.equal(kv, prepared.seen[1])):
            prepared.seen = q.clone(), kv
            prepared.compute()
            answer = prepared.out.clone()
            prepared.result = lambda: answer


class StopsComputing(_Cheating):
    """Leaves the output of its first calls where it is."""

    name = "cheating.stops_computing"

    def cheat(self, prepared):
        if prepared.calls <= CHECKED:
            prepared.compute()


class WrongWhenTimed(_Cheating):
    """Clears the output once it has been called more often than the check does, on whatever operands."""

    name = "cheating.wrong_when_timed"
    calls = 0

    def cheat(self, prepared):
        self.calls += 1
        prepared.compute()
        if self.calls > CHECKED:
            prepared.out.zero_()


class StaleCopy(_Cheating):
    """Keeps a copy of the cache in its own layout and does not load new contents into it."""

    name = "cheating.stale_copy"

    def prepare(self, operands, out):
        prepared = super().prepare(operands.copy(["kv"]), out)
        prepared.load = lambda live: None
        return prepared

    def cheat(self, prepared):
        prepared.compute()


class ConvertsWhenLoaded(_Cheating):
    """Keeps a copy of the cache that is made when it is loaded, and says that it reads the cache itself."""

    name = "cheating.converts_when_loaded"

    def prepare(self, operands, out):
        prepared = super().prepare(operands.copy(["kv"]), out)

        def load(live) -> None:
            operands.q.copy_(live["q"])
            operands.kv.copy_(live["kv"])
            prepared.operands.kv.copy_(live["kv"])

        prepared.load, prepared.inputs = load, operands.live_tensors
        return prepared

    def cheat(self, prepared):
        prepared.compute()


class StalePageTable(_Cheating):
    """Remembers the page table that it was first prepared with."""

    name = "cheating.stale_page_table"
    slots = None

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        if self.slots is None:
            self.slots = prepared.slots
        prepared.slots = self.slots
        return prepared

    def cheat(self, prepared):
        prepared.compute()


class WritesOperands(_Cheating):
    """Clears the slots that hold no token."""

    name = "cheating.writes_operands"

    def cheat(self, prepared):
        prepared.compute()
        prepared.operands.kv.nan_to_num_()


class FirstSetOnly(_Cheating):
    """Computes on the first of the sets of operands that calls rotate over (they share q), and nothing on
    the others."""

    name = "cheating.first_set_only"
    first = (0, 0)

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        pointers = operands.q.data_ptr(), operands.kv.data_ptr()
        if pointers[0] != self.first[0]:
            self.first = pointers
        prepared.is_first = pointers == self.first
        return prepared

    def cheat(self, prepared):
        if prepared.is_first:
            prepared.compute()


class WritesOperandsWhenTimed(_Cheating):
    """The same, but not before it is timed."""

    name = "cheating.writes_operands_when_timed"
    runtime = "writer"
    calls = 0

    def cheat(self, prepared):
        self.calls += 1
        prepared.compute()
        if self.calls > CHECKED:
            prepared.operands.kv.nan_to_num_()


class SharesWithTheWriter(NaiveMlaDecode):
    """Honest, in the worker of the one above."""

    name = "cheating.shares_with_the_writer"
    op = "mla_decode"
    runtime = "writer"
