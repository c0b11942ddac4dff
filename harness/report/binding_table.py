"""Which rows bind to which releases of their libraries, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from harness.report.fitting_table import Column, FittingTable

STYLES = {"breaks": "bold red", "too old": "dim", "not told": "yellow"}


def binding_table(rows: Sequence[Mapping[str, str]]) -> Group:
    """rows: of `doctor.bindings.RowBinding`, release by release; those that break first."""
    releases = list(dict.fromkeys((row["library"], row["version"]) for row in rows))
    parts: list[Text | FittingTable] = []
    for library, version in releases:
        mine = [row for row in rows if (row["library"], row["version"]) == (library, version)]
        counts = Counter(row["status"] for row in mine)
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        parts += [Text(f"{library} {version}: {summary}", "bold"), _release(mine), Text()]
    return Group(*parts[:-1])


def _release(rows: Sequence[Mapping[str, str]]) -> FittingTable:
    columns = [
        Column("op"),
        Column("implementation"),
        Column("calls"),
        Column("reason", wraps=True),
        Column("without", wraps=True, spare=1),
    ]
    order = sorted(rows, key=lambda row: row["status"] != "breaks")
    cells: list[list[str | Text]] = [
        [
            row["op"],
            row["implementation"],
            Text(row["status"], STYLES.get(row["status"], "")),
            row["reason"],
            row["without"],
        ]
        for row in order
    ]
    return FittingTable(columns, cells)
