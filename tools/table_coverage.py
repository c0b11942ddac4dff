"""Which shapes of DeepSeek-R1 have a tuned entry in AITER, vLLM and SGLang: writes results/tables.

    python -m tools.table_coverage [--aiter PATH] [--vllm PATH] [--sglang PATH]

PATH is what `harness engine` takes; the default is the tables that are recorded in kernels/tables.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.engine import EngineRequest, EngineView, Shape, engine_view
from harness.paths import ROOT
from kernels.tables.lookup import LIBRARIES
from shapes.models import model

FOLDER = ROOT / "results" / "tables"
DEVICES = ("MI300X", "MI325X", "MI350X", "MI355X", "H100", "H200", "B200")
ENGINES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sglang": ("sglang", {}),
    "vllm": ("vllm", {}),
    "vllm with AITER": ("vllm", {"VLLM_ROCM_USE_AITER": "1"}),
}
"""Name of an engine in the tables -> the engine, and its environment variables."""
DEPLOYMENTS: Mapping[str, Mapping[str, Any]] = {
    "TP8": {"tp": 8},
    "TP4": {"tp": 4},
    "DP attention, EP8": {"tp": 8, "ep": 8, "dp_attention": True},
}
TITLES = {"fused_moe": "Fused MoE, FP8", "block_scale_gemm": "Block-scale FP8 GEMM"}


class Deployed(NamedTuple):
    """What an engine runs on a device in a deployment."""

    device: str
    engine: str  # a name of ENGINES
    deployment: str  # a name of DEPLOYMENTS
    view: EngineView


def all_deployed(paths: Mapping[str, Path]) -> Iterator[Deployed]:
    """Each combination; AITER is for AMD's devices only."""
    for device, (name, (engine, env)) in itertools.product(DEVICES, ENGINES.items()):
        if env and not device.startswith("MI"):
            continue
        for deployment, how in DEPLOYMENTS.items():
            request = EngineRequest(engine, device, model("deepseek-r1"), given=env, paths=paths, **how)
            yield Deployed(device, name, deployment, engine_view(request))


def lines(entries: Sequence[Deployed]) -> Iterator[dict[str, Any]]:
    """A line for each op of a deployment whose kernels look into a table. `share of time` is the op's part of
    the time of all four ops at the limits of the device; `time tuned` is a part of the op's time."""
    for (device, engine, deployment, view), op in itertools.product(entries, TITLES):
        shapes = [shape for shape in view.shapes if shape.asks_table and shape.call.op == op]
        if not shapes:
            continue
        tuned = [shape for shape in shapes if shape.found.entry]
        share = sum(shape.share for shape in shapes)
        yield {
            "device": device, "engine": engine, "deployment": deployment, "op": op,
            "implementations": " ".join(dict.fromkeys(shape.row for shape in shapes)),
            "tables": " ".join(dict.fromkeys(_table(shape) for shape in shapes)), "tuned": len(tuned),
            "shapes": len(shapes), "time tuned": round(sum(shape.share for shape in tuned) / share, 3),
            "share of time": round(share, 3),
        }  # fmt: skip


def _table(shape: Shape) -> str:
    """The name of a shape's table, or its folder where each shape has a file of its own."""
    folder, _, name = shape.found.table.rpartition("/")
    return folder if name.endswith(".json") else shape.found.table.partition(" ")[0]


def document(rows: Sequence[Mapping[str, Any]], versions: str) -> str:
    """The README of results/tables. versions: a sentence that names the releases"""
    about = (
        f"{versions} All of it is read from files and untested on hardware; for SGLang on MI350X and MI355X, "
        "ROCm 7.2 or later is assumed. Each cell says how many of the shapes have a tuned entry, what share "
        "they have of the time of all at the limits of the device, and what the engine runs. The shapes are "
        "those of 3200 tokens in and 800 out at 1 to 128 requests, with prompts of 3200 to 128000 tokens at "
        "once (with DP attention 16 to 128 requests a rank and prompts to 16384). **A miss is not yet a "
        "loss**, and a hit may be the entry for the nearest number of tokens or, in SGLang, of a file for "
        "another Triton: `python -m harness engine` says which it is, and what runs after a miss. `-` means "
        "that no table decides, as on B200 and, in GEMM, on H100 and H200, where FlashInfer and DeepGEMM "
        "choose at run time. [coverage.csv](coverage.csv) has the tables and shares. "
        "`tools/table_coverage.py` writes both."
    )
    title = "# Which shapes of DeepSeek-R1 are tuned"
    text = [title, "", textwrap.fill(about, 120, break_on_hyphens=False), ""]
    row_of = {(row["device"], row["engine"], row["deployment"], row["op"]): row for row in rows}
    for op, title in TITLES.items():
        text += [f"## {title}", "", f"| | {' | '.join(DEPLOYMENTS)} |", f"|{'---|' * (len(DEPLOYMENTS) + 1)}"]
        for device, engine in itertools.product(DEVICES, ENGINES):
            cells = [_cell(row_of.get((device, engine, deployment, op))) for deployment in DEPLOYMENTS]
            if any(cell != "-" for cell in cells):
                text.append(f"| {device}, {engine} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    implementations = ", ".join(f"`{name}`" for name in row["implementations"].split())
    return f"{row['tuned']} of {row['shapes']} ({row['time tuned']:.0%}) {implementations}"


def made(paths: Mapping[str, Path]) -> dict[str, str]:
    """The texts of the files of results/tables, by their names."""
    import pandas

    entries = list(all_deployed(paths))
    rows = list(lines(entries))
    releases = dict.fromkeys(entry.view.release for entry in entries)
    libraries: dict[str, str] = {}
    for entry in entries:
        libraries |= entry.view.libraries
    tables = "; ".join(f"{name} {version}" for name, version in libraries.items())
    return {
        "coverage.csv": pandas.DataFrame(rows).to_csv(index=False),
        "README.md": document(rows, f"{' and '.join(releases)}, with the tables of {tables}."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for library in LIBRARIES:
        parser.add_argument(f"--{library}", type=Path, default=Path("recorded"), metavar="PATH")
    FOLDER.mkdir(exist_ok=True)
    for name, text in made(vars(parser.parse_args())).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
