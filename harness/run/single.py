"""One kernel at one case, for whoever brings rounds of its own: checked, timed by turns, checked again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kernels
from harness.catalogue.devices import last_level
from harness.errors import UsageError, one_line
from harness.machine.cpu_threads import default_threads
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.plan import arms, select
from harness.plan.contender import Contender
from harness.plan.memory import Memory
from harness.plan.rotation import rotation
from harness.run.case import TURN_S, CaseRun
from harness.workers.child.bench import Bench
from harness.workers.environment import thread_environment
from harness.workers.process import Worker, WorkerFailure, worker_pids
from harness.workers.station import Deadlines, Station
from kernels.op import Implementation, Prepared, Support, Unsupported
from kernels.platform import Platform, detect
from shapes.case import Case


class Session:
    """What all benchmarks of a test share: the device, and how it is used."""

    def __init__(self, options: Any, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        try:
            self.platform = detect(options.kernel_device)
        except LookupError as error:
            raise UsageError(str(error)) from None

    def contest(
        self,
        op: str,
        kernel: Any,
        case: str,
        boundary: str | None = None,
        cache: str | None = None,
        launch: str | None = None,
    ) -> Contest:
        """Raises UsageError for what cannot be understood."""
        chosen = select.choose_op(op)
        cases = select.choose_cases(
            chosen, None, [case], boundary or chosen.boundaries[0], self.platform.arch
        )
        if len(cases) > 1:
            raise UsageError(f"{case!r} names {len(cases)} cases; a benchmark is of one")
        implementation, station = self._seat(op, kernel, cases[0].boundary)
        (mode,) = select.launches(self.platform, launch or self.options.kernel_launch)
        contender = Contender(implementation.name, implementation, arms.Arm(), mode)
        station.contenders.append(contender)
        support = implementation.supports(cases[0], self.platform)
        if support.ok and implementation.interpreted(self.platform):
            support = Support(False, "it is interpreted here: checked by `run`, never timed")
        if not support.ok:
            contender.fail("unsupported", support.reason)
        monitor = monitor_for(self.platform, worker_pids)
        return Contest(
            cases[0], contender, station, cache or self.options.kernel_cache, monitor, self.scratch
        )

    def _seat(self, op: str, kernel: Any, boundary: str) -> tuple[Implementation, Station]:
        common = ([], self.platform, default_threads(), Deadlines(), self.scratch / "worker.log")
        if isinstance(kernel, str):
            found = {i.name: i for i in kernels.implementations(op)}
            if kernel not in found:
                raise UsageError(
                    f"no implementation of {op} is called {kernel!r}; there are: {', '.join(found)}"
                )
            return found[kernel], Station(*common)
        guest = kernel if isinstance(kernel, Implementation) else _Function(kernel, boundary)
        guest.op = op
        return guest, _Here(*common)


class Contest:
    """status and reason: None, or where it ended, as of a cell."""

    def __init__(
        self, case: Case, contender: Contender, station: Station, cache: str, monitor: Monitor, scratch: Path
    ) -> None:
        self.case, self.contender, self.station = case, contender, station
        op, platform = kernels.OPS[case.op], station.platform
        sizes = op.sizes(case.sizes)
        memory = Memory(op, sizes, platform, contender.impl.name, cache)
        self.rotation = rotation(
            op, sizes, cache, last_level(platform), lambda copies: memory.fits([contender], copies)
        )
        environment = thread_environment(platform, station.threads)
        self.judge = Worker("judge", environment, scratch / "judge.log")
        self.judge.ask("hello", 900, kind=platform.kind, device=platform.device, threads=station.threads)
        self.run = CaseRun(case, [station], self.judge, 0, scratch, lambda _: None, monitor)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def status(self) -> str | None:
        return self.contender.status

    @property
    def reason(self) -> str:
        return self.contender.reason

    def begin(self) -> None:
        if self.contender.alive:
            self.run.begin(self.rotation)
        if self.contender.alive:
            self.station.fresh(self.rotation)
            self.station.seat(self.contender)

    def turn(self) -> float:
        """Seconds per call."""
        return self.station.ask(self.contender, "turn", at_least=TURN_S)["seconds"]

    def end(self) -> None:
        self.run.end(self.rotation)

    def facts(self, seconds: float | None) -> dict[str, Any]:
        """What stands beside the times: sizes, check, what ran, and rates at these seconds per call."""
        op, platform = kernels.OPS[self.case.op], self.station.platform
        work = op.work(op.sizes(self.case.sizes), self.case.boundary)
        facts = {
            "op": self.case.op,
            "case": self.case.text,
            "boundary": self.case.boundary,
            "implementation": self.name,
            "version": self.contender.impl.version,
            "device": platform.name,
            "arch": platform.arch,
            "launch": self.contender.launch,
            "cache": self.rotation.mode,
            "check": self.contender.check,
            "kernels": [kernel["name"] for kernel in self.contender.kernels],
            "ran": self.contender.ran,
            "picked": self.contender.picked,
        }
        if seconds:
            facts |= {"tflops": work.flops / seconds / 1e12, "gbps": work.bytes / seconds / 1e9}
        return facts

    def close(self) -> None:
        self.station.stop()
        self.judge.kill()


class _Here(Station):
    """A station in this process, for a kernel that only this process knows."""

    def start(self) -> None:
        self.worker = _Local(Bench(*(c.impl for c in self.contenders)))  # type: ignore[assignment]
        self.prepared.clear()
        kind, device = self.platform.kind, self.platform.device
        hello = self._raw("hello", 0, kind=kind, device=device, threads=torch.get_num_threads())
        for contender in self.contenders:
            contender.pinned = hello["pinned"]


class _Local:
    """A worker's answers without a worker."""

    alive = True

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        try:
            return getattr(self.bench, request)(**arguments)
        except Unsupported as error:
            raise WorkerFailure("unsupported", str(error)) from error
        except Exception as error:
            raise WorkerFailure("error", one_line(error)) from error

    def kill(self) -> None:
        self.bench.close()


class _Function(Implementation):
    """A function of (operands, out) that fills `out` or returns the output."""

    name = "yours"
    requires = "nothing"

    def __init__(self, function: Callable[..., torch.Tensor | None], boundary: str) -> None:
        if not callable(function):
            raise UsageError(f"{function!r} is no kernel: give a function of (operands, out), or a name")
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
