"""Races of engines' Triton kernels: which configurations are raced against the one that the engine takes at
present, and the engine's tables with those that won."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels
from harness import files
from harness.catalogue.architectures import architectures
from harness.errors import NothingRan, UsageError
from harness.plan.entry import ConfigSearch, ConfigsOfCase
from harness.tune.cost_model import SIMDS, WITHIN, estimate, peaks
from harness.workers.child import BENCH
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.engine_tuning import EngineConfig, EngineTable, EngineTuned
from kernels.op import Implementation
from kernels.platform import Platform
from kernels.tuning import Target
from shapes.case import Case


@dataclass(frozen=True)
class EngineConfigs:
    """Which configurations of an engine's row are raced on one target: the best `keep` by the estimate,
    against what the engine takes at present if it is told nothing.

    tables: what the engine reads, by the key of each case
    """

    implementation: EngineTuned
    target: Target
    keep: int
    tables: Mapping[str, EngineTable]

    def configs_of(self, implementation: Implementation, case: Case) -> ConfigsOfCase:
        table, sizes = self.tables[case.key], kernels.OPS[case.op].sizes(case.sizes)
        own = [
            each
            for each in entries_of(table, self.implementation.tables.rows(sizes))
            if each.entry != table.now
        ]
        ranks = [*own[:NEIGHBOURS], *ranked(self.implementation, self.target, sizes, own)]
        others = [config for config in dict.fromkeys(ranks) if config.entry != table.now]
        raced = [config.entry for config in others[: self.keep]]
        search = ConfigSearch(
            baseline=dict(table.now),
            origin=table.origin,
            considered=1 + len(others),
            pruned={"worse by the estimate": len(others) - len(raced)},
            raced=1 + len(raced),
            tables={
                name: {str(m): dict(entry) for m, entry in file.items()} for name, file in table.files.items()
            },
        )
        return ConfigsOfCase([None, *raced], search)


NEIGHBOURS = 3
"""So many of the configurations that the engine takes at other M are raced, whatever the estimate says."""


def entries_of(table: EngineTable, m: int) -> list[EngineConfig]:
    """What the engine takes at each M, that of the nearest M first: its older tuners tried tiles that the
    present one does not try. Entries that say more than EngineConfig, or less, are left out."""
    found: dict[EngineConfig, None] = {}
    for _, entry in sorted(next(iter(table.files.values())).items(), key=lambda each: abs(each[0] - m)):
        with contextlib.suppress(TypeError):
            found[EngineConfig(**entry)] = None
    return list(found)


def ranked(
    implementation: EngineTuned, target: Target, sizes: Any, also: Iterable[EngineConfig] = ()
) -> list[EngineConfig]:
    """All configurations, the best by the estimate first; in their own order where the architecture is not
    known. An engine's kernel is not compiled for the estimate, so the registers are guessed.

    The estimate hardly tells the options of a tile apart, and knows nothing of GROUP_SIZE_M. Lest few tiles
    fill a race, each further configuration of a tile counts as worse by WITHIN than the one before it; those
    with the first GROUP_SIZE_M go before the others.
    """
    configs = list(dict.fromkeys([*implementation.configurations(target, sizes), *also]))
    known = architectures().get(target.arch)
    if known is None:
        return configs
    on = peaks(replace(known, units=target.units))

    def seconds(config: EngineConfig) -> float:
        registers = config.registers(known.threads_per_wave)
        resident, _ = known.resident(registers, config.shared, 0, config.num_warps)
        rate = 1.0 if config.BLOCK_SIZE_M >= known.rows else known.older_rate.get("fp8", 1.0)
        reach = min(1.0, config.num_warps / SIMDS)
        demands = implementation.demands(config, target, sizes)
        return estimate(on, [(demand, max(1, resident), rate, reach) for demand in demands]).seconds

    group = configs[0].GROUP_SIZE_M
    estimates = [(seconds(config), config) for config in configs]
    seen, penalised = Counter[tuple[int, int, int]](), []
    for took, config in sorted(estimates, key=lambda pair: (pair[1].GROUP_SIZE_M != group, pair[0])):
        penalised.append((took * (1 + WITHIN) ** seen[config.tile], config))
        seen[config.tile] += 1
    return [config for _, config in sorted(penalised, key=lambda pair: pair[0])]


def ask_tables(
    implementation: EngineTuned, cases: Sequence[Case], platform: Platform, deadline: float
) -> dict[str, EngineTable]:
    """What the installed engine reads for each case, by the case's key. Raises NothingRan where it does not
    tell."""
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


def store_winner(
    folder: Path, tables: Mapping[str, Mapping[str, Mapping[str, Any]]], m: int, config: Mapping[str, Any]
) -> Path:
    """Writes a winner into the engine's files, each with the name that the engine looks for, and gives the
    first of them. Raises UsageError where a file cannot be read or written.

    tables: the files with what the engine takes at present, by M (EngineTable.files)

    The engines take the entry of the nearest M, so a file of this M alone would serve all others with it.
    Hence each file also gets what the engine takes at the other M at present, where it does not have these. A
    winner serves the calls up to half-way to its neighbours in M.
    """
    for name, present in tables.items():
        file = folder / name
        try:
            there = json.loads(file.read_text()) if file.exists() else {}
            merged = {**present, **there, str(m): dict(config)}
            ordered = sorted(merged.items(), key=lambda entry: int(entry[0]) if entry[0].isdigit() else -1)
            files.replace(file, json.dumps(dict(ordered), indent=4) + "\n")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot merge a winner into {file}: {error}; give another --out") from None
    return folder / next(iter(tables))
