"""Headline claims for AITER, compared with recorded runs. A claim does not say what a kernel is faster than,
so each is compared with three kinds of rival: naive torch, the best of torch, and Triton."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.files import JsonObject
from harness.results.comparison import compare_samples
from harness.results.read import read, run_folders
from harness.results.schema import Cell
from harness.statistics.intervals import CONFIDENCE
from kernels.platform import Platform

RIVALS = {  # kind of rival -> patterns of implementations
    "naive torch": ("torch.naive",),
    "the best of torch": ("torch.*", "hipblaslt.*", "aotriton*"),
    "Triton": ("triton.*", "vllm.triton*", "sglang.triton*"),
}


@dataclass(frozen=True)
class Ratio:
    """time(b) / time(a) of one case. In that case a is the fastest of the claim's kernels, and b the fastest
    rival of a kind; low and high are the ends of the ratio's interval."""

    ratio: float
    low: float
    high: float
    a: str
    b: str
    case: str
    run: str


@dataclass(frozen=True)
class Test:
    """What recorded runs say of a claim against one kind of rival; `--json` has the same names."""

    op: str
    said: str  # the claim in the words of its source
    factor: float  # the claim: a rival takes up to this many times as long as the kernel
    against: str  # the kind of rival, a key of RIVALS
    runs: tuple[str, ...]  # the kernels and rivals that run on this machine, so that it can time them
    cases: int  # how many cases have times of both sides on the claim's hardware
    claimed: Ratio | None  # the largest ratio that the claim's kernels reached on the claim's hardware
    here: Ratio | None  # the largest of any kernel on this machine's architecture: no evidence for the claim
    verdict: str  # supported, not supported, unclear, or that the claim's device was not measured


def examine(document: JsonObject, platform: Platform, cells: Sequence[tuple[str, Cell]]) -> list[Test]:
    """A test for each claim and kind of rival.

    document: the file of claims; its `kernels` are patterns of the implementations that the claims are about
    platform: this machine's
    cells: cells of any runs, each with its run folder; a cell counts for the architecture that measured it
    """
    tests = []
    for claim in document["claims"]:
        op = claim["op"]
        available = [impl for impl in kernels.implementations(op) if impl.available(platform).ok]
        can_time = [impl.name for impl in available if not impl.interpreted(platform)]
        claimed = document["kernels"]
        for against, rivals in RIVALS.items():
            on_claimed_arch = ratios(op, document["arch"], cells, claimed, rivals)
            on_this_arch = ratios(op, platform.arch, cells, ("*",), rivals)
            test = Test(
                op=op, said=claim["said"], factor=claim["factor"], against=against,
                runs=tuple(name for name in can_time if matches(name, (*claimed, *rivals))),
                cases=len(on_claimed_arch),
                claimed=max(on_claimed_arch, key=lambda r: r.ratio, default=None),
                here=max(on_this_arch, key=lambda r: r.ratio, default=None),
                verdict=verdict(claim["factor"], on_claimed_arch, document["device"]),
            )  # fmt: skip
            tests.append(test)
    return tests


def verdict(factor: float, ratios: Sequence[Ratio], device: str) -> str:
    """Supported if the interval of one case lies above the factor; not supported if all lie below it."""
    if not ratios:
        return f"not measured on {device}"
    if any(r.low >= factor for r in ratios):
        return "supported"
    if all(r.high < factor for r in ratios):
        return "not supported"
    return "unclear"


def ratios(
    op: str, arch: str, cells: Iterable[tuple[str, Cell]], claimed: Sequence[str], rivals: Sequence[str]
) -> list[Ratio]:
    """One ratio for each run, case, launch mode and cache mode that has a time of both sides: the fastest
    claimed kernel against the fastest rival. The intervals of all ratios together hold at CONFIDENCE
    (Bonferroni), because the largest ratio is picked from them.

    claimed, rivals: patterns of implementations
    """
    timed = [(run, c) for run, c in cells if (c.op, c.arch, c.status) == (op, arch, "ok") and c.time_us]
    timed.sort(key=lambda run_and_cell: run_and_cell[1].time_us or 0.0)
    fastest_claimed: dict[tuple[str, str, str, str], Cell] = {}
    fastest_rivals: dict[tuple[str, str, str, str], Cell] = {}
    for run, cell in timed:
        key = (run, cell.case, cell.launch, cell.cache)
        if matches(cell.impl, rivals):
            fastest_rivals.setdefault(key, cell)
        elif matches(cell.impl, claimed):
            fastest_claimed.setdefault(key, cell)
    keys = [key for key in fastest_claimed if key in fastest_rivals]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(keys))
    with_interval = []
    for key in keys:
        a, b = fastest_claimed[key], fastest_rivals[key]
        r = compare_samples(a.samples, b.samples, confidence=confidence)
        if r.low > 0:  # `compare` gives 0 where too few rounds are shared for an interval
            run, _, _, _ = key
            with_interval.append(Ratio(r.ratio, r.low, r.high, a.impl, b.impl, a.case, run))
    return with_interval


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def recorded_cells(run: str | Path) -> list[tuple[str, Cell]]:
    """All cells at a path or glob pattern, each with its run folder."""
    return [(str(folder), cell) for folder in run_folders(run) for cell in read(str(folder)).cells.values()]
