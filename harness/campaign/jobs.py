"""Jobs that a campaign's steps come to, on devices of a type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from harness.campaign.spec import Step
from harness.cluster.driver import Job
from harness.cluster.jobs import CommandJob, RunJob
from harness.cluster.orders import CommandDone, Opened
from harness.cluster.race import open_race
from harness.errors import HarnessError
from harness.progress import Progress
from harness.results.journal import Journal
from harness.results.schema import Calibration, RaceSettings, Record, Run
from harness.run.device import DeviceFacts
from harness.run.execute import Outcome
from harness.run.folder import Selection, begin, resume, select_all
from harness.run.plan import RunPlan
from harness.run.request import Request
from harness.tune.race import RaceRequest, TuneRequest, implementations_here
from kernels.platform import Platform
from shapes.case import Case

BUDGET_OF_SHARE = 0.8
"""Of a whole command's share that is measuring; the rest sets up."""
LEAST_SHARE_S = 30.0


class StepDisplay(Protocol):
    """What a person sees of a campaign."""

    def log(self, line: str) -> None: ...

    def case(self, step: str, run: Run, case: Case, records: Sequence[Record]) -> None:
        """A case of a step is finished."""

    def command(self, step: str, code: int | None, output: str) -> None:
        """A whole command is."""


class Commands(Protocol):
    """Reads a step's arguments as its command does. Each raises UsageError for what it does not take."""

    def check(self, step: Step) -> None: ...

    def request(self, step: Step) -> Callable[[Platform], Request]:
        """Of `run` and `toggle`."""

    def race(self, step: Step, folder: Path) -> tuple[TuneRequest, RaceRequest]:
        """Of `tune`; folder: of what it chooses"""


@dataclass
class StepRace:
    """A `harness.tune.race.RaceDisplay` that prints what the campaign's display does."""

    step: str
    display: StepDisplay
    progress: Progress

    def log(self, line: str) -> None:
        self.display.log(line)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        self.display.case(self.step, run, case, records)

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        pass

    def end(self, run: Run, outcome: Outcome) -> None:
        pass


def share_s(step: Step, budget_s: float) -> float:
    """Of a whole command, of a campaign's budget."""
    return step.expected_s if step.share is None else max(LEAST_SHARE_S, step.share * budget_s)


@dataclass(frozen=True)
class CampaignPlan:
    """folder: of all results; alone: there is one type of devices, whose name no folder needs"""

    steps: Sequence[Step]
    budget_s: float
    commands: Commands
    folder: Path
    alone: bool
    display: StepDisplay

    def folder_of(self, step: Step, type: str) -> Path:
        return (self.folder if self.alone else self.folder / type) / step.name

    def jobs(self, type: str, devices: Sequence[Opened], made: Sequence[Calibration]) -> Iterator[Job]:
        """Of all steps for a type of devices; a step that has none says why. made: their calibrations"""
        for step in self.steps:
            if step.is_for(type, devices[0].facts.platform.kind):
                try:
                    yield from self._jobs(step, type, devices, made)
                except HarnessError as error:
                    self.display.log(f"left out: {step.name}: {error}")

    def _jobs(
        self, step: Step, type: str, devices: Sequence[Opened], made: Sequence[Calibration]
    ) -> Iterator[Job]:
        name = step.name if self.alone else f"{step.name} on {type}"
        folder, facts = self.folder_of(step, type), devices[0].facts
        if not step.casewise:
            expected_s = share_s(step, self.budget_s)
            words = step.whole_command(BUDGET_OF_SHARE * expected_s)
            on_done = functools.partial(self._on_command, step)
            yield CommandJob(name, type, step.rank, folder, words, expected_s, 2 * expected_s, on_done)
        elif step.command == "tune":
            tuned, asked = self.commands.race(step, self.folder / "tuned")
            display = StepRace(step.name, self.display, Progress(quiet=True))
            for implementation in implementations_here(tuned, facts.platform):
                where = folder.with_name(f"{folder.name}-{implementation.name}")
                open_run = functools.partial(self._opened, where, facts)
                run = open_race(implementation, tuned, asked, devices[0], open_run, display)
                of, on_case = f"{name}: {implementation.name}", run.race.on_case
                yield RunJob(of, type, step.rank, run.journal, run.plan, run.asked, on_case, 0, made)
        else:
            request = self.commands.request(step)(facts.platform)
            selection = select_all(request, facts.platform)
            journal, plan = self._opened(folder, facts, request, selection)
            on_case = functools.partial(self.display.case, step.name, plan.record)
            yield RunJob(name, type, step.rank, journal, plan, request, on_case, 0, made)

    def _opened(
        self,
        folder: Path,
        facts: DeviceFacts,
        request: Request,
        selection: Selection,
        race: RaceSettings | None = None,
    ) -> tuple[Journal, RunPlan]:
        """The step's run as it was begun, or a new one."""
        if (folder / "run.json").exists():
            again = Request(resume=str(folder), retry=True)
            return resume(again, facts.provenance, race=race is not None)
        request = replace(request, out=str(folder))
        return begin(request, facts.platform, lambda _: facts, selection, self.display.log, race)

    def _on_command(self, step: Step, name: str, done: CommandDone) -> None:
        self.display.command(step.name, done.code, done.output)
