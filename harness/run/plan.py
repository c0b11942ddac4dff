"""The plan of a run: what its record says, with what a command may say anew when it goes on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import kernels
from harness.catalogue.devices import Ceilings, peaks
from harness.plan import budget, revisions
from harness.plan.entry import ConfigsOf, own_choice
from harness.plan.settings import Setting
from harness.results.schema import PlannedCase, Run
from harness.run.case import MakeRounds, TimingRules
from harness.run.cells import Yardsticks
from harness.run.request import Request
from harness.timing.interleaved import measure
from harness.timing.rounds import Disturbed
from harness.workers.worker import Deadlines
from kernels.op import Implementation, Op
from kernels.platform import Platform
from shapes.case import Case


@dataclass(frozen=True)
class RunPlan:
    """What a run measures, and how.

    record:     as run.json has it
    budget_s:   of measuring, seconds, for all cases
    per_case_s: least of it that is worth a case
    retry:      cases with cells that broke are measured again
    """

    record: Run
    budget_s: float
    per_case_s: float
    disturbed: Disturbed = "prefer"
    retry: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    configs_of: ConfigsOf = own_choice
    make_rounds: MakeRounds = measure

    @staticmethod
    def of(record: Run, request: Request) -> RunPlan:
        """Raises UsageError for a budget that cannot be read."""
        budget_s, per_case_s = record.budget_s, record.per_case_s
        if request.budget:
            budget_s = budget.parse_seconds(request.budget, "--budget")
        if request.per_case:
            per_case_s = budget.parse_seconds(request.per_case, "--per-case")
        return RunPlan(
            record=record,
            budget_s=budget_s,
            per_case_s=per_case_s,
            disturbed=request.disturbed or record.disturbed,
            retry=request.retry,
            deadlines=Deadlines(request.prepare_timeout, request.call_timeout),
        )

    @property
    def op(self) -> Op:
        return kernels.OPS[self.record.op]

    @functools.cached_property
    def implementations(self) -> list[Implementation]:
        return [i for i in kernels.implementations(self.op.name) if i.name in self.record.implementations]

    @functools.cached_property
    def settings(self) -> Sequence[Setting]:
        """As planned; where they are compared, the first of them again at the end."""
        trees = self.record.trees
        settings = [
            revisions.setting(name, trees[name]) if name in trees else Setting(variables)
            for name, variables in self.record.settings.items()
        ]
        return (
            [*settings, replace(settings[0], is_rerun=True)]
            if self.record.contrast == "settings"
            else settings
        )

    @property
    def threads(self) -> int:
        return self.record.threads

    @property
    def rules(self) -> TimingRules:
        return TimingRules(self.record.seed, self.disturbed, self.record.margin, self.make_rounds)

    def yardsticks(self, platform: Platform) -> Yardsticks:
        record = self.record
        return Yardsticks(
            Ceilings.recorded(record.ceilings), peaks(platform), record.confidence, record.margin
        )


def case_of(planned: PlannedCase) -> Case:
    return Case(planned.op, planned.sizes, planned.boundary, planned.place, planned.weight)
