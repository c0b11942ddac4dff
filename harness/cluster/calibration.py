"""Calibration of devices of one type: the same cases on each, before all others and after them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import kernels
from harness.cluster.dispatch import Task
from harness.cluster.orders import CaseOrder, CommandDone, Opened, Order
from harness.plan import select
from harness.plan.settings import PLAIN
from harness.results.schema import Calibration, Cell, PlannedCase, Record, Run
from harness.run.folder import planned_case
from harness.run.request import Request
from harness.statistics.intervals import CONFIDENCE

OP = "block_scale_gemm"
# Few rows, which read memory, and many, which compute.
CASES = {"cpu": ("m=64 n=512 k=7168",), "gpu": ("m=64 n=2112 k=7168", "m=8192 n=2112 k=7168")}
BUDGET_S = 3.0
ASIDE_S = {"cpu": 12.0, "gpu": 15.0}


@dataclass
class CalibrationJob:
    """The op's best torch implementation on each device of a type.

    made: what was measured so far, which the jobs of runs read when they end
    """

    type: str
    when: Literal["first", "last"]
    devices: list[Opened]
    made: list[Calibration]
    log: Callable[[str], None]
    runs: dict[str, Run] = field(init=False)

    @property
    def name(self) -> str:
        return f"calibration of {self.type}, {self.when}"

    @property
    def rank(self) -> int:
        return -1 if self.when == "first" else 1 << 30

    def __post_init__(self) -> None:
        platform = self.devices[0].facts.platform
        op = kernels.OPS[OP]
        cases = select.choose_cases(op, None, CASES[self._kind], "core", platform.arch)
        baseline = select.choose_baseline(op, platform, None, select.choose_implementations(op, None))
        self.runs = {
            case.key: calibration_run(planned_case(case), baseline, self.devices[0]) for case in cases
        }

    @property
    def _kind(self) -> str:
        return "cpu" if self.devices[0].facts.platform.kind == "cpu" else "gpu"

    def tasks(self) -> Sequence[Task]:
        """None for a single device, which is beside no other."""
        return self._tasks(self.devices) if len(self.devices) > 1 else []

    def joined(self, device: Opened) -> Sequence[Task]:
        self.devices.append(device)
        return self._tasks(self.devices if len(self.devices) == 2 else [device])

    def _tasks(self, devices: Sequence[Opened]) -> list[Task]:
        aside_s = ASIDE_S[self._kind]
        return [
            Task(self.name, key, BUDGET_S, aside_s, device.used.name)
            for device in devices
            for key in self.runs
        ]

    def order(self, task: Task, left_s: float) -> Order | None:
        return CaseOrder(self.runs[task.key], Request(), task.key, BUDGET_S, min(left_s, 3 * BUDGET_S))

    def take_back(self, task: Task) -> None:
        pass

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, list)
        for cell in result:
            if isinstance(cell, Cell) and cell.time_us and cell.low_us and cell.high_us:
                self.made.append(
                    Calibration(
                        device=by.used.name,
                        type=self.type,
                        when=self.when,
                        case=task.key,
                        impl=cell.impl,
                        time_us=cell.time_us,
                        low_us=cell.low_us,
                        high_us=cell.high_us,
                    )
                )
            elif isinstance(cell, Cell):
                self.log(f"{by.used.name} was not calibrated: {cell.status}: {cell.reason}")
        return BUDGET_S

    def end(self) -> None:
        pass


def calibration_run(case: PlannedCase, implementation: str, device: Opened) -> Run:
    """Of one case, with one implementation; it is recorded nowhere."""
    return Run(
        id="calibration",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=[],
        op=case.op,
        suite="ad hoc",
        cases=[case],
        implementations=[implementation],
        baseline=implementation,
        settings={PLAIN: {}},
        launches=["eager"],
        cache="serving",
        budget_s=BUDGET_S,
        per_case_s=BUDGET_S,
        seed=0,
        confidence=CONFIDENCE,
        disturbed="prefer",
        ceilings={},
        provenance=device.facts.provenance,
    )


def calibrations(
    type: str, devices: Sequence[Opened], made: list[Calibration], log: Callable[[str], None]
) -> list[CalibrationJob]:
    """Before and after all else."""
    return [CalibrationJob(type, when, list(devices), made, log) for when in ("first", "last")]
