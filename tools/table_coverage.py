"""Which shapes of DeepSeek-R1 the newest AITER, vLLM and SGLang have tuned: writes results/tables.

    python -m tools.table_coverage [--aiter PATH] [--vllm PATH] [--sglang PATH]

Each PATH as `harness engine` takes it; the tables recorded in kernels/tables by default.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from harness.engine.view import EngineRequest, EngineView, engine_view
from harness.paths import ROOT
from kernels.engines import archs
from shapes.models import model

FOLDER = ROOT / "results" / "tables"
DEVICES = ("MI300X", "MI325X", "MI350X", "MI355X", "H100", "H200", "B200")
ENGINES = {
    "vllm": ("vllm", {}),
    "vllm, VLLM_ROCM_USE_AITER=1": ("vllm", {"VLLM_ROCM_USE_AITER": "1"}),
    "sglang": ("sglang", {}),
}
DEPLOYMENTS = {
    "TP8": {"tp": 8},
    "TP4": {"tp": 4},
    "DP8 attention, EP8": {"tp": 8, "ep": 8, "dp_attention": True},
}
COLUMNS = ("device", "engine", "deployment", "op", "row", "table", "tuned", "shapes", "time tuned", "share")


def rows_of(view: EngineView, device: str, engine: str, deployment: str) -> list[dict[str, str]]:
    """A line for each op and row whose kernel looks into a table."""
    groups: dict[tuple[str, str], list] = {}
    for shape in view.shapes:
        if shape.found:
            groups.setdefault((shape.call.op, shape.row), []).append(shape)
    lines = []
    for (op, row), shapes in groups.items():
        share = sum(shape.share for shape in shapes)
        tuned = [shape for shape in shapes if shape.state == "tuned"]
        lines.append(
            {
                "device": device,
                "engine": engine,
                "deployment": deployment,
                "op": op,
                "row": row,
                "table": " ".join(dict.fromkeys(shape.found.table.split(" (")[0] for shape in shapes)),
                "tuned": str(len(tuned)),
                "shapes": str(len(shapes)),
                "time tuned": f"{sum(shape.share for shape in tuned) / share:.3f}" if share else "",
                "share": f"{share:.3f}",
            }
        )
    return lines
