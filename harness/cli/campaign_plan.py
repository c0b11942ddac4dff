"""`campaign --plan`: what would be measured when, or the file that starts it on a cluster."""

from __future__ import annotations

import math
import re
import shlex
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.campaign.jobs import Commands
from harness.campaign.plan import Devices, plan_tasks, simulated
from harness.campaign.spec import DEFAULTS, steps_of
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
"""What dstack starts, as a line of its file: its own image, or one that brings ROCm's torch."""


def print_plan(
    kind: str,
    file: str | None,
    devices: Sequence[str],
    here: Platform,
    budget_s: float,
    commands: Commands,
) -> None:
    """kind: `steps`, or what NAMES has. Raises UsageError."""
    counts = dict(_count(text) for text in devices)
    if kind != "steps":
        print(cluster_file(kind, counts, budget_s, file), end="")
        return
    platforms = {type: _platform(type) for type in counts} or {device_type(here): here}
    counts = counts or dict.fromkeys(platforms, 1)
    of_types = {type: Devices(platform, counts[type]) for type, platform in platforms.items()}
    steps = steps_of(file, [platform.kind for platform in platforms.values()])
    dispatcher, reasons = plan_tasks(steps, of_types, budget_s, commands)
    print(plan_text(simulated(dispatcher, counts, budget_s), budget_s))
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([\w.-]+)=([1-9]\d{0,4})", text)
    if not match:
        raise UsageError(f"cannot read --devices {text!r}; write for example H200=8")
    return match[1], int(match[2])


def _platform(type: str) -> Platform:
    """Of a device that need not be here, by its name in the catalogue."""
    for entry in known_devices():
        if entry["name"].lower() == type.lower():
            return named(architectures()[entry["arch"]].kind, entry["arch"])
    if type == "cpu":
        return named("cpu")
    names = ", ".join(entry["name"] for entry in known_devices())
    raise UsageError(f"unknown device {type!r}; devices: {names}, cpu")


def cluster_file(kind: str, counts: dict[str, int], budget_s: float, file: str | None) -> str:
    """With the names filled in; of one type of GPUs, 8 H200 where none is named. Raises UsageError."""
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
    """As it is called in the checkout, where the commands run; by its whole path if it is elsewhere."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
