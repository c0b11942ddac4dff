"""Implementations that cheat, of every op: a right kernel of plain torch whose calls take a short cut.
Brought into real runs by KERNEL_BENCH_PLUGINS, each in a worker of its own; the check has to refuse them.

A cheat is told how it may know that it is timed, or that an answer stands already; what it does then is
nothing, or a copy of that answer.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import kernels
from kernels.op import Implementation, Prepared
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

HONEST = {
    "block_scale_gemm": "torch.bf16",
    "fused_moe": "torch.bf16",
    "mha_prefill": "torch.naive",
    "mla_decode": "torch.naive",
}


class Cheat(Prepared):
    """A right kernel, `inner`, and what it makes of being called."""

    def __init__(self, honest: Implementation, operands: Any, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.honest = honest
        self.inner = honest.prepare(operands, out)
        self.answer: torch.Tensor | None = None
        self.calls = 0
        self.start()

    def start(self) -> None:
        """What it does before it is called."""

    def call(self) -> None:
        raise NotImplementedError

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return self.inner.inputs()

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        self.inner.load(live)

    def compute(self) -> None:
        self.inner.call()

    def remember(self) -> None:
        self.compute()
        self.answer = self.out.clone()

    def copy_answer(self) -> None:
        assert self.answer is not None
        self.out.copy_(self.answer)


class InResult(Cheat):
    """Computes when the answer is read."""

    def call(self) -> None:
        self.calls += 1

    def result(self) -> torch.Tensor:
        self.compute()
        return self.out


class InThread(Cheat):
    """Computes on a thread, and waits for it when the answer is read."""

    thread: threading.Thread | None = None

    def call(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.thread = threading.Thread(target=self.compute)
        self.thread.start()

    def result(self) -> torch.Tensor:
        if self.thread is not None:
            self.thread.join()
        return self.out


class InLoad(Cheat):
    """Computes when it is prepared and when operands are loaded."""

    def start(self) -> None:
        self.remember()

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        super().load(live)
        self.remember()

    def call(self) -> None:
        self.copy_answer()


class ConvertsInLoad(Cheat):
    """Makes copies of all live operands but the first when they are loaded, and computes on these."""

    def start(self) -> None:
        live = self.operands.live_tensors()
        self.copies = {name: tensor.clone() for name, tensor in [*live.items()][1:]}
        self.inner = self.honest.prepare(self.operands.replaced(**self.copies), self.out)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return self.operands.live_tensors()

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.inputs().items():
            tensor.copy_(live[name])
        for name, copy in self.copies.items():
            copy.copy_(live[name])

    def call(self) -> None:
        self.compute()


class CopiesByVersion(Cheat):
    """Copies its last answer while nobody wrote to the inputs, by the tensors' versions."""

    kept: tuple[tuple[int, int], ...] = ()

    def call(self) -> None:
        now = tuple((t.data_ptr(), t._version) for t in self.operands.live_tensors().values())
        if now != self.kept:
            self.kept = now
            self.remember()
        self.copy_answer()


class ConvertsAndDenies(ConvertsInLoad):
    """The same, of an implementation that says it is no plug-in."""


class ZerosWhenSurprised(ConvertsInLoad):
    """The same, and answers zeros where the operands are not what was loaded."""

    def call(self) -> None:
        self.compute()
        live = self.operands.live_tensors()
        if any(not _same(live[name], copy) for name, copy in self.copies.items()):
            self.out.zero_()


class InPrepare(Cheat):
    """Computes when it is prepared."""

    def start(self) -> None:
        self.remember()

    def call(self) -> None:
        self.copy_answer()


class IdleByVersion(Cheat):
    """Does nothing while nobody wrote to the output, by the tensor's version."""

    version = -1

    def call(self) -> None:
        if self.out._version != self.version:
            self.compute()
            self.version = self.out._version


class IdleByInputs(Cheat):
    """Does nothing while the inputs are what they were."""

    def start(self) -> None:
        self.kept: list[torch.Tensor] = []

    def call(self) -> None:
        now = list(self.operands.live_tensors().values())
        if not self.kept or any(not _same(a, b) for a, b in zip(now, self.kept, strict=True)):
            self.kept = [tensor.clone() for tensor in now]
            self.compute()


class HidesOutput(IdleByInputs):
    """The same, and its answer is one of its own, where nobody fills it."""

    def compute(self) -> None:
        super().compute()
        self.answer = self.out.clone()

    def result(self) -> torch.Tensor:
        assert self.answer is not None
        return self.answer


class IdleUnlessPoisoned(Cheat):
    """Computes only over NaN."""

    def call(self) -> None:
        if bool(self.out.isnan().any()):
            self.compute()


class IdleInTurns(Cheat):
    """Does nothing where a timer calls."""

    def call(self) -> None:
        if not _in_turn():
            self.compute()


class CopiesInTurns(Cheat):
    """Copies its last answer where a timer calls."""

    asked = False

    def call(self) -> None:
        if self.answer is None or self.asked or not _in_turn():
            self.remember()
        self.asked = False
        self.copy_answer()


class CopiesUnlessAsked(CopiesInTurns):
    """The same, but after somebody asked where its inputs are."""

    def inputs(self) -> Mapping[str, torch.Tensor]:
        self.asked = True
        return super().inputs()


