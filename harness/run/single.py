"""A benchmark of one kernel at one case, for tools that make their own rounds, such as pytest-benchmark: it
is checked, timed sample by sample, and checked again. A kernel that only the calling process knows is
measured in that process, by the same Bench that workers run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernels
from harness.errors import UsageError, one_line
from harness.machine.cpu_threads import default_threads
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.plan import select, settings
from harness.plan.entry import Entry
from harness.run.case import rotation_of_one
from harness.run.checks import SAMPLE_S, CaseChecks
from harness.timing.rounds import mostly_disturbed
from harness.workers.child.bench import Bench
from harness.workers.process import WorkerFailure, start_judge, worker_pids
from harness.workers.worker import Deadlines, Worker
from kernels.op import Implementation, Prepared, Support, Unsupported
from kernels.platform import Platform
from shapes.case import Case


@dataclass(frozen=True)
class KernelBenchmarks:
    """Makes benchmarks on one device."""

    platform: Platform
    cache: str  # the cache mode of a benchmark that names none
    launch: str | None  # the launch mode of a benchmark that names none; None: the device's default
    scratch: Path  # a folder for logs

    def benchmark(
        self,
        op: str,
        kernel: object,
        *,
        case: str,
        boundary: str | None = None,
        cache: str | None = None,
        launch: str | None = None,
    ) -> KernelBenchmark:
        """A benchmark of a kernel. Raises UsageError for what cannot be understood.

        kernel: an implementation's name, a function of (operands, out), or an Implementation
        """
        chosen = select.choose_one_case(select.choose_op(op), case, boundary, self.platform.arch, "benchmark")
        implementation, worker = self._worker(op, kernel, chosen.boundary)
        (mode,) = select.launches(self.platform, launch or self.launch)
        entry = Entry(implementation.name, implementation, settings.Setting(), mode)
        worker.entries.append(entry)
        support = implementation.supports(chosen, self.platform)
        if support.ok and implementation.interpreted(self.platform):
            support = Support(False, "it is interpreted here: checked by `run`, never timed")
        if not support.ok:
            entry.fail("unsupported", support.reason)
        monitor = monitor_for(self.platform, worker_pids)
        return KernelBenchmark(chosen, entry, worker, cache or self.cache, monitor)

    def _worker(self, op: str, kernel: object, boundary: str) -> tuple[Implementation, Worker]:
        entries: list[Entry] = []
        common = (entries, self.platform, default_threads(), Deadlines(), self.scratch / "worker.log")
        if isinstance(kernel, str):
            return select.choose_implementation(op, kernel), Worker(*common)
        if isinstance(kernel, Implementation):
            guest = kernel
        elif callable(kernel):
            guest = _Function(kernel, boundary)
        else:
            raise UsageError(f"{kernel!r} is no kernel: give a function of (operands, out), or a name")
        guest.op = op
        return guest, _Here(*common)


class KernelBenchmark:
    """One kernel at one case."""

    def __init__(self, case: Case, entry: Entry, worker: Worker, cache: str, monitor: Monitor) -> None:
        self.case, self.entry, self.worker, self.monitor = case, entry, worker, monitor
        self.checks: CaseChecks | None = None
        # What disturbed each disturbed sample. These are made again, unless most are disturbed.
        self.disturbed: list[str] = []
        # The number of samples, with the disturbed ones.
        self.made = 0
        self.rotation = rotation_of_one(entry, case, worker.platform, cache)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def status(self) -> str | None:
        """Where it ended, as of a cell; None while nothing is known against it."""
        return self.entry.status

    @property
    def reason(self) -> str:
        return self.entry.reason

    def begin(self) -> None:
        """Checks and prepares the kernel. Does nothing where it is not supported."""
        if not self.entry.alive:
            return
        worker, folder = self.worker, self.worker.log.parent
        self.checks = CaseChecks(
            case=self.case,
            workers=[worker],
            start_judge=lambda: start_judge(worker.platform, worker.threads, 900, folder / "judge.log"),
            say=lambda _: None,
        )
        self.checks.before(self.rotation)
        if self.entry.alive:
            worker.fresh(self.rotation)
            worker.prepare(self.entry)

    def sample(self) -> float:
        """Takes a sample that nothing disturbed, or any where most are disturbed. Returns seconds per
        call."""
        while True:
            self.monitor.begin()
            with self.monitor.watching(f"{self.case.key} {self.name}"):
                seconds: float = self.worker.ask(self.entry, "sample", at_least=SAMPLE_S)["seconds"]
            self.made += 1
            reason = self.monitor.end()
            if reason:
                self.disturbed.append(reason)
            if not reason or mostly_disturbed(len(self.disturbed), self.made):
                return seconds

    def end(self) -> None:
        """Checks the kernel again."""
        if self.checks is not None:
            self.checks.after(self.rotation)

    def facts(self, seconds: float | None) -> dict[str, Any]:
        """What is known beside the times: sizes, check, what ran, and rates at these seconds per call."""
        op, platform = kernels.OPS[self.case.op], self.worker.platform
        work = op.work(op.sizes(self.case.sizes), self.case.boundary)
        facts: dict[str, Any] = {
            "op": self.case.op,
            "case": self.case.text,
            "boundary": self.case.boundary,
            "implementation": self.name,
            "version": self.entry.impl.version,
            "device": platform.name,
            "arch": platform.arch,
            "launch": self.entry.launch,
            "cache": self.rotation.mode,
            "check": self.entry.check,
            "kernels": [kernel["name"] for kernel in self.entry.kernels],
            "ran": self.entry.ran,
            "picked": self.entry.picked,
        }
        if self.disturbed:
            facts["disturbed"] = f"{len(self.disturbed)} of {self.made} samples: {self.disturbed[-1]}"
        if seconds:
            facts |= {"tflops": work.flops / seconds / 1e12, "gbps": work.bytes / seconds / 1e9}
        return facts

    def close(self) -> None:
        self.worker.stop()
        if self.checks is not None:
            self.checks.close()


class _Here(Worker):
    """A worker without a process of its own, for a kernel that only this process knows."""

    def start(self) -> None:
        self.worker = _Local(Bench(*(entry.impl for entry in self.entries)))
        self.prepared.clear()
        kind, device = self.platform.kind, self.platform.device
        hello = self._raw("hello", 0, kind=kind, device=device, threads=torch.get_num_threads())
        for entry in self.entries:
            entry.pinned = hello["pinned"]


class _Local:
    """Answers requests in this process."""

    alive: bool = True

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        try:
            return getattr(self.bench, request)(**arguments)
        except Unsupported as error:
            raise WorkerFailure("unsupported", str(error)) from error
        except Exception as error:
            raise WorkerFailure("error", one_line(error)) from error

    def pause(self) -> None:
        pass

    def kill(self) -> None:
        self.bench.close()


class _Function(Implementation):
    """An implementation made of a function of (operands, out) that fills `out` or returns the output."""

    name = "yours"
    requires = "nothing"

    def __init__(self, function: Callable[..., torch.Tensor | None], boundary: str) -> None:
        self.function = function
        self.name = f"yours.{getattr(function, '__name__', 'kernel')}"  # type: ignore[misc]
        self.boundaries = (boundary,)  # type: ignore[misc]

    def available(self, platform: Platform) -> Support:
        return Support(True)

    def prepare(self, operands: Any, out: torch.Tensor | None) -> Prepared:
        return _Called(operands, out, self.function)


class _Called(Prepared):
    def __init__(self, operands: Any, out: torch.Tensor | None, function: Callable[..., Any]) -> None:
        super().__init__(operands, out)
        self.function, self.returned = function, None

    def call(self) -> None:
        self.returned = self.function(self.operands, self.out)

    def result(self) -> torch.Tensor:
        return super().result() if self.returned is None else self.returned
