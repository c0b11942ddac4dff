"""What a serving engine would run by default on an architecture, beside what the suite can run there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import kernels
from harness.errors import UsageError
from harness.report.lists import Listing, Row
from kernels import engines
from kernels.engines import EngineDefault
from kernels.platform import Platform, detect, named
from kernels.support import Support

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_ROW = Support(False, "the suite has no such row")


def engine_platform(engine: str, kind: str | None, arch: str) -> Platform:
    """The platform that an engine is asked about: of an architecture, else this machine's or that of a kind.

    Raises UsageError where the engine or the architecture is unknown, or the two contradict each other.
    """
    if engine not in engines.engines():
        raise UsageError(f"unknown engine {engine!r}; engines: {', '.join(engines.engines())}")
    machine = detect()
    if kind and not arch:
        machine = machine if machine.kind == kind else named(kind)
    arch = arch or machine.arch
    if arch not in (known := engines.archs(engine)):
        raise UsageError(
            f"no defaults of {engine} for {arch!r}; --arch takes {', '.join(known)}; "
            f"read at {engine} {engines.defaults(engine)[0].version}"
        )
    if kind not in (None, engines.kind(arch)):
        raise UsageError(f"{arch} is of platform {engines.kind(arch)}, not {kind}")
    return machine if machine.arch == arch else named(engines.kind(arch), arch)


def of_engine(engine: str, ops: Sequence[str], platform: Platform) -> Listing:
    """Every entry of an engine for these ops there, in its order: the first that applies holds, and those
    with flags only where these are set."""
    rows = [_row(entry, platform) for op in ops for entry in engines.entries(engine, op, platform.arch)]
    return Listing(rows, lambda: _by_op(rows))


def _row(entry: EngineDefault, platform: Platform) -> Row:
    by_name = {implementation.name: implementation for implementation in kernels.implementations(entry.op)}
    implementation = by_name.get(entry.row)
    support = implementation.available(platform) if implementation else NO_ROW
    return {
        "op": entry.op,
        "case": entry.condition,
        "implementation": entry.row,
        "engine": entry.engine,
        "version": entry.version,
        "source": entry.source,
        "runs": support.ok,
        "why not": support.reason,
        "why": entry.why,
        "flags": entry.flags,
    }


def _by_op(rows: Sequence[Row]) -> RenderableType:
    """Of each op what holds where nothing is set, then what flags make of it."""
    from rich.console import Group
    from rich.text import Text

    releases = {f"{row['engine']} {row['version']}" for row in rows}
    parts: list[RenderableType] = [f"{', '.join(releases) or 'nothing'}; of lines that apply the first holds"]
    for op, group in groupby(rows, lambda row: str(row["op"])):
        of_op = list(group)
        for flags in sorted({str(row["flags"]) for row in of_op}):
            parts += ["", Text(f"{op} with {flags}" if flags else op, "bold")]
            parts.append(_table([row for row in of_op if row["flags"] == flags]))
    return Group(*parts, "", "with --json: why, and the whole paths")


def _table(rows: Sequence[Row]) -> RenderableType:
    from harness.report.fitting_table import Column, FittingTable

    columns = [
        Column("case", wraps=True),
        Column("implementation"),
        Column("can run"),
        Column("decided in", spare=1),
    ]
    cells = [
        [
            str(row["case"]) or "all",
            str(row["implementation"]) or "none",
            ("yes" if row["runs"] else "no") if row["implementation"] else "",
            str(row["source"]).split()[0].rpartition("/")[2],
        ]
        for row in rows
    ]
    return FittingTable(columns, cells)
