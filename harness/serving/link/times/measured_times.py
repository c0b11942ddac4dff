"""Kernel times from own runs of this suite, in place of the tables' where they were measured near enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError
from harness.serving.link.times.interpolation import Surface
from shapes.lengths import parse_span

PREFERRED = [(boundary, launch) for boundary in ("with_quant", "core") for launch in ("graph", "eager")]
"""Boundaries and launches, the best first: engines decode in graphs. Routing is a term of its own."""
AXES = {
    "block_scale_gemm": (("n", "k"), ("m",)),
    "fused_moe": (("experts", "topk", "hidden", "inter", "ep", "shared"), ("tokens",)),
    "mla_decode": (("heads", "kv"), ("batch", "ctx")),
    "mha_prefill": (("heads", "prefix"), ("batch", "new")),
}
"""By op: the sizes that are looked up, and those between which times are interpolated."""

Key = tuple[str, tuple[Any, ...]]  # the op, and the sizes that are looked up


@dataclass(frozen=True)
class MeasuredTimes:
    """device: whose times they are; surfaces: over the sizes that are interpolated"""

    device: str
    where: str
    surfaces: Mapping[Key, Surface]

    def ops(self) -> list[str]:
        return sorted({op for op, _ in self.surfaces})


def is_run(path: str) -> bool:
    """Whether there are runs of this suite at a path."""
    from harness.results.read import run_folders

    try:
        return bool(run_folders(path))
    except UsageError:
        return False


def read_measured_times(runs: Sequence[str]) -> MeasuredTimes:
    """The fastest correct implementation of each case of these runs, in a graph where there is one.

    Raises UsageError where a run cannot be read, or they are of several machines.
    """
    from harness.results.read import load

    cells = [cell for run in runs for cell in load(run).to_dict("records")]
    devices = sorted({cell["machine"] for cell in cells if cell["machine"]})
    if len(devices) != 1:
        raise UsageError(f"runs are of {len(devices)} machines ({', '.join(devices)}); give those of one")
    best: dict[Key, dict[tuple[float, ...], float]] = {}
    for cell in sorted(filter(_is_usable, cells), key=_rank, reverse=True):  # the best replaces others
        sizes = dict(word.split("=", 1) for word in cell["case"].split() if "=" in word)
        fixed, axes = AXES[cell["op"]]
        key = (cell["op"], tuple(_plain(sizes.get(name, "0")) for name in fixed))
        best.setdefault(key, {})[tuple(sum(parse_span(sizes[name])) / 2 for name in axes)] = cell["time_us"]
    if not best:
        raise UsageError(f"no correct times of {', '.join(AXES)} in {', '.join(runs)}")
    return MeasuredTimes(devices[0], ", ".join(runs), {key: Surface(times) for key, times in best.items()})


def _is_usable(cell: Mapping[str, Any]) -> bool:
    known = cell["op"] in AXES and (cell["boundary"], cell["launch"]) in PREFERRED
    return known and cell["status"] == "ok" and not math.isnan(cell["time_us"])


def _rank(cell: Mapping[str, Any]) -> tuple[int, float]:
    return PREFERRED.index((cell["boundary"], cell["launch"])), cell["time_us"]


def _plain(text: str) -> Any:
    return int(text) if text.isdigit() else text
