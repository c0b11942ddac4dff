"""The agent of a device: it holds the device, measures the cases that a driver orders, and runs commands.

On a cluster each device has an agent in a process of Ray's (`ray_cluster.py`). Without a cluster the agent of
this machine's device works in the driver's own process (`ThisMachine`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import kernels
from harness.errors import HarnessError, NothingRan, one_line
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import choose_device
from harness.paths import ROOT
from harness.progress import Progress
from harness.results.schema import CaseDone, DeviceUsed, Record, Run
from harness.run.case import CaseMeasurer
from harness.run.device import DeviceFacts, OwnDevice, device_facts, own_device
from harness.run.plan import Request, RunPlan, case_of
from harness.tune.race import racing, target_here
from harness.workers.environment import worker_threads
from kernels.platform import Platform
from kernels.tuning import Target

LAST_CHARACTERS = 4000  # how much of the end of a command's output is brought back
RUN = (
    "import os, sys; from harness.workers.child.main import die_with_parent; die_with_parent(); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Python code that becomes `python ARGUMENTS`, and dies with the agent that started it."""


@dataclass(frozen=True)
class Device:
    """A device of a pool."""

    id: str  # its name in the pool
    type: str  # H200, MI300X, cpu ...
    beside: int = 1  # devices that share the memory of its machine, itself among them
    device: str | None = None  # as torch calls it; None: the first GPU that its agent sees, else the CPU
    is_gpu: bool | None = None  # None where the pool does not know
    node: str = ""  # of a Ray cluster
    resources: Mapping[str, float] = field(default_factory=dict)  # what its agent takes of that node


@dataclass(frozen=True)
class Opening:
    """The order to take a device and to say what it is."""

    device: Device
    threads: int | None = None  # of each worker, on a CPU; None: the agent's default


@dataclass(frozen=True)
class Opened:
    """What an agent says of its device."""

    used: DeviceUsed
    facts: DeviceFacts
    target: Target  # what configurations are chosen for there


@dataclass(frozen=True)
class CaseOrder:
    """The order to measure a case. Times are in seconds."""

    run: Run  # with this case alone
    request: Request  # options that the run's record does not have
    budget_s: float  # for measuring
    max_s: float  # for measuring, where one round in each block takes longer than the budget
    deadline_s: float = math.inf  # wall-clock after which the result is of no use


@dataclass(frozen=True)
class CommandOrder:
    """The order to run `python` with arguments. `{out}` among them is a folder whose files are brought
    back."""

    arguments: Sequence[str]
    deadline_s: float  # seconds of wall-clock after which it is killed


@dataclass(frozen=True)
class CommandDone:
    code: int | None  # the exit code; None where it was killed
    output: str  # the end of what it printed
    files: Mapping[str, bytes]


Order = Opening | CaseOrder | CommandOrder
Result = Opened | list[Record] | CommandDone


@dataclass(frozen=True)
class Answer:
    """An agent's answer to its last order."""

    device: str  # its id
    result: Result | None
    error: str = ""  # why there is no result
    lost: bool = False  # whether the agent is gone


class Agent:
    """Obeys orders, one at a time."""

    def __init__(self) -> None:
        self.progress = Progress(quiet=True)
        self.held = contextlib.ExitStack()
        self.device: OwnDevice | None = None
        self.platform: Platform | None = None
        self.used: DeviceUsed | None = None
        self.threads: int | None = None
        self.memory_share = 1.0

    def answer(self, order: Order, device: str = "") -> Answer:
        """The result of an order, or the error as one line."""
        try:
            return Answer(device, self.obey(order))
        except HarnessError as error:
            return Answer(device, None, str(error))
        except Exception as error:
            return Answer(device, None, one_line(error))

    def obey(self, order: Order) -> Result:
        """Raises HarnessError for what its device or the order does not allow."""
        if isinstance(order, Opening):
            return self._open(order)
        if isinstance(order, CaseOrder):
            return self._measure(order)
        return self._run(order)

    def close(self) -> None:
        """Releases the device."""
        self.held.close()
        self.device = None

    def _open(self, order: Opening) -> Opened:
        platform = self.platform = choose_device(order.device.device)
        if order.device.is_gpu and platform.kind == "cpu":
            raise NothingRan(f"a device of type {order.device.type} is a GPU, but its agent sees none")
        device = self._hold()
        self.memory_share, self.threads = 1 / order.device.beside, order.threads
        self.used = device_used(platform, order.device.type)
        threads = worker_threads(order.threads)
        with contextlib.ExitStack() as stack:
            target, _ = target_here(platform, threads, stack)
        return Opened(self.used, device_facts(device, threads), target)

    def _hold(self) -> OwnDevice:
        """The device, taken again if a command had it meanwhile."""
        assert self.platform is not None
        if self.device is None:
            self.device = self.held.enter_context(own_device(self.platform))
        return self.device

    def _measure(self, order: CaseOrder) -> list[Record]:
        assert self.used is not None
        device = self._hold()
        plan = RunPlan.of(order.run, order.request)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-"))
            judge = None
            if order.run.race is not None:
                kernels.import_plugins()  # their configurations are looked at in this process
                plan, judge, _ = stack.enter_context(racing(plan, device))
            measurer = CaseMeasurer(plan, device, self.progress, judge, self.memory_share)
            records = measurer.measure(case_of(order.run.cases[0]), order.budget_s, order.max_s, Path(folder))
        return [
            record.model_copy(update={"device": self.used.name}) if isinstance(record, CaseDone) else record
            for record in records
        ]

    def _run(self, order: CommandOrder) -> CommandDone:
        """Releases the device first: the command takes it itself."""
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
        return CommandDone(code, output[-LAST_CHARACTERS:], files)

    def _environment(self) -> dict[str, str]:
        """Variables with which a command sees this device alone and uses the same number of threads."""
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
    """Returns the exit code, None where the command was killed at its deadline, and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
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
        _kill_group(process.pid)
        return None, process.communicate()[0]
    except BaseException:
        _kill_group(process.pid)
        raise


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


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


class TimeIsUp(BaseException):
    """Is raised in what is being measured when its deadline has come. No `except Exception` may catch it."""


def _time_is_up(*_: object) -> None:
    raise TimeIsUp


class ThisMachine:
    """The pool of this machine's device alone. Its agent is in this process, so `send` returns when the order
    is done. A case is stopped at its deadline, and then there is no answer."""

    grows = False  # whether other devices may join

    def __init__(self, type: str, device: str) -> None:
        self.device = Device(device, type, device=device)
        self.agent = Agent()
        self.answers: list[Answer] = []

    def devices(self) -> Sequence[Device]:
        """The devices that are there now."""
        return [self.device]

    def start(self, opening: Opening) -> None:
        """Starts a device's agent with its first order."""
        self.send(opening.device.id, opening)

    def send(self, id: str, order: Order) -> None:
        """Sends an order to a device's agent, which has answered the last one."""
        # A command is killed at its deadline by the agent itself, and answered.
        seconds = order.deadline_s if isinstance(order, CaseOrder) else math.inf
        before = signal.signal(signal.SIGALRM, _time_is_up)
        try:
            if math.isfinite(seconds):
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
            self.answers.append(self.agent.answer(order, id))
        except TimeIsUp:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        """The answers that came within a time."""
        answers, self.answers = self.answers, []
        if not answers:
            time.sleep(min(timeout_s, 0.2))
        return answers

    def stop(self, id: str) -> None:
        """Ends a device's agent, if it has one."""
        self.agent.close()

    def close(self) -> None:
        """Ends all agents."""
        self.agent.close()
