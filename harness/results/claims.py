"""Headline claims for AITER, held against recorded runs.

A claim names no baseline, so each is held against three kinds of rival: naive torch, the best of torch, and
Triton.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import kernels
from harness.catalogue import published
from harness.paths import PUBLISHED
from kernels.platform import Platform

if TYPE_CHECKING:
    from harness.results.schema import Cell

RIVALS = {
    "naive torch": ("torch.naive",),
    "the best of torch": ("torch.*", "hipblaslt.*", "aotriton*"),
    "Triton": ("triton.*", "vllm.triton*", "sglang.triton*"),
}
CONFIDENCE = 0.95


class HeadlineClaim(TypedDict):
    op: str
    factor: float
    """Up to so many times as fast."""
    said: str
    """The words of the claim."""


class Claims(TypedDict):
    """The file of claims."""

    source: str
    device: str
    arch: str
    kernels: list[str]
    """Patterns of the implementations that the claims are about."""
    unknown: str
    """What the source leaves open."""
    claims: list[HeadlineClaim]


def read() -> Claims:
    """Raises UsageError where the file cannot be read."""
    return cast("Claims", published.read(PUBLISHED / published.CLAIMS))


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
    """A claim against one kind of rival."""

    op: str
    said: str
    factor: float
    against: str
    runs: tuple[str, ...]
    """Implementations of either side that this machine can time."""
    cases: int
    claimed: Ratio | None
    """The largest ratio of all cases that the claim's kernels reached on the claim's hardware."""
    here: Ratio | None
    """The largest ratio that any kernel of any provider reached over the rival in runs on this machine's
    architecture. It shows how large such factors get, and is no evidence for the claim."""
    verdict: str


def examine(document: Claims, here: Platform, cells: Sequence[tuple[str, Cell]]) -> list[Test]:
    """A test for each claim and kind of rival.

    cells: run folders and cells of any runs; each counts for the architecture that it was measured on
    """
    tests = []
    for claim in document["claims"]:
        op = claim["op"]
        able = [i for i in kernels.implementations(op) if i.available(here).ok and not i.interpreted(here)]
        ours = tuple(document["kernels"])
        for against, rivals in RIVALS.items():
            there = ratios(op, document["arch"], cells, ours, rivals)
            elsewhere = ratios(op, here.arch, cells, ("*",), rivals)
            best = max(there, key=lambda r: r.ratio, default=None)
            names = tuple(i.name for i in able if matches(i.name, ours) or matches(i.name, rivals))
            tests.append(
                Test(
                    op=op,
                    said=claim["said"],
                    factor=claim["factor"],
                    against=against,
                    runs=names,
                    cases=len(there),
                    claimed=best,
                    here=max(elsewhere, key=lambda r: r.ratio, default=None),
                    verdict=verdict(claim["factor"], there, document["device"]),
                )
            )
    return tests


def verdict(factor: float, ratios: Iterable[Ratio], device: str) -> str:
    """A claim of "up to" a factor is supported if the interval of one case lies above it, and not supported
    if the intervals of all cases lie below it."""
    ratios = list(ratios)
    if not ratios:
        return f"not measured on {device}"
    if any(r.low >= factor for r in ratios):
        return "supported"
    return "not supported" if all(r.high < factor for r in ratios) else "unclear"


def ratios(
    op: str, arch: str, cells: Iterable[tuple[str, Cell]], ours: Sequence[str], rivals: Sequence[str]
) -> list[Ratio]:
    """One ratio for each run and case that has both sides: the fastest of ours against the fastest rival. The
    confidence is shared among all of them, because the largest is looked for (Bonferroni)."""
    from harness.results.comparison import paired

    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for run, cell in cells:
        if (cell.op, cell.arch, cell.status) == (op, arch, "ok") and cell.time_us:
            groups.setdefault((run, cell.case, cell.launch, cell.cache), []).append(cell)
    pairs = []
    for (run, *_), present in groups.items():
        b = min((c for c in present if matches(c.impl, rivals)), key=_time_us, default=None)
        mine = (c for c in present if matches(c.impl, ours) and not matches(c.impl, rivals))
        a = min(mine, key=_time_us, default=None)
        if a is not None and b is not None:
            pairs.append((run, a, b))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    comparable = []
    for run, a, b in pairs:
        r = paired(a.samples, b.samples, confidence=confidence)
        if r.low > 0:  # else there is no interval
            comparable.append(Ratio(r.ratio, r.low, r.high, a.impl, b.impl, a.case, run))
    return comparable


def _time_us(cell: Cell) -> float:
    assert cell.time_us is not None
    return cell.time_us


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def recorded_cells(run: str | Path) -> list[tuple[str, Cell]]:
    """All cells at a path or glob pattern, each with its run folder."""
    from harness.results.journal import Journal
    from harness.results.read import run_folders
    from harness.results.schema import Cell

    return [
        (str(folder), record)
        for folder in run_folders(run)
        for records in Journal(folder).finished().values()
        for record in records
        if isinstance(record, Cell)
    ]
