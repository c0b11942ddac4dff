"""The options of a measuring command as they were given (`Request`), and the plan that follows from them
(`RunPlan`): the record of the run, and what a command may choose anew when it goes on with the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import kernels
from harness.catalogue.devices import Ceilings
from harness.plan.budget import parse_seconds
from harness.plan.entry import ConfigsOf, own_choice
from harness.plan.settings import Setting, revision_setting
from harness.results.schema import PlannedCase, Run
from harness.statistics.paired import MARGIN
from harness.timing.rounds import Disturbed, Policy, Rounds, Sampler, measure
from harness.workers.worker import Deadlines
from kernels.op import Implementation, Op
from shapes.case import Case


@dataclass(frozen=True)
class Request:
    """The options of `run` or `check` as texts, by their names on the command line; None or empty where one
    was not given. `toggle` and `compare --revisions` add the settings that they compare."""

    op: str | None = None
    impl: str | None = None
    suite: str | None = None
    case: Sequence[str] = ()
    cases: str | None = None
    boundary: str | None = None
    baseline: str | None = None
    device: str | None = None
    cluster: str | None = None  # the address of a Ray cluster; `device` is then a type of its devices
    cache: str | None = None
    launch: str | None = None
    budget: str | None = None
    per_case: str | None = None
    set: Sequence[str] = ()
    margin: float = MARGIN
    settings: Sequence[Setting] = ()  # the settings that are compared, by variables or by source tree
    flags: dict[str, list[str | None]] = field(default_factory=dict)  # as in schema.Run
    resume: str | None = None
    retry: bool = False
    out: str | None = None
    json: str | None = None
    csv: str | None = None
    published: bool = False
    quiet: bool = False
    disturbed: Disturbed | None = None
    seed: int | None = None
    threads: int | None = None
    prepare_timeout: float = 900.0  # seconds
    call_timeout: float = 120.0  # seconds


PLANNING = (
    *("impl", "suite", "case", "cases", "boundary", "baseline"),
    *("cache", "launch", "set", "out", "seed", "threads"),
)
"""The options that decide a run's plan, and so cannot be given again when the run is resumed."""


@dataclass(frozen=True)
class RunPlan:
    """What a run measures, and how."""

    record: Run  # the record of the run, as run.json holds it
    budget_s: float  # seconds of measuring for all cases together
    per_case_s: float  # the least seconds of measuring that a case should get
    disturbed: Disturbed = "prefer"
    retry: bool = False  # whether cases with cells that broke (folder.BROKEN) are measured again
    deadlines: Deadlines = field(default_factory=Deadlines)
    configs_of: ConfigsOf = own_choice  # chooses the configurations with which an implementation is measured
    make_rounds: Callable[[Mapping[str, Sampler], Policy], Rounds] = measure  # or `halving`, in a race

    @staticmethod
    def of(record: Run, request: Request) -> RunPlan:
        """The plan of a recorded run under a request. Raises UsageError for a budget that cannot be read."""
        budget, per_case = request.budget, request.per_case
        return RunPlan(
            record=record,
            budget_s=parse_seconds(budget, "--budget") if budget else record.budget_s,
            per_case_s=parse_seconds(per_case, "--per-case") if per_case else record.per_case_s,
            disturbed=request.disturbed or record.disturbed,
            retry=request.retry,
            deadlines=Deadlines(request.prepare_timeout, request.call_timeout),
        )

    @property
    def op(self) -> Op:
        return kernels.OPS[self.record.op]

    @functools.cached_property
    def implementations(self) -> list[Implementation]:
        known = kernels.implementations(self.op.name)
        return [impl for impl in known if impl.name in self.record.implementations]

    @functools.cached_property
    def settings(self) -> Sequence[Setting]:
        """The recorded settings; where settings are compared, the first is there once more at the end."""
        trees = self.record.trees
        settings = [
            revision_setting(name, trees[name]) if name in trees else Setting(variables)
            for name, variables in self.record.settings.items()
        ]
        if self.record.contrast == "settings":
            settings.append(replace(settings[0], is_rerun=True))
        return settings

    @property
    def ceilings(self) -> Ceilings | None:
        return Ceilings.recorded(self.record.ceilings)


def case_of(planned: PlannedCase) -> Case:
    return Case(planned.op, planned.sizes, planned.boundary, planned.place, planned.weight)
