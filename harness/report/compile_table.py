"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.fitting_table import Column, FittingTable
from harness.report.text import extent, grouped

HEADERS = (
    "target", "op", "kernel", "tile", "configs", "registers", "spills", "scratch B", "shared KB", "code KB",
    "resident", "matrix instructions", "verdict",
)  # fmt: skip
SPARE = {
    "matrix instructions": 7, "code KB": 6, "scratch B": 5, "shared KB": 4, "configs": 3, "op": 2,
    "resident": 1,
}  # fmt: skip
"""Columns that a narrow terminal does without: that of the highest number goes first."""


def compile_lines(rows: Sequence[JsonObject]) -> list[list[str]]:
    """A line for each target, op, kernel and tile. It has the range over the configurations of that tile,
    which differ in sizes only."""
    groups = grouped(rows, lambda row: (row["target"], row["op"], row["kernel"], tile(row["config"])))
    return [
        [
            *key,
            str(len(group)),
            extent(row["registers"] for row in group),
            extent(row["spills"] for row in group),
            extent(row["scratch_bytes"] for row in group),
            extent(row["shared_bytes"] / 1024 for row in group),
            extent(row["code_bytes"] / 1024 for row in group),
            extent(row["resident"] for row in group),
            "\n".join(dict.fromkeys(name for row in group for name in row["matrix_instructions"])),
            "ok" if all(row["ok"] for row in group) else f"{sum(not row['ok'] for row in group)} bad",
        ]
        for key, group in groups.items()
    ]


def compile_table(rows: Sequence[JsonObject]) -> FittingTable:
    columns = [
        Column(name, right=name in HEADERS[4:11], wraps=name == "tile", spare=SPARE.get(name, 0))
        for name in HEADERS
    ]
    return FittingTable(columns, compile_lines(rows))
