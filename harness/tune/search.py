"""Search for the best configuration by `harness/tune/cost_model.py`, proven by compiling as few as that
takes.

What an estimate can be at least is known before compiling, for all that compiling adds is how many programs a
unit holds and which instructions a product became. Candidates are judged in ascending order of that bound,
until the next bound is above the best estimate: whatever was not judged is then known to be worse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.catalogue.architectures import Architecture
from harness.compile.resources import Resources
from harness.tune.cost_model import WITHIN, Estimate, Peaks, estimate, held, least, reach, share
from kernels.tuning import Demand, Tunable

FIRST = 4  # candidates of a case that are judged together at first; twice as many each time after


@dataclass
class Candidate:
    """A configuration of a case.

    least:   seconds that its estimate cannot be below
    judged:  whether what it compiles to is known
    refused: why it may not be shipped; empty where it may
    """

    config: Any
    demands: list[Demand]
    least: float
    judged: bool = False
    refused: str = ""
    resident: list[int] = field(default_factory=list)
    estimate: Estimate | None = None

    def refuse(self, why: str) -> None:
        self.judged, self.refused = True, why

    def judge(self, on: Peaks, architecture: Architecture, compiled: Sequence[tuple[str, Resources]]) -> None:
        """compiled: kernel and figures of each launch of a call, in order."""
        self.judged = True
        figures = _paired(self.demands, compiled)
        self.resident = [held(each, architecture) for each in figures]
        shares = [share(d, each, architecture) for d, each in zip(self.demands, figures, strict=True)]
        parts = [reach(each, architecture) for each in figures]
        self.estimate = estimate(on, zip(self.demands, self.resident, shares, parts, strict=True))

    @property
    def seconds(self) -> float:
        """By the estimate; infinite of what is refused or not judged."""
        return self.estimate.seconds if self.estimate else math.inf


def _paired(demands: Iterable[Demand], compiled: Sequence[tuple[str, Resources]]) -> list[Resources]:
    """Resources of each demand's kernel: of a kernel that is launched twice, its first and second launch."""
    left: dict[str, list[Resources]] = {}
    for kernel, figures in compiled:
        left.setdefault(kernel, []).append(figures)
    return [left[demand.kernel].pop(0) for demand in demands]


class Search:
    """The search for the best configurations of a case; keep: how many of them are to be known."""

    def __init__(
        self,
        implementation: Tunable,
        architecture: Architecture,
        on: Peaks,
        case: str,
        sizes: Any,
        *,
        keep: int = 1,
    ) -> None:
        self.implementation, self.case, self.sizes, self.keep = implementation, case, sizes, keep
        target = architecture.target
        candidates = []
        for config in implementation.configurations(target, sizes):
            demands = implementation.demands(config, target, sizes)
            bound = least(on, ((demand, architecture.programs) for demand in demands))
            candidates.append(Candidate(config, demands, bound))
        self.candidates = sorted(candidates, key=lambda candidate: candidate.least)
        self.at = 0

    @property
    def fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates[: self.at] if candidate.estimate]

    @property
    def fitting_best_first(self) -> list[Candidate]:
        return sorted(self.fitting, key=lambda candidate: candidate.seconds)

    @property
    def best(self) -> float:
        """Seconds."""
        return min((candidate.seconds for candidate in self.fitting), default=math.inf)

    @property
    def limit(self) -> float:
        """Seconds at which what was not judged is no better than those that are to be known."""
        ranked = self.fitting_best_first[: self.keep]
        return ranked[-1].seconds * (1 + WITHIN) if len(ranked) == self.keep else math.inf

    def next(self, count: int) -> list[Candidate]:
        """The next that may be as good as those known so far, or as little worse as cannot be told apart."""
        following = [c for c in self.candidates[self.at : self.at + count] if c.least <= self.limit]
        self.at += len(following)
        return following

    @property
    def open(self) -> bool:
        """Whether one that was not judged may be as good."""
        left = self.candidates[self.at : self.at + 1]
        return bool(left) and left[0].least <= self.limit

    @property
    def good(self) -> list[Candidate]:
        """Those that cannot be told from the best, best first."""
        limit = self.best * (1 + WITHIN)
        return [candidate for candidate in self.fitting_best_first if candidate.seconds <= limit]

    @property
    def refusals(self) -> Counter[str]:
        """How many were refused for what."""
        return Counter(candidate.refused for candidate in self.candidates[: self.at] if candidate.refused)


def run(searches: Iterable[Search], judge: Callable[[list[tuple[Search, Candidate]]], None]) -> None:
    """judge: told of candidates, judges those that it can."""
    going = list(searches)
    count = max([FIRST, *(search.keep for search in going)])
    while going:
        batch = [(search, candidate) for search in going for candidate in search.next(count)]
        if batch:
            judge(batch)
        going = [search for search in going if search.open]
        count *= 2


def fewest(searches: Iterable[Search]) -> Mapping[str, Candidate]:
    """Case -> one of its good candidates, so that few configurations serve all cases: time and again the one
    that is good for most of the cases left, of equals the one that estimates less for them."""
    left = {search.case: {candidate.config: candidate for candidate in search.good} for search in searches}
    left = {case: good for case, good in left.items() if good}
    picked: dict[str, Candidate] = {}
    while left:
        serves: Counter[Any] = Counter(config for good in left.values() for config in good)
        most = max(serves.values())
        costs = {config: _cost(config, left.values()) for config, count in serves.items() if count == most}
        config = min(costs, key=lambda each: costs[each])
        picked.update({case: good[config] for case, good in left.items() if config in good})
        left = {case: good for case, good in left.items() if config not in good}
    return picked


def _cost(config: Any, goods: Iterable[Mapping[Any, Candidate]]) -> float:
    """Seconds of a configuration relative to the best, over the cases that it is good for."""
    return sum(good[config].seconds / next(iter(good.values())).seconds for good in goods if config in good)
