"""The serving workloads under which public documents ran DeepSeek-R1: workloads.toml names them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from shapes.attention import Parallel
from shapes.scheduler import Workload
from shapes.toml import read_toml


@dataclass(frozen=True)
class Documented:
    """A workload, the deployment that served it, and the document that says so."""

    workload: Workload
    parallel: Parallel
    source: str  # what ran, and which document says so
    kv: str = "bf16"  # the dtype of the KV cache

    @property
    def on_rank(self) -> Workload:
        return self.workload.on_rank(self.parallel.dp)


def documented() -> dict[str, Documented]:
    """Name -> workload: `serving-ISL-OSL-cCONCURRENCY[-mixed]` and `offline-ISL-OSL-bBATCH`."""
    found = {}
    for run in read_toml(Path(__file__).with_suffix(".toml"))["run"]:
        parallel, kv = Parallel(**run.get("parallel", {"tp": 8})), run.get("kv", "bf16")
        for osl, concurrency in itertools.product(run["osl"], run["concurrency"]):
            values = {"osl": osl, "concurrency": concurrency, "num_prompts": concurrency, **run["workload"]}
            if "itl_ms" in run:  # the mean inter-token latency, which is the time of a step
                values["arrival_steps"] = 1000 / (run["requests_per_s"] * run["itl_ms"])
            workload = Workload(**values)
            running = f", {workload.places} running" if workload.places < concurrency else ""
            source = run["source"].format(running=running, **values)
            found[run["name"].format(**values)] = Documented(workload, parallel, source, kv)
    return found
