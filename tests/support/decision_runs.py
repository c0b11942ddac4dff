"""Recorded runs written by hand for `decide`, with rows of a made-up engine on a made-up H200."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.results.schema import Cell, Record, Verdict
from shapes.case import Case, Size
from tests.support.decision_worlds import ARCH
from tests.support.written_runs import MACHINE, cell, finished, verdict, write

DEVICE = MACHINE | {"platform": "cuda", "arch": ARCH, "device": "NVIDIA H200"}
CUDA = {"platform": "cuda", "arch": ARCH, "launch": "graph"}
MLA = {"ctx": 4096, "heads": 16, "page": 64, "kv": "bf16"}
PLACE = "deepseek-r1 tp8 decode"


def mla(batch: int, place: str = "ad hoc", **sizes: Size) -> Case:
    return Case("mla_decode", {"batch": batch, **MLA, **sizes}, place=place)


def gemm(m: int, place: str = "ad hoc", boundary: str = "with_quant", **sizes: Size) -> Case:
    return Case("block_scale_gemm", {"m": m, "n": 7168, "k": 2048, **sizes}, boundary, place)


def moe(tokens: int, place: str = "ad hoc") -> Case:
    sizes = {"tokens": tokens, "experts": 256, "topk": 8, "hidden": 7168, "inter": 256, "ep": 1, "shared": 0}
    return Case("fused_moe", sizes, "with_quant", place)


def run(
    folder: Path, times: Sequence[tuple[Case, Mapping[str, float | None]]], apart: float = 0.0, **facts: Any
) -> Path:
    """us of each case by row, the first row the baseline; None: unsupported. The scatter is 0.2 %, the A/A
    pair differs by `apart`. A row `name under SETTING` was measured under that setting. facts: of the run."""
    records: list[Record] = []
    for case, rows in times:
        cells = []
        for name, us in rows.items():
            impl, _, setting = name.partition(" under ")
            launch = {"launch": impl.partition(" ")[2]} if " " in impl else {}
            own = CUDA | launch | ({"setting": setting} if setting else {})
            cells.append(cell(case, impl.partition(" ")[0], us, (us or 0) * 0.002, **own))
        timed = next(each for each in cells if each.time_us)
        records += [*cells, a_a(timed, apart), finished(case)]
    cases = [case for case, _ in times]
    told = {"op": cases[0].op, "launches": ["graph"], "provenance": {"machine": DEVICE}}
    return write(folder, records, cases, **told | facts)


def cases_file(path: Path, *calls: tuple[Case, float]) -> str:
    """Of cases with their calls."""
    rows = [{"op": case.op, "sizes": case.text, "weight": each} for case, each in calls]
    path.write_text(json.dumps({"cases": rows}))
    return str(path)


def a_a(of: Cell, apart: float) -> Verdict:
    """The pair of a cell and its rerun."""
    found = verdict(of, of, "unclear", "A/A", half=0.005)
    return found.model_copy(update={"ratio": 1 + apart, "low": 0.995 + apart, "high": 1.005 + apart})
