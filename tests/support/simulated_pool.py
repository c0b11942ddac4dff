"""A simulated pool with its own clock: its agents answer, fail, hang, die and join."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.campaign.execute import CommandDone
from harness.cluster.agent import Answer, CaseOrder, Device, OpenedDevice, Order
from harness.results.schema import CaseDone, DeviceUsed, PlannedCase, Record, Run, Samples
from harness.run.device import DeviceFacts
from kernels.platform import named
from kernels.triton_runtime import CPU
from tests.support.written_runs import a_cell, a_run

START_S = 5.0
PROVENANCE = {
    "machine": {"platform": "cpu", "device": "made up", "arch": "x86-amx", "driver": "", "threads": 1},
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "0" * 40, "dirty": False},
}


@dataclass
class SimulatedPool:
    """Devices that answer after made-up times. Times are in seconds."""

    types: dict[str, str]  # of each device, by its id
    takes_s: Callable[[str, str], float | str]
    """The time of a case on a device, or a fault: `dies`, `hangs`, `fails` or, of an opening, `breaks`."""
    joins: dict[str, float] = field(default_factory=dict)  # when a device joins, if late
    leaves: dict[str, float] = field(default_factory=dict)  # when a device leaves
    versions: dict[str, str] = field(default_factory=dict)  # of torch, where a device has another
    slower: dict[str, float] = field(default_factory=dict)  # the factor by which a device is slower
    named: str = "{}"  # the name of a device by its id, once it is open
    hang_s: float = 60.0  # until a hanging agent is noticed
    grows: bool = True
    rounds: int = 3
    now: float = 0.0
    closed: bool = False
    measured: list[tuple[str, str]] = field(default_factory=list)
    openings: list[Device] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    coming: list[tuple[float, int, Answer]] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def _is_there(self, id: str) -> bool:
        return self.joins.get(id, 0.0) <= self.now < self.leaves.get(id, float("inf"))

    def devices(self) -> Sequence[Device]:
        there = {id: type for id, type in self.types.items() if self._is_there(id)}
        return [Device(id, type, devices_on_machine=len(there)) for id, type in there.items()]

    def send(self, device: str, order: Order) -> None:
        if isinstance(order, Device):
            assert device not in self.started, "it has an agent"
            self.started[device] = next(self.numbers)
            self.openings.append(order)
            if (takes := self.takes_s(device, "opening")) == "hangs":
                return
            if takes == "breaks":
                self._answer(device, 1.0, Answer(device, None, "its agent is gone", lost=True))
                return
            versions = {"torch": self.versions.get(device, "2.13.0")}
            facts = DeviceFacts(named("cpu"), PROVENANCE | {"versions": versions}, None)
            used = DeviceUsed(name=self.named.format(device), type=order.type, host=device)
            self._answer(device, START_S, Answer(device, OpenedDevice(used, facts, CPU)))
        elif isinstance(order, CaseOrder):
            case = order.plan.record.cases[0].key
            takes = self.takes_s(device, case)
            if isinstance(takes, float):
                self.measured.append((device, case))
                made = records(order, device, self.rounds, self.slower.get(device, 1.0))
                self._answer(device, takes, Answer(device, made))
            else:
                after_s, error, lost = {
                    "dies": (3.0, "its agent is gone", True),
                    "hangs": (self.hang_s, "no sign of life", True),
                    "fails": (3.0, "RuntimeError: out of luck", False),
                }[takes]
                self._answer(device, after_s, Answer(device, None, error, lost=lost))
        else:
            self._answer(device, 1.0, Answer(device, CommandDone(0, "done", {"out.txt": b"1"})))

    def _answer(self, device: str, after_s: float, answer: Answer) -> None:
        gone = self.leaves.get(device, float("inf"))
        if self.now + after_s >= gone:
            after_s, answer = gone - self.now, Answer(device, None, "its node died", lost=True)
        heapq.heappush(self.coming, (self.now + max(0.0, after_s), self.started[device], answer))

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        answers: list[Answer] = []
        until = self.now + timeout_s
        while self.coming and self.coming[0][0] <= until and not answers:
            at, number, answer = heapq.heappop(self.coming)
            self.now = max(self.now, at)
            if self.started.get(answer.device) == number:  # not of an agent that was stopped meanwhile
                answers.append(answer)
        if not answers:
            self.now = until
        return answers

    def stop(self, device: str) -> None:
        self.started.pop(device, None)

    def close(self) -> None:
        self.closed = True


def records(order: CaseOrder, device: str, rounds: int, slower: float = 1.0) -> list[Record]:
    """The records of a case as an agent would give them, with made-up times."""
    run = order.plan.record
    case = run.cases[0].key
    draw = random.Random(case)
    samples = Samples(
        block=[i // 5 for i in range(rounds)],
        round=list(range(rounds)),
        seconds=[1e-3 * (1 + 0.01 * draw.random()) for _ in range(rounds)],
    )
    times = {"time_us": 1000.0 * slower, "low_us": 990.0 * slower, "high_us": 1010.0 * slower}
    facts = {"op": run.op, "case": case, "arch": "x86-amx", "cache": "serving", **times}
    done = CaseDone(
        case=case, device=device, measured_s=order.budget_s, setup_s=5.0, rounds=rounds, blocks=1,
        stopped="budget",
    )  # fmt: skip
    return [*(a_cell(impl=name, samples=samples, **facts) for name in run.implementations), done]


def pool(
    names: str, takes: Callable[[str, str], float | str] = lambda device, case: 10.0, **more: Any
) -> SimulatedPool:
    """A pool of CPUs, one for each letter of `names`."""
    return SimulatedPool(dict.fromkeys(names, "cpu"), takes, **more)


def made_up_run(cases: int, implementations: Sequence[str] = ("torch.sdpa", "torch.naive")) -> Run:
    planned = [
        PlannedCase(
            op="mla_decode", sizes={"batch": i}, boundary="core", place="", weight=1 / cases, key=f"case {i}"
        )
        for i in range(cases)
    ]
    names = list(implementations)
    return a_run(planned, implementations=names, baseline=names[0], provenance=PROVENANCE)
