"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.text import extent, grouped

TEXTS = {"target", "kernel", "tile", "verdict", "op", "matrix instructions"}  # columns that are no numbers


def compile_lines(rows: Sequence[JsonObject]) -> list[dict[str, str]]:
    """A line for each target, op, kernel and tile, by column, the most important first. It has the range over
    the configurations of that tile, which differ in sizes only."""
    groups = grouped(rows, lambda row: (row["target"], row["op"], row["kernel"], tile(row["config"])))
    return [
        {
            "target": target,
            "kernel": kernel,
            "tile": of_tile,
            "verdict": "ok" if all(row["ok"] for row in of) else f"{sum(not row['ok'] for row in of)} bad",
            "registers": extent(row["registers"] for row in of),
            "spills": extent(row["spills"] for row in of),
            "resident": extent(row["resident"] for row in of),
            "op": op,
            "configs": str(len(of)),
            "shared KB": extent(row["shared_bytes"] / 1024 for row in of),
            "scratch B": extent(row["scratch_bytes"] for row in of),
            "code KB": extent(row["code_bytes"] / 1024 for row in of),
            "matrix instructions": "\n".join(
                dict.fromkeys(i for row in of for i in row["matrix_instructions"])
            ),
        }
        for (target, op, kernel, of_tile), of in groups.items()
    ]
