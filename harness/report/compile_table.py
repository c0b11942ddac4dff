"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.text import extent, table


def compile_table(rows: Sequence[JsonObject]) -> str:
    """A line for each kernel, tile and target, over the configurations that differ in sizes only."""
    groups: dict[tuple[str, ...], list[JsonObject]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["op"], row["kernel"], tile(row["config"])), []).append(row)
    lines = [
        [
            *key,
            len(group),
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
    headers = ["target", "op", "kernel", "tile", "configs", "registers", "spills", "scratch B", "shared KB",
               "code KB", "resident", "matrix instructions", "verdict"]  # fmt: skip
    return table(lines, headers)
