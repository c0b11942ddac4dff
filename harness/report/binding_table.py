"""Which rows bind to which releases of their libraries, as lines and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from harness.report.fitting_table import Column, FittingTable

STYLES = {"breaks": "bold red", "too old": "dim", "not told": "yellow"}


def binding_table(rows: Sequence[Mapping[str, str]]) -> Group:
    """rows: of `doctor.bindings.RowBinding`, release by release. First a line for each that breaks."""
    broken = [row for row in rows if row["status"] == "breaks"]
    parts: list[Text | FittingTable] = [_line(row) for row in broken]
    for library, version in dict.fromkeys((row["library"], row["version"]) for row in rows):
        mine = [row for row in rows if (row["library"], row["version"]) == (library, version)]
        counts = Counter(row["status"] for row in mine)
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        read = mine[0]["last_read"]
        newer = f"; newer than {read}, the last that was read" if read else ""
        parts += [Text(), Text(f"{library} {version}: {summary}{newer}", "bold")]
        if others := [row for row in mine if row not in broken]:
            parts.append(_release(others))
    return Group(*parts[0 if broken else 1 :])


def _line(row: Mapping[str, str]) -> Text:
    of, status = f"{row['library']} {row['version']}", Text("breaks", STYLES["breaks"])
    line = Text.assemble(f"{of}: {row['op']} {row['implementation']} ", status, f": {row['reason']}")
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _release(rows: Sequence[Mapping[str, str]]) -> FittingTable:
    columns = [
        Column("op"),
        Column("implementation"),
        Column("calls"),
        Column("reason", wraps=True),
        Column("without", wraps=True, spare=1),
    ]
    cells: list[list[str | Text]] = [
        [
            row["op"],
            row["implementation"],
            Text(row["status"], STYLES.get(row["status"], "")),
            row["reason"],
            row["without"],
        ]
        for row in rows
    ]
    return FittingTable(columns, cells)
