"""The agent of a device: it holds the device and obeys the orders of a driver, to measure a case for example.

On a cluster each device has an agent in a process of Ray's (`ray_cluster.py`). Without a cluster the agent of
this machine's device works in the driver's own process (`ThisMachine`).
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import kernels
from harness.errors import HarnessError, NothingRan, one_line
from harness.machine.cpu_threads import ALLOWED, runs_of
from harness.machine.device import choose_device
from harness.progress import Progress
from harness.results.schema import DeviceUsed, Record
from harness.run.case import CaseMeasurer
from harness.run.device import DeviceFacts, OwnDevice, device_facts, own_device
from harness.run.plan import RunPlan, case_of
from harness.tune.race import target_of, with_configs
from harness.workers.environment import worker_threads
from kernels.platform import Platform
from kernels.tuning import Target


class Order(Protocol):
    """What a driver tells an agent to do."""

    def obey(self, agent: Agent) -> Any:
        """Does it on the agent's device; returns the result. Raises HarnessError for what is not allowed."""


@dataclass(frozen=True)
class Device:
    """A device of a pool. It is also the first order to its agent: to take the device and say what it is."""

    id: str  # its name in the pool
    type: str  # H200, MI300X, cpu ...
    devices_on_machine: int = 1  # how many devices share the memory of its machine, itself among them
    device: str | None = None  # as torch calls it; None: the first GPU that its agent sees, else the CPU
    is_gpu: bool = False  # whether it must be a GPU
    threads: int | None = None  # of each worker, on a CPU; None: the agent's default
    node: str = ""  # the id of its node in a Ray cluster
    resources: Mapping[str, float] = field(default_factory=dict)  # what its agent takes of that node

    def obey(self, agent: Agent) -> OpenedDevice:
        agent.device = self
        agent.platform = choose_device(self.device)
        if self.is_gpu and agent.platform.kind == "cpu":
            raise NothingRan(f"a device of type {self.type} is a GPU, but its agent sees none")
        own = agent.hold()
        threads = worker_threads(self.threads)
        target = target_of(agent.platform, threads)
        facts = device_facts(own, threads)
        facts = replace(facts, busy=[*facts.busy, *agent.notes])
        agent.opened = OpenedDevice(device_used(agent.platform, self.type), facts, target)
        return agent.opened


@dataclass(frozen=True)
class CaseOrder:
    """The order to measure a case, whose result is its records. Times are in seconds."""

    plan: RunPlan  # with this case alone
    budget_s: float  # for measuring
    max_s: float  # for measuring, if the budget is too short for one round in each block
    deadline_s: float = math.inf  # wall-clock after which the result is of no use

    def obey(self, agent: Agent) -> list[Record]:
        own, plan = agent.hold(), self.plan
        case = case_of(plan.record.cases[0])
        if plan.record.race is not None:
            kernels.import_plugins()  # the implementation, whose configurations are listed, may be in one
            plan = with_configs(plan, agent.platform, agent.opened.target)
        measurer = CaseMeasurer(plan, own, Progress(quiet=True), 1 / agent.device.devices_on_machine)
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            *cells, done = measurer.measure(case, self.budget_s, self.max_s, Path(folder))
        return [*cells, done.model_copy(update={"device": agent.opened.used.name})]


@dataclass(frozen=True)
class OpenedDevice:
    """What an agent says of its device."""

    used: DeviceUsed
    facts: DeviceFacts
    target: Target  # what configurations are chosen for there


@dataclass(frozen=True)
class Answer:
    """An agent's answer to its last order, or what its pool says of an agent that gave none."""

    device: str  # its id
    result: Any  # what `Order.obey` returned; None where there is none
    error: str = ""  # why there is no result
    lost: bool = False  # whether the agent is gone


class Agent:
    """Obeys orders, one at a time. The first order is a `Device`, the one that the agent takes."""

    def __init__(self) -> None:
        self.held = contextlib.ExitStack()
        self.own: OwnDevice | None = None  # None while the device is released
        self.notes: Sequence[str] = ()  # what makes this process doubtful, a line each
        self.device: Device
        self.platform: Platform
        self.opened: OpenedDevice

    def answer(self, id: str, order: Order) -> Answer:
        """The result of an order, or the error as one line. id: of the device"""
        try:
            return Answer(id, order.obey(self))
        except HarnessError as error:
            return Answer(id, None, str(error))
        except Exception as error:
            return Answer(id, None, one_line(error))

    def hold(self) -> OwnDevice:
        """The device, taken again if it was released meanwhile."""
        if self.own is None:
            self.own = self.held.enter_context(own_device(self.platform))
        return self.own

    def release(self) -> None:
        self.held.close()
        self.own = None


def device_used(platform: Platform, type: str) -> DeviceUsed:
    host = socket.gethostname()
    cpus = sorted(ALLOWED) if platform.kind == "cpu" else []
    name = f"cpu{_ranges(cpus)}" if cpus else (platform.uuid or platform.device)
    return DeviceUsed(name=f"{host}/{name}", type=type, host=host, uuid=platform.uuid, cpus=cpus)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 8] -> `0-2,8`"""
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in runs_of(numbers))


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
        return [self.device]

    def send(self, id: str, order: Order) -> None:
        """Sends an order to an agent that has answered the last one. The first, a Device, starts it."""
        # Only a case is stopped from here. A campaign's command stops itself at its deadline and is answered.
        deadline_s = order.deadline_s if isinstance(order, CaseOrder) else math.inf
        before = signal.signal(signal.SIGALRM, _time_is_up)
        try:
            if math.isfinite(deadline_s):
                signal.setitimer(signal.ITIMER_REAL, max(deadline_s, 1e-3))
            self.answers.append(self.agent.answer(id, order))
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
        self.agent.release()

    def close(self) -> None:
        """Ends all agents."""
        self.agent.release()
