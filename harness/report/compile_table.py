"""The table of compiled Triton kernels: registers, spills, shared memory, occupancy, verdict."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compile.survey import tile
from harness.files import JsonObject
from harness.report.text import extent, grouped

TEXT_COLUMNS = {"target", "kernel", "tile", "verdict", "op", "matrix instructions"}  # those without numbers


def compile_lines(rows: Sequence[JsonObject]) -> list[dict[str, str]]:
    """A line for each target, op, kernel and tile, of whose configurations it has the ranges, by column; the
    most important column is the first. rows: as `compile --json` writes them"""
    groups = grouped(rows, lambda row: (row["target"], row["op"], row["kernel"], tile(row["config"])))
    lines = []
    for (target, op, kernel, tile_text), group in groups.items():
        bad = [row for row in group if not row["ok"]]
        instructions = dict.fromkeys(name for row in group for name in row["matrix_instructions"])
        line = {
            "target": target, "kernel": kernel, "tile": tile_text,
            "verdict": f"{len(bad)} bad" if bad else "ok",
            "registers": extent(row["registers"] for row in group),
            "spills": extent(row["spills"] for row in group),
            "resident": extent(row["resident"] for row in group), "op": op, "configs": str(len(group)),
            "shared KB": extent(row["shared_bytes"] / 1024 for row in group),
            "scratch B": extent(row["scratch_bytes"] for row in group),
            "code KB": extent(row["code_bytes"] / 1024 for row in group),
            "matrix instructions": "\n".join(instructions),
        }  # fmt: skip
        lines.append(line)
    return lines
