"""Headline claims for AITER, compared with recorded runs.

A claim names no baseline, so each is compared with three kinds of rival: naive torch, the best of torch, and
Triton.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.files import JsonObject
from harness.results.comparison import paired
from harness.results.read import read, run_folders
from harness.results.schema import Cell
from kernels.platform import Platform

RIVALS = {
    "naive torch": ("torch.naive",),
    "the best of torch": ("torch.*", "hipblaslt.*", "aotriton*"),
    "Triton": ("triton.*", "vllm.triton*", "sglang.triton*"),
}
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """time(b) / time(a) of one case, a and b each the fastest of its kind there."""

    ratio: float
    low: float
    high: float
    a: str
    b: str
    case: str
    run: str


@dataclass(frozen=True)
class Test:
    """What recorded runs say of a claim against one kind of rival."""

    op: str
    said: str  # the claim in its own words
    factor: float  # the claimed time of a rival over that of the kernel, at most
    against: str  # the kind of rival
    runs: tuple[str, ...]  # implementations of either side that this machine can time
    cases: int  # how many cases both sides were measured at on the claim's hardware
    claimed: Ratio | None  # the largest ratio that the claim's kernels reached on the claim's hardware
    here: Ratio | None
    """The largest ratio that any kernel reached over the rival on this machine's architecture. It shows how
    large such factors get, and is no evidence for the claim."""
    verdict: str  # supported, not supported, unclear, or that the claim's device was not measured


def examine(document: JsonObject, here: Platform, cells: Sequence[tuple[str, Cell]]) -> list[Test]:
    """A test for each claim and kind of rival.

    document: the file of claims; its `kernels` are patterns of the implementations that the claims are about
    cells: run folders and cells of any runs; each counts for the architecture that it was measured on
    """
    tests = []
    for claim in document["claims"]:
        op = claim["op"]
        able = [
            i.name for i in kernels.implementations(op) if i.available(here).ok and not i.interpreted(here)
        ]
        claimed = document["kernels"]
        for against, rivals in RIVALS.items():
            on_claimed_arch = ratios(op, document["arch"], cells, claimed, rivals)
            on_this_arch = ratios(op, here.arch, cells, ("*",), rivals)
            tests.append(
                Test(
                    op=op,
                    said=claim["said"],
                    factor=claim["factor"],
                    against=against,
                    runs=tuple(name for name in able if matches(name, (*claimed, *rivals))),
                    cases=len(on_claimed_arch),
                    claimed=max(on_claimed_arch, key=lambda r: r.ratio, default=None),
                    here=max(on_this_arch, key=lambda r: r.ratio, default=None),
                    verdict=verdict(claim["factor"], on_claimed_arch, document["device"]),
                )
            )
    return tests


def verdict(factor: float, ratios: Sequence[Ratio], device: str) -> str:
    """A claim of "up to" a factor is supported if the interval of one case lies above it, and not supported
    if the intervals of all cases lie below it."""
    if not ratios:
        return f"not measured on {device}"
    if any(r.low >= factor for r in ratios):
        return "supported"
    return "not supported" if all(r.high < factor for r in ratios) else "unclear"


def ratios(
    op: str, arch: str, cells: Iterable[tuple[str, Cell]], claimed: Sequence[str], rivals: Sequence[str]
) -> list[Ratio]:
    """One ratio for each run and case that has both sides: the fastest claimed kernel against the fastest
    rival. The confidence is shared among all of them, because the largest is looked for (Bonferroni).
    claimed, rivals: patterns of implementations"""
    sides: dict[tuple[str, str, str, str], tuple[list[Cell], list[Cell]]] = {}
    for run, cell in cells:
        if (cell.op, cell.arch, cell.status) == (op, arch, "ok") and cell.time_us:
            claimed_cells, rival_cells = sides.setdefault((run, cell.case, cell.launch, cell.cache), ([], []))
            if matches(cell.impl, rivals):
                rival_cells.append(cell)
            elif matches(cell.impl, claimed):
                claimed_cells.append(cell)
    pairs = []
    time_us = operator.attrgetter("time_us")
    for (run, *_), (claimed_cells, rival_cells) in sides.items():
        if claimed_cells and rival_cells:
            pairs.append((run, min(claimed_cells, key=time_us), min(rival_cells, key=time_us)))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    comparable = []
    for run, a, b in pairs:
        r = paired(a.samples, b.samples, confidence=confidence)
        if r.low > 0:  # else there is no interval
            comparable.append(Ratio(r.ratio, r.low, r.high, a.impl, b.impl, a.case, run))
    return comparable


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def recorded_cells(run: str | Path) -> list[tuple[str, Cell]]:
    """All cells at a path or glob pattern, each with its run folder."""
    return [(str(folder), cell) for folder in run_folders(run) for cell in read(str(folder)).cells.values()]
