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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.compiler import compile_all
from harness.compile.launches import KernelLaunch, launches_of, narrowed
from harness.compile.survey import require_compiler, violations
from harness.errors import NothingRan, one_line
from harness.plan.entry import Configs, ConfigSearch
from harness.workers.child import BENCH
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.engine_tuning import EngineConfig, EngineTable, EngineTuned
from kernels.op import Implementation
from kernels.platform import Platform
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import Target, Tunable, values
from shapes.case import Case

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NEIGHBOURS = 8  # at most so many configurations of neighbouring sizes come before the random ones
NOT_KEPT = "left out by --keep"


def raced_configs(
    implementation: Implementation, case: Case, target: Target, keep: int, tables: Mapping[str, EngineTable]
) -> Configs:
    """The configurations of an implementation that are raced in a case, and how they were found. The baseline
    of an engine's row is None among them, as the engine takes that by itself. keep: at most so many are
    raced, the baseline aside; tables: for an engine's row: what the engine reads, by the key of each case"""
    assert isinstance(implementation, Tunable)
    sizes = kernels.OPS[case.op].sizes(case.sizes)
    neighbours: Sequence[DataclassInstance]
    files: dict[str, dict[str, dict[str, Any]]] = {}
    if isinstance(implementation, EngineTuned):
        table = tables[case.key]
        baseline, origin = dict(table.entry), table.origin
        neighbours = near_entries(table, implementation.tables.m_of(sizes))
        for name, entries in table.files.items():
            files[name] = {str(m): dict(entry) for m, entry in entries.items()}
    else:
        choice = implementation.choose(target, sizes)
        baseline, origin = values(choice.config), choice.origin
        neighbours = [stored.config for stored in implementation.stored(target, sizes)]
    shuffled = list(implementation.configurations(target, sizes))
    random.Random(case.key).shuffle(shuffled)
    ordered = dict.fromkeys([*neighbours[:NEIGHBOURS], *shuffled])  # each once
    others = [config for config in ordered if values(config) != baseline]
    raced, pruned = _fitting(implementation, target, sizes, others, keep)
    if not_kept := len(others) - len(raced) - pruned.total():
        pruned[NOT_KEPT] = not_kept
    search = ConfigSearch(
        baseline, origin, considered=1 + len(others), pruned=dict(pruned), raced=1 + len(raced), tables=files
    )
    first = None if isinstance(implementation, EngineTuned) else baseline
    return [first, *map(values, raced)], search


def _fitting(
    implementation: Tunable,
    target: Target,
    sizes: DataclassInstance,
    configs: Sequence[DataclassInstance],
    keep: int,
) -> tuple[Sequence[DataclassInstance], Counter[str]]:
    """The first `keep` configurations that the architecture's limits allow, and how many were refused for
    each reason. All are taken as fitting where nothing is known by compiling."""
    refused: Counter[str] = Counter()
    architecture = architectures().get(target.arch)
    if architecture is None or not isinstance(implementation, SuiteTriton):
        return configs[:keep], refused
    require_compiler([architecture])
    architecture = replace(architecture, units=target.units)
    op = kernels.OPS[implementation.op]
    operands = narrowed(op, implementation, sizes)
    where = f"{target.arch} {implementation.name}: "
    fitting: list[DataclassInstance] = []
    begin = 0
    while begin < len(configs) and len(fitting) < keep:
        batch = configs[begin : begin + keep - len(fitting)]
        begin += len(batch)
        launches_by_config: dict[Any, list[KernelLaunch]] = {}
        for config in batch:
            forced = implementation.configured(values(config))
            try:
                launches_by_config[config] = launches_of(op, forced, architecture, operands, sizes)
            except Exception as error:  # costs this configuration, not the command
                refused[one_line(error)] += 1
        of_batch = [(config, launch) for config, made in launches_by_config.items() for launch in made]
        compiled = compile_all([launch for _, launch in of_batch], where=where)
        reasons: dict[Any, list[str]] = {config: [] for config in launches_by_config}
        for (config, launch), resources in zip(of_batch, compiled, strict=True):
            reasons[config] += violations(launch, resources, architecture)
        for config, why in reasons.items():
            if why:
                refused["; ".join(dict.fromkeys(why))] += 1
            else:
                fitting.append(config)
    return fitting, refused


def near_entries(table: EngineTable, m: int) -> list[EngineConfig]:
    """The configurations that the engine takes at other M, each once, that of the nearest M first, without
    the one that it takes at this M. Some have tiles that only older tuners tried. Entries with other fields
    than EngineConfig are left out."""
    by_m = next(iter(table.files.values()))  # the files of a table have the same entries
    near: dict[EngineConfig, None] = {}
    for other_m in sorted(by_m, key=lambda other_m: abs(other_m - m)):
        with contextlib.suppress(TypeError):
            near[EngineConfig(**by_m[other_m])] = None
    return [config for config in near if values(config) != table.entry]


def ask_tables(
    implementation: EngineTuned, cases: Sequence[Case], platform: Platform, deadline: float
) -> dict[str, EngineTable]:
    """What the installed engine reads for each case, by the case's key. The engine is asked in a process of
    its own, for at most `deadline` seconds a case. Raises NothingRan where it does not tell."""
    op, name = implementation.op, implementation.name
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        worker = WorkerProcess(BENCH, implementation.environment(platform), Path(scratch) / "tables.log")
        try:
            tables = {c.key: worker.ask("table", deadline, op=op, impl=name, sizes=c.sizes) for c in cases}
        except WorkerFailure as failure:
            reason = f"its engine does not tell its configurations: {failure.reason}"
            raise NothingRan(f"{name}: {reason}") from None
        finally:
            worker.kill()
    return {key: EngineTable(**table) for key, table in tables.items()}