class IdleAfterChecks(Cheat):
    """Computes in its first calls only."""

    def call(self) -> None:
        self.calls += 1
        if self.calls <= 3:
            self.compute()


class SkipsHalf(Cheat):
    """Leaves the last answer in every second call."""

    total = 0

    def call(self) -> None:
        SkipsHalf.total += 1
        if SkipsHalf.total <= 8 or SkipsHalf.total % 2:
            self.compute()


class SkipsOneInTwenty(Cheat):
    """Leaves the last answer in one of twenty calls, once it has been checked."""

    total = 0

    def call(self) -> None:
        SkipsOneInTwenty.total += 1
        if SkipsOneInTwenty.total < 8 or random.random() > 0.05:
            self.compute()


class CopiesByInputs(Cheat):
    """Copies its last answer while the first of the inputs is what it was."""

    def start(self) -> None:
        self.kept: torch.Tensor | None = None

    def call(self) -> None:
        first = next(iter(self.operands.live_tensors().values()))
        if self.kept is None or not _same(first, self.kept):
            self.kept = first.clone()
            self.remember()
        self.copy_answer()


class CopiesByPointer(Cheat):
    """Copies its last answer for inputs of the same sizes in the same place, of whichever set."""

    answers: ClassVar[dict[tuple[int, str], torch.Tensor]] = {}

    def call(self) -> None:
        # The allocator may give another case's inputs the same place; its answer has another shape.
        first = next(iter(self.operands.live_tensors().values())).data_ptr(), repr(self.operands.sizes)
        if first not in self.answers:
            self.compute()
            self.answers[first] = self.out.clone()
        self.out.copy_(self.answers[first])


class FirstSet(Cheat):
    """Computes on the operands that it was first prepared on, which a cache holds."""

    first: ClassVar[dict[str, Prepared]] = {}

    def start(self) -> None:
        self.first.setdefault(repr(self.operands.sizes), self.inner)

    def call(self) -> None:
        first = self.first[repr(self.operands.sizes)]
        first.call()
        if first.out.data_ptr() != self.out.data_ptr():
            self.out.copy_(first.out)


class WritesInputs(Cheat):
    """Zeros the inputs after some calls, so that later ones multiply nothing."""

    total = 0

    def call(self) -> None:
        self.compute()
        WritesInputs.total += 1
        if WritesInputs.total > 8:
            next(iter(self.operands.live_tensors().values())).zero_()


class WritesBeside(Cheat):
    """Writes a row too many behind its output."""

    def call(self) -> None:
        self.compute()
        self.out.as_strided((1,), (1,), self.out.storage_offset() + self.out.numel()).fill_(1.0)


CHEATS: dict[str, type[Cheat]] = {
    "in_result": InResult,
    "in_thread": InThread,
    "in_load": InLoad,
    "converts_in_load": ConvertsInLoad,
    "converts_and_denies": ConvertsAndDenies,
    "zeros_when_surprised": ZerosWhenSurprised,
    "in_prepare": InPrepare,
    "hides_output": HidesOutput,
    "idle_by_version": IdleByVersion,
    "idle_by_inputs": IdleByInputs,
    "idle_unless_poisoned": IdleUnlessPoisoned,
    "idle_in_turns": IdleInTurns,
    "copies_in_turns": CopiesInTurns,
    "copies_unless_asked": CopiesUnlessAsked,
    "idle_after_checks": IdleAfterChecks,
    "skips_half": SkipsHalf,
    "skips_one_in_twenty": SkipsOneInTwenty,
    "copies_by_inputs": CopiesByInputs,
    "copies_by_version": CopiesByVersion,
    "copies_by_pointer": CopiesByPointer,
    "first_set": FirstSet,
    "writes_inputs": WritesInputs,
    "writes_beside": WritesBeside,
}


def _in_turn() -> bool:
    """Whether a timer calls."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in {"turn", "_turn"}:
        frame = frame.f_back
    return frame is not None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class _Cheating(Implementation):
    requires = "what its right kernel does"
    honest: Implementation
    cheat: type[Cheat]

    def __init__(self) -> None:
        known = kernels.own_implementations(self.op)
        self.honest = next(i for i in known if i.name == HONEST[self.op])
        self.boundaries = self.honest.boundaries  # type: ignore[misc]

    def available(self, platform: Platform) -> Support:
        return self.honest.available(platform)

    def fits(self, sizes: DataclassInstance) -> Support:
        return self.honest.fits(sizes)

    def layout(self, sizes: DataclassInstance) -> int:
        return self.honest.layout(sizes)

    def workspace(self, sizes: DataclassInstance) -> int:
        return self.honest.workspace(sizes)

    def prepare(self, operands: Any, out: torch.Tensor | None) -> Prepared:
        assert out is not None
        return self.cheat(self.honest, operands, out)

    def prepare_turn(self, first: Prepared | None, operands: Any, out: torch.Tensor | None) -> Prepared:
        return self.prepare(operands, out)


for _op in HONEST:
    for _name, _cheat in CHEATS.items():
        _facts = {
            "name": f"cheat.{_name}",
            "op": _op,
            "runtime": _name,
            "cheat": _cheat,
            "__module__": __name__,
        }
        if _cheat is ConvertsAndDenies:
            _facts["plugin"] = property(lambda self: "", lambda self, value: None)
        globals()[f"{_op}_{_name}"] = type(f"{_op}_{_name}", (_Cheating,), _facts)
