"""Kernel times from own runs of this suite, in place of the tables' where they were measured near enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError
from harness.serving.link.times.interpolation import Surface
from kernels import OPS
from shapes.lengths import parse_span

BOUNDARIES = ("with_quant", "core")  # in the order of preference; routing is a term of its own
LAUNCHES = ("graph", "eager")  # in the order of preference: engines decode in graphs
AXES = {
    "block_scale_gemm": (("n", "k"), ("m",)),
    "fused_moe": (("experts", "topk", "hidden", "inter", "ep", "shared"), ("tokens",)),
    "mla_decode": (("heads", "kv"), ("batch", "ctx")),
    "mha_prefill": (("heads", "prefix"), ("batch", "new")),
}
"""By op: the sizes that are looked up, and those between which times are interpolated."""


Key = tuple[str, tuple[Any, ...]]  # the op, and what its case is called by
BestTimes = dict[Key, dict[tuple[float, ...], tuple[tuple[int, int], float]]]


@dataclass(frozen=True)
class MeasuredTimes:
    """device: whose times they are; surfaces: by op and the sizes that are not interpolated, each over 1 and
    the sizes that are."""

    device: str
    where: str
    surfaces: Mapping[Key, Surface]

    def ops(self) -> list[str]:
        return sorted({op for op, _ in self.surfaces})


def read_measured_times(runs: Iterable[str]) -> MeasuredTimes:
    """The fastest correct implementation of each case of these runs, in a graph where there is one.

    Raises UsageError where a run cannot be read, they are of several machines, or pandas is missing.
    """
    runs = list(runs)
    try:
        from harness.results.read import load

        cells = [cell for run in runs for cell in load(run).to_dict("records")]
    except ImportError as error:
        raise UsageError(f"runs need {error.name}: pip install {error.name}") from None
    devices = sorted({cell["machine"] for cell in cells if cell["machine"]})
    if len(devices) != 1:
        raise UsageError(f"runs are of {len(devices)} machines ({', '.join(devices)}); give those of one")
    best: BestTimes = {}
    for cell in cells:
        if cell["op"] in AXES and cell["status"] == "ok" and cell["time_us"] == cell["time_us"]:
            _take(best, cell)
    surfaces = {key: Surface([((1.0, *s), us) for s, (_, us) in of.items()]) for key, of in best.items()}
    if not surfaces:
        raise UsageError(f"no correct times of {', '.join(AXES)} in {', '.join(map(str, runs))}")
    return MeasuredTimes(devices[0], ", ".join(map(str, runs)), surfaces)


def _take(best: BestTimes, cell: Mapping[str, Any]) -> None:
    op = cell["op"]
    boundaries = [boundary for boundary in BOUNDARIES if boundary in OPS[op].boundaries]
    if cell["boundary"] not in boundaries or cell["launch"] not in LAUNCHES:
        return
    sizes = dict(word.split("=", 1) for word in cell["case"].split() if "=" in word)
    fixed, axes = AXES[op]
    key = (op, tuple(_plain(sizes.get(name, "0")) for name in fixed))
    place = tuple(sum(parse_span(sizes[name])) / 2 for name in axes)
    rank = (boundaries.index(cell["boundary"]), LAUNCHES.index(cell["launch"]))
    known = best.setdefault(key, {}).get(place)
    if known is None or (rank, cell["time_us"]) < known:
        best[key][place] = (rank, cell["time_us"])


def _plain(text: str) -> Any:
    return int(text) if text.isdigit() else text
