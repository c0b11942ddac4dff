"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.text import extent

if TYPE_CHECKING:
    from harness.report.fitting_table import FittingTable


def compile_table(rows: Sequence[JsonObject]) -> FittingTable:
    """A line for each kernel, tile and target, over the configurations that differ in sizes only."""
    from harness.report.fitting_table import Column, FittingTable

    groups: dict[tuple[str, ...], list[JsonObject]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["op"], row["kernel"], tile(row["config"])), []).append(row)
    lines = [
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
    columns = [
        Column("target"),
        Column("op", spare=2),
        Column("kernel"),
        Column("tile", wraps=True),
        Column("configs", right=True, spare=3),
        Column("registers", right=True),
        Column("spills", right=True),
        Column("scratch B", right=True, spare=5),
        Column("shared KB", right=True, spare=4),
        Column("code KB", right=True, spare=6),
        Column("resident", right=True, spare=1),
        Column("matrix instructions", spare=7),
        Column("verdict"),
    ]
    return FittingTable(columns, lines)
