"""`python -m harness doctor`: what this machine is, and what would make its numbers better."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

import kernels
from harness.ceilings import ceilings, datasheet, last_level
from harness.errors import UsageError
from harness.provenance import LIBRARIES, provenance
from harness.workers import WorkerFailure, physical_cores
from kernels.platform import Platform, detect, devices, version


def show(json_to: str | None) -> None:
    """Prints the findings; measures the device's ceilings where they are not known yet."""
    here = detect()
    facts = examine(here)
    if json_to == "-":
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        return
    if json_to:
        try:
            Path(json_to).write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {json_to}: {error.strerror}") from None
        return
    for title, values in facts.items():
        if isinstance(values, dict):
            print(f"{title}\n" + tabulate([[f"  {k}", v] for k, v in values.items()], tablefmt="plain"))
        else:
            print(f"{title}\n" + "\n".join(f"  - {line}" for line in values or ["nothing found"]))
        print()


def examine(here: Platform) -> dict[str, Any]:
    surroundings = provenance(here, physical_cores())
    entry = datasheet(here)
    sheet = (
        f"{entry['name']}: {entry['source']}" if entry else "none known, so no row can be called impossible"
    )
    limits: dict[str, Any] = {"datasheet": sheet}
    try:
        found = ceilings(here, physical_cores())
        limits |= {
            "read from memory": f"{found.bytes / 1e9:.1f} GB/s",
            "bf16 product": f"{found.flops / 1e12:.3g} TFLOPS",
            "measured": found.measured,
        }
    except WorkerFailure as failure:
        limits["measured"] = f"could not be: {failure.reason}"
    level = last_level(here)
    limits["last-level cache"] = f"{level / (1 << 20):.0f} MiB" if level else "unknown"
    runs = [i for op in kernels.OPS for i in kernels.implementations(op) if i.available(here).ok]
    return {
        "machine": {k: v for k, v in surroundings["machine"].items() if v != ""},
        "devices": {device: f"{p.kind} {p.arch} {p.name}" for device, p in devices().items()},
        "libraries": {name: version(name) or "not installed" for name in LIBRARIES},
        "ceilings": limits,
        "runs here": {i.op + " " + i.name: "checked only" if i.interpreted(here) else "timed" for i in runs},
        "what would improve it": advice(here),
    }


def advice(here: Platform) -> list[str]:
    """What stands between this machine and quieter or more complete numbers."""
    found = []
    for op in kernels.OPS:
        for impl in kernels.implementations(op):
            support = impl.available(here)
            if not support.ok and "not installed" in support.reason:
                found.append(f"{impl.name}: {support.reason}")
    load = os.getloadavg()[0]
    if load > 0.5:
        found.append(f"other work is running here (load {load:.1f}): its noise will be in the numbers")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if here.kind == "cpu" and governor.exists() and (name := governor.read_text().strip()) != "performance":
        found.append(f"the CPU frequency governor is {name}: performance drifts less")
    if here.kind == "cpu" and "hypervisor" in here.features:
        found.append("this is a virtual machine: its neighbours' noise is not visible from inside")
    if here.kind == "cpu" and shutil.which("nvidia-smi"):
        found.append("nvidia-smi is installed but shows no GPU")
    return found
