"""A few steps cut out of a trace, small enough to keep: what tests/data/serving/traces was made with.

    python -m tools.cut_trace IN.json.gz OUT.json.gz --steps 0:4       of torch.profiler, by its annotations
    python -m tools.cut_trace IN.json.gz OUT.json.gz --dispatches 2000:3000     of rocprofv3

Events stay as they are. Left out: Python's functions, flows, what runs in other steps, symbols that nothing
dispatches.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import click

from harness.serving.trace.classify import marks_step

DROPPED = ("python_function", "ac2g", "fwdbwd")


def cut_steps(trace: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Steps first to last - 1 of torch.profiler's trace, in the order of time."""
    events = [e for e in trace["traceEvents"] if e.get("cat") not in DROPPED]
    marks = sorted(e["ts"] for e in events if e.get("cat") == "user_annotation" and marks_step(e["name"]))
    begin, end = marks[first], marks[last] if last < len(marks) else float("inf")
    kept = [e for e in events if e.get("ph") != "M" and begin <= e["ts"] < end]
    launched = {e["args"].get("correlation") for e in kept if e.get("cat", "").startswith("cuda_")}
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    kept = [e for e in kept if e.get("cat") not in work] + [
        e for e in events if e.get("cat") in work and e["args"].get("correlation") in launched
    ]
    return {**trace, "traceEvents": [e for e in events if e.get("ph") == "M"] + kept}


def cut_dispatches(trace: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Dispatches first to last - 1 of the first process of rocprofv3's results, in the order of the file."""
    tool = trace["rocprofiler-sdk-tool"][0]
    dispatches = tool["buffer_records"]["kernel_dispatch"][first:last]
    used = {one["dispatch_info"]["kernel_id"] for one in dispatches}
    small = {
        "metadata": {"pid": tool["metadata"]["pid"]},
        "agents": [{k: a[k] for k in ("id", "type", "name", "product_name")} for a in tool["agents"]],
        "strings": {"buffer_records": tool["strings"]["buffer_records"]},
        "kernel_symbols": [s for s in tool["kernel_symbols"] if s["kernel_id"] in used],
        "buffer_records": {**tool["buffer_records"], "kernel_dispatch": dispatches},
    }
    return {"rocprofiler-sdk-tool": [small]}


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--steps", help="FIRST:LAST")
@click.option("--dispatches", help="FIRST:LAST")
def main(source: Path, target: Path, steps: str | None, dispatches: str | None) -> None:
    trace = json.loads(gzip.decompress(source.read_bytes()))
    first, last = map(int, (steps or dispatches or "0:1").split(":"))
    small = cut_steps(trace, first, last) if steps else cut_dispatches(trace, first, last)
    target.write_bytes(gzip.compress(json.dumps(small, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
