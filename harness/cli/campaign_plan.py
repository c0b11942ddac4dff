"""`campaign --plan`: what would be measured when, or the file that starts it on a cluster."""

from __future__ import annotations

import re
import shlex
import string
import sys
from collections.abc import Sequence

from harness.campaign.jobs import Commands
from harness.campaign.plan import Devices, plan_tasks, simulated
from harness.campaign.spec import Step
from harness.catalogue.architectures import architectures
from harness.catalogue.devices import known_devices
from harness.cli.campaign_display import plan_text
from harness.errors import UsageError
from harness.paths import ROOT
from harness.run.device import machine_name
from kernels.platform import Platform, named

FILES = ROOT / "docs" / "clusters"
NAMES = {"node": "node.sh", "slurm": "slurm.sbatch", "kuberay": "kuberay.yaml", "dstack": "dstack.yml"}


def print_plan(
    kind: str,
    steps: Sequence[Step],
    devices: Sequence[str],
    here: Platform,
    budget_s: float,
    commands: Commands,
    file: str | None,
) -> None:
    """kind: `steps`, or what NAMES has. Raises UsageError."""
    counts = dict(_count(text) for text in devices)
    if kind != "steps":
        print(cluster_file(kind, counts, budget_s, file), end="")
        return
    platforms = {type: _platform(type) for type in counts} or {machine_name(here): here}
    counts = counts or dict.fromkeys(platforms, 1)
    of_types = {type: Devices(platform, counts[type]) for type, platform in platforms.items()}
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
    """With the names filled in; of one type of devices, 8 of an H200 where none is named."""
    if len(counts) > 1:
        raise UsageError("--plan prints a file for one type of devices: give one --devices TYPE=N")
    type, count = next(iter(counts.items()), ("H200", 8))
    filled = {
        "type": type,
        "name": type.lower(),
        "count": str(count),
        "nodes": str(-(-count // 8)),
        "per_node": str(min(count, 8)),
        "minutes": f"{budget_s / 60:.0f}",
        "limit": f"{int(budget_s // 60) + 15}",
        "checkout": shlex.quote(str(ROOT)),
        "campaign": f"{shlex.quote(file)} " if file else "",
    }
    return string.Template((FILES / NAMES[kind]).read_text()).safe_substitute(filled)
