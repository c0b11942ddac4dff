"""Which shapes of DeepSeek-R1 have a tuned entry in AITER, vLLM and SGLang: writes results/tables.

    python -m tools.table_coverage [--aiter PATH] [--vllm PATH] [--sglang PATH]

Each PATH as `harness engine` takes it; by default the tables that are recorded in kernels/tables.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.engine.view import EngineRequest, EngineView, Shape, engine_view
from harness.paths import ROOT
from kernels.engines import archs
from shapes.models import model

FOLDER = ROOT / "results" / "tables"
DEVICES = ("MI300X", "MI325X", "MI350X", "MI355X", "H100", "H200", "B200")
ENGINES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sglang": ("sglang", {}),
    "vllm": ("vllm", {}),
    "vllm with AITER": ("vllm", {"VLLM_ROCM_USE_AITER": "1"}),
}
DEPLOYMENTS: Mapping[str, Mapping[str, Any]] = {
    "TP8": {"tp": 8},
    "TP4": {"tp": 4},
    "DP attention, EP8": {"tp": 8, "ep": 8, "dp_attention": True},
}
TRITON = {"vllm": "3.7.1", "sglang": "3.7.1"}
"""Beside the newest releases (torch 2.14.1, which both pin)."""


def views(paths: Mapping[str, Path]) -> Iterator[tuple[str, str, str, EngineView]]:
    """Device, engine and deployment with what is found."""
    for device in DEVICES:
        for name, (engine, given) in ENGINES.items():
            if given and not device.startswith("MI"):
                continue
            for deployment, how in DEPLOYMENTS.items():
                request = EngineRequest(
                    engine, device, model("deepseek-r1"), given=given, paths=paths, triton=TRITON[engine], **how
                )
                yield device, name, deployment, engine_view(request)
