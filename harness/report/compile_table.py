"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.text import extent

if TYPE_CHECKING:
    from harness.report.fitting_table import FittingTable


HEADERS = (
    "target", "op", "kernel", "tile", "configs", "registers", "spills", "scratch B", "shared KB", "code KB",
    "resident", "matrix instructions", "verdict",
)  # fmt: skip


def compile_lines(rows: Sequence[JsonObject]) -> list[list[str]]:
    """A line for each kernel, tile and target, over the configurations that differ in sizes only."""
    groups: dict[tuple[str, ...], list[JsonObject]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["op"], row["kernel"], tile(row["config"])), []).append(row)
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
    from harness.report.fitting_table import Column, FittingTable

    spares = {
        "op": 2,
        "configs": 3,
        "scratch B": 5,
        "shared KB": 4,
        "code KB": 6,
        "resident": 1,
        "matrix instructions": 7,
    }
    columns = [
        Column(name, right=name in HEADERS[4:11], wraps=name == "tile", spare=spares.get(name, 0))
        for name in HEADERS
    ]
    return FittingTable(columns, compile_lines(rows))
