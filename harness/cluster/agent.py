"""Agent of a device: holds it, measures the cases that a driver orders, runs commands beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import kernels
from harness.cluster.orders import CaseOrder, CommandDone, CommandOrder, Opened, Opening, Order, Result
from harness.errors import NothingRan
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import choose_device
from harness.paths import ROOT
from harness.progress import Progress
from harness.results.schema import CaseDone, DeviceUsed, Record
from harness.run.case import CaseMeasurer
from harness.run.device import OwnDevice, device_facts, own_device
from harness.run.plan import RunPlan, case_of
from harness.tune.race import racing, target_here
from harness.workers.environment import worker_threads
from kernels.platform import Platform

LAST_WORDS = 4000
"""Characters of a command's output that its answer brings."""


class Agent:
    """Answers orders, one at a time. Raises HarnessError for what its device or the order does not allow."""

    def __init__(self) -> None:
        self.progress = Progress(quiet=True)
        self.held = contextlib.ExitStack()
        self.device: OwnDevice | None = None
        self.platform: Platform | None = None
        self.used: DeviceUsed | None = None
        self.threads: int | None = None
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
        platform = self.platform = choose_device(order.device)
        if order.is_gpu and platform.kind == "cpu":
            raise NothingRan(f"a device of type {order.type} is a GPU, but its agent sees none")
        device = self._hold()
        self.memory_share, self.threads = order.memory_share, order.threads
        self.used = device_used(platform, order.type)
        threads = worker_threads(order.threads)
        with contextlib.ExitStack() as stack:
            target, _ = target_here(platform, threads, stack)
        return Opened(self.used, device_facts(device, threads), target)

    def _hold(self) -> OwnDevice:
        """The device, which a command had meanwhile."""
        assert self.platform is not None
        if self.device is None:
            self.device = self.held.enter_context(own_device(self.platform))
        return self.device

    def _measure(self, order: CaseOrder) -> list[Record]:
        assert self.used is not None
        device = self._hold()
        plan = RunPlan.of(order.run, order.request)
        case = next(case_of(planned) for planned in order.run.cases if planned.key == order.case)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-"))
            judge = None
            if order.run.race is not None:
                kernels.import_plugins()  # their configurations are looked at here
                plan, judge, _ = stack.enter_context(racing(plan, device, self.progress.note))
            measurer = CaseMeasurer(plan, device, self.progress, judge, self.memory_share)
            records = measurer.measure(case, order.budget_s, order.max_s, Path(folder))
        return [
            record.model_copy(update={"device": self.used.name}) if isinstance(record, CaseDone) else record
            for record in records
        ]

    def _run(self, order: CommandOrder) -> CommandDone:
        """Beside the device, which the command takes itself."""
        self.close()
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            out = Path(folder) / "out"
            out.mkdir()
            words = [argument.replace("{out}", str(out)) for argument in order.arguments]
            code, output = _run_python(words, self._environment(), order.deadline_s)
            files = {
                file.relative_to(out).as_posix(): file.read_bytes()
                for file in sorted(out.rglob("*"))
                if file.is_file()
            }
        return CommandDone(code, output[-LAST_WORDS:], files)

    def _environment(self) -> dict[str, str]:
        """With which a command takes this device and no other, and as many threads."""
        assert self.platform is not None
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        if self.platform.kind == "cpu":
            return threads | dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        if not self.platform.uuid.startswith(("GPU-", "MIG-")):
            return threads
        name = "CUDA_VISIBLE_DEVICES" if self.platform.kind == "cuda" else "ROCR_VISIBLE_DEVICES"
        return threads | {name: self.platform.uuid}


def _run_python(
    arguments: Sequence[str], environment: Mapping[str, str], deadline_s: float
) -> tuple[int | None, str]:
    """Its exit code, None where it was killed at its deadline, and what it printed. It goes with this agent:
    its workers go with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.cluster.command", *arguments],
        cwd=ROOT,
        env=os.environ | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
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
