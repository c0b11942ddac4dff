"""The table of compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from harness.compile.survey import span, tile


def compile_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each kernel, tile and target, over the configurations that differ in sizes only."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["target"], one["op"], one["kernel"], tile(one["config"])), []).append(one)
    lines = [
        [
            *key,
            len(group),
            span(group, "registers"),
            span(group, "spills"),
            span(group, "scratch_bytes"),
            span(group, "shared_bytes", 1024),
            span(group, "code_bytes", 1024),
            span(group, "resident"),
            "\n".join(dict.fromkeys(name for one in group for name in one["matrix_instructions"])),
            "ok" if all(one["ok"] for one in group) else f"{sum(not one['ok'] for one in group)} bad",
        ]
        for key, group in groups.items()
    ]
    headers = ["target", "op", "kernel", "tile", "configs", "registers", "spills", "scratch B", "shared KB",
               "code KB", "resident", "matrix instructions", "verdict"]  # fmt: skip
    return tabulate(lines, headers, disable_numparse=True)
