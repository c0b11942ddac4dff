"""`campaign --plan`: what would be measured when, or the file that starts it on a cluster."""

from __future__ import annotations

import math
import re
import shlex
import string
import sys
from pathlib import Path

from harness.campaign.execute import CampaignRequest
from harness.campaign.plan import DEFAULTS, ReadStep, planned_jobs, simulated, steps_of
from harness.catalogue.architectures import architectures
from harness.catalogue.devices import known_devices
from harness.cli.campaign_display import plan_text
from harness.errors import UsageError
from harness.paths import ROOT
from harness.run.device import device_type
from kernels.platform import Platform, named

FILES = ROOT / "docs" / "clusters"
NAMES = {"node": "node.sh", "slurm": "slurm.sbatch", "kuberay": "kuberay.yaml", "dstack": "dstack.yml"}
IMAGES = {"cuda": 'python: "3.12"', "rocm": "image: rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210"}
"""The line of dstack's file that says what it starts: its own image, or one that brings ROCm's torch."""


def print_plan(request: CampaignRequest, here: Platform, read: ReadStep) -> None:
    """Prints the plan of a campaign's steps, or the file that starts it. Raises UsageError."""
    kind, budget_s = request.plan or "steps", request.budget_s
    counts = dict(_count(text) for text in request.devices)
    if kind != "steps":
        print(cluster_file(kind, counts, budget_s, request.file), end="")
        return
    platforms = {type: _platform(type) for type in counts} or {device_type(here): here}
    counts = counts or dict.fromkeys(platforms, 1)
    steps = steps_of(request.file, [platform.kind for platform in platforms.values()])
    jobs, reasons = planned_jobs(steps, platforms, budget_s, read)
    print(plan_text(simulated(jobs, counts, budget_s), budget_s))
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([\w.-]+)=([1-9]\d{0,4})", text)
    if not match:
        raise UsageError(f"cannot read --devices {text!r}; write for example H200=8")
    return match[1], int(match[2])


def _platform(type: str) -> Platform:
    """The platform of a device that need not be here, by its name in the catalogue."""
    for entry in known_devices():
        if entry["name"].lower() == type.lower():
            return named(architectures()[entry["arch"]].kind, entry["arch"])
    if type == "cpu":
        return named("cpu")
    names = ", ".join(entry["name"] for entry in known_devices())
    raise UsageError(f"unknown device {type!r}; devices: {names}, cpu")


def cluster_file(kind: str, counts: dict[str, int], budget_s: float, file: str | None) -> str:
    """The text of the file for one type of GPUs, for 8 H200 where none is named. Raises UsageError."""
    if len(counts) > 1:
        raise UsageError("--plan prints a file for one type of devices: give one --devices TYPE=N")
    type, count = next(iter(counts.items()), ("H200", 8))
    platform = _platform(type)
    if platform.kind == "cpu":
        raise UsageError("--plan prints files for GPUs: give one --devices TYPE=N of a type of GPUs")
    nodes, minutes = -(-count // 8), math.ceil(budget_s / 60)
    filled = {
        "type": type,
        "name": re.sub(r"[^a-z0-9]+", "-", type.lower()),
        "vendor": {"cuda": "nvidia", "rocm": "amd"}[platform.kind],
        "image": IMAGES[platform.kind],
        "count": str(count),
        "nodes": str(nodes),
        "per_node": str(-(-count // nodes)),
        "minutes": str(minutes),
        "limit": str(minutes + 15),
        "checkout": shlex.quote(str(ROOT)),
        "root": str(ROOT),
        "campaign": shlex.quote(_in_checkout(file or DEFAULTS / f"{platform.kind}.toml")),
    }
    return string.Template((FILES / NAMES[kind]).read_text()).safe_substitute(filled)


def _in_checkout(file: str | Path) -> str:
    """The path as commands in the checkout call it; the whole path if the file is elsewhere."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
