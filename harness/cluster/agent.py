"""Agent of a device: holds it, measures the cases that a driver orders, runs commands beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.cluster.orders import CaseOrder, CommandDone, CommandOrder, Opened, Opening, Order, Result
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import choose_device
from harness.paths import ROOT
from harness.progress import Progress
from harness.results.schema import CaseDone, DeviceUsed, Record
from harness.run.device import OwnDevice, device_facts, own_device
from harness.run.folder import worker_threads
from harness.run.measurer import CaseMeasurer
from harness.run.plan import RunPlan, case_of
from harness.tune.race import racing, target_here
from kernels.platform import Platform

LAST_WORDS = 4000
"""Characters of a command's output that its answer brings."""


class Agent:
    """Answers orders, one at a time. Raises HarnessError for what its device or the order does not allow."""

    def __init__(self) -> None:
        self.progress = Progress(quiet=True)
        self.held = contextlib.ExitStack()
        self.device: OwnDevice | None = None
        self.used: DeviceUsed | None = None
        self.memory_share = 1.0

    def obey(self, order: Order) -> Result:
        if isinstance(order, Opening):
            return self._open(order)
        if isinstance(order, CaseOrder):
            return self._measure(order)
        return self._run(order)

    def close(self) -> None:
        """Lets go of the device."""
        self.held.close()
        self.device = None

    def _open(self, order: Opening) -> Opened:
        platform = choose_device(order.device)
        self.device = self.held.enter_context(own_device(platform))
        self.memory_share = order.memory_share
        self.used = device_used(platform, order.type)
        threads = worker_threads(order.threads)
        with contextlib.ExitStack() as stack:
            target, _ = target_here(platform, threads, stack)
        return Opened(self.used, device_facts(self.device, threads), target)

    def _measure(self, order: CaseOrder) -> list[Record]:
        assert self.device is not None and self.used is not None
        plan = RunPlan.of(order.run, order.request)
        case = next(case_of(planned) for planned in order.run.cases if planned.key == order.case)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-"))
            judge = None
            if order.run.race is not None:
                plan, judge, _ = stack.enter_context(racing(plan, self.device, self.progress.note))
            measurer = CaseMeasurer(plan, self.device, self.progress, judge, self.memory_share)
            records = measurer.measure(case, order.budget_s, order.max_s, Path(folder))
        return [
            record.model_copy(update={"device": self.used.name}) if isinstance(record, CaseDone) else record
            for record in records
        ]

    def _run(self, order: CommandOrder) -> CommandDone:
        """Beside the device, which the command takes itself."""
        device = self.device
        self.close()
        try:
            with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
                out = Path(folder) / "out"
                out.mkdir()
                code, output = _run_python([a.replace("{out}", str(out)) for a in order.arguments], order)
                files = {
                    file.relative_to(out).as_posix(): file.read_bytes()
                    for file in sorted(out.rglob("*"))
                    if file.is_file()
                }
            return CommandDone(code, output[-LAST_WORDS:], files)
        finally:
            if device is not None:
                self.device = self.held.enter_context(own_device(device.platform))


def _run_python(arguments: Sequence[str], order: CommandOrder) -> tuple[int | None, str]:
    """Its exit code, None where it was killed at its deadline, and what it printed. It goes with this agent:
    its workers go with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.cluster.command", *arguments],
        cwd=ROOT,
        env=os.environ | dict(order.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=order.deadline_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


def device_used(platform: Platform, type: str) -> DeviceUsed:
    host, cpus = socket.gethostname(), sorted(ALLOWED) if platform.kind == "cpu" else []
    part = platform.uuid or (f"cpu{_ranges(cpus)}" if cpus else platform.device)
    return DeviceUsed(name=f"{host}/{part}", type=type, host=host, uuid=platform.uuid, cpus=cpus)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 8] -> `0-2,8`"""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, pair)) for pair in ranges)
