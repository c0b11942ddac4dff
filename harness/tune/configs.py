"""Which configurations of an implementation are raced in a case.

The first is the baseline: what would be used without the race. Then come configurations that are in use for
neighbouring sizes, then the others in a random order with a fixed seed. Configurations of the suite's Triton
kernels are compiled first, and those that exceed a limit of the architecture are left out. The first `keep`
that are left are raced.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.compiler import CompileProgress, compile_all
from harness.compile.launches import KernelLaunch, launches_of, narrowed
from harness.compile.survey import able, violations
from harness.errors import NothingRan, one_line
from harness.plan.entry import ConfigSearch, ConfigsOfCase
from harness.workers.child import BENCH
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.engine_tuning import EngineConfig, EngineTable, EngineTuned
from kernels.op import Implementation
from kernels.platform import Platform
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import Target, Tunable, stored, words
from shapes.case import Case

NEIGHBOURS = 8
"""At most so many configurations that are in use for neighbouring sizes come before the random ones."""
NOT_KEPT = "left out by --keep"


@dataclass(frozen=True)
class RacedConfigs:
    """The configurations of one implementation that are raced on one target."""

    implementation: Tunable
    target: Target
    keep: int
    """At most so many configurations are raced in a case, the baseline aside."""
    tables: Mapping[str, EngineTable] = field(default_factory=dict)
    """For an engine's row: what the engine reads, by the key of each case."""

    def configs_of(self, implementation: Implementation, case: Case) -> ConfigsOfCase:
        """The configurations for a case, the baseline's first: a `harness.plan.entry.ConfigsOf`. An engine's
        baseline is None: the engine is told nothing."""
        if isinstance(self.implementation, EngineTuned):
            return self._engine_configs(self.implementation, case)
        sizes = kernels.OPS[case.op].sizes(case.sizes)
        choice = self.implementation.choose(self.target, sizes)
        others = [config for config in self._ordered(case, self._stored(sizes)) if config != choice.config]
        raced, refused = self._fitting(case, sizes, others)
        pruned = {**refused, NOT_KEPT: len(others) - len(raced) - sum(refused.values())}
        configs = [asdict(config) for config in (choice.config, *raced)]
        search = ConfigSearch(
            baseline=configs[0],
            origin=choice.origin,
            considered=1 + len(others),
            pruned={why: count for why, count in pruned.items() if count},
            raced=len(configs),
        )
        return ConfigsOfCase(configs, search)

    def _engine_configs(self, implementation: EngineTuned, case: Case) -> ConfigsOfCase:
        table, sizes = self.tables[case.key], kernels.OPS[case.op].sizes(case.sizes)
        near = near_entries(table, implementation.tables.rows(sizes))
        others = [config.entry for config in self._ordered(case, near) if config.entry != table.now]
        raced = others[: self.keep]
        search = ConfigSearch(
            baseline=dict(table.now),
            origin=table.origin,
            considered=1 + len(others),
            pruned={NOT_KEPT: len(others) - len(raced)},
            raced=1 + len(raced),
            tables={
                name: {str(m): dict(entry) for m, entry in file.items()} for name, file in table.files.items()
            },
        )
        return ConfigsOfCase([None, *raced], search)

    def _ordered(self, case: Case, neighbours: Sequence[Any]) -> list[Any]:
        """All configurations for a case in the order in which they are raced."""
        sizes = kernels.OPS[case.op].sizes(case.sizes)
        every = list(self.implementation.configurations(self.target, sizes))
        random.Random(case.key).shuffle(every)
        return list(dict.fromkeys([*neighbours[:NEIGHBOURS], *every]))

    def _stored(self, sizes: Any) -> list[Any]:
        """The stored configurations that are right for these sizes, those made for the nearest sizes
        first."""
        features = self.implementation.features(sizes)
        entries = [e for e in stored(self.implementation.name) if e.kind == self.target.kind]
        entries.sort(key=lambda entry: entry.away(features, self.target))
        allowed = {words(c): c for c in self.implementation.configurations(self.target, sizes)}
        return [allowed[entry.config] for entry in entries if entry.config in allowed]

    def _fitting(self, case: Case, sizes: Any, configs: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
        """The first `keep` configurations that the architecture's limits allow, and how many were refused for
        each reason. All are taken as fitting where nothing is known by compiling."""
        architecture = architectures().get(self.target.arch)
        implementation = self.implementation
        if architecture is None or not isinstance(implementation, SuiteTriton):
            return list(configs[: self.keep]), {}
        able([architecture])
        architecture = replace(architecture, units=self.target.units)
        op = kernels.OPS[case.op]
        operands = narrowed(op, implementation, sizes)
        progress = CompileProgress(f"{self.target.arch} {implementation.name}: ")
        left, fitting = list(configs), list[Any]()
        refused: Counter[str] = Counter()
        while left and len(fitting) < self.keep:
            count = self.keep - len(fitting)
            batch, left = left[:count], left[count:]
            launched: dict[Any, list[KernelLaunch]] = {}
            for config in batch:
                forced = implementation.configured(asdict(config))
                try:
                    launched[config] = launches_of(op, forced, architecture, operands, sizes)
                except Exception as error:  # costs this configuration, not the command
                    refused[one_line(error)] += 1
            compiled = iter(compile_all([one for each in launched.values() for one in each], progress))
            for config, launches in launched.items():
                reasons = [why for one in launches for why in violations(one, next(compiled), architecture)]
                if reasons:
                    refused["; ".join(dict.fromkeys(reasons))] += 1
                else:
                    fitting.append(config)
        return fitting, dict(refused)


def near_entries(table: EngineTable, m: int) -> list[EngineConfig]:
    """What the engine takes at each M, that of the nearest M first.

    The engines' older tuners tried tiles that the present ones do not try. Entries with other fields than
    EngineConfig are left out.
    """
    found: dict[EngineConfig, None] = {}
    for _, entry in sorted(next(iter(table.files.values())).items(), key=lambda each: abs(each[0] - m)):
        with contextlib.suppress(TypeError):
            found[EngineConfig(**entry)] = None
    return [config for config in found if config.entry != table.now]


def ask_tables(
    implementation: EngineTuned, cases: Sequence[Case], platform: Platform, deadline: float
) -> dict[str, EngineTable]:
    """What the installed engine reads for each case, by the case's key. The engine is asked in a process of
    its own. Raises NothingRan where it does not tell.

    deadline: seconds for one case
    """
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        worker = WorkerProcess(BENCH, implementation.environment(platform), Path(scratch) / "tables.log")
        try:
            asked = {"op": implementation.op, "impl": implementation.name}
            return {
                case.key: EngineTable(**worker.ask("table", deadline, **asked, sizes=case.sizes))
                for case in cases
            }
        except WorkerFailure as failure:
            raise NothingRan(
                f"{implementation.name}: its engine does not tell its configurations: {failure.reason}"
            ) from None
        finally:
            worker.kill()
