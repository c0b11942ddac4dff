"""Configurations judged by compiling them for GPUs that need not be here: half of `harness tune`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import kernels
from harness import search
from harness.architectures import Architecture
from harness.compiling import compile_all, key_of, recall
from harness.estimate import peaks
from harness.figures import Figures
from harness.launches import Launch, launches_of, narrowed
from harness.search import Candidate, Search
from harness.shippable import objections
from kernels.op import Unsupported
from kernels.triton_runtime import SuiteTriton
from shapes.case import Case, text_of

Shard = tuple[int, int]
"""(i, of): this process compiles the i-th, from 1, of so many parts of what there is to compile."""


class Compiling:
    """Judges candidates of one implementation for one architecture, each launch compiled once.

    shard: only this part is compiled; candidates that wait for other parts stay unjudged
    said:  told what is being done, in words
    """

    def __init__(
        self,
        implementation: SuiteTriton,
        architecture: Architecture,
        shard: Shard = (1, 1),
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.op = kernels.OPS[implementation.op]
        self.implementation, self.architecture = implementation, architecture
        self.shard, self.said = shard, said
        self.on = peaks(architecture)
        self.operands: dict[str, Any] = {}
        self.figures: dict[tuple[str, str], Figures | None] = {}
        self.refusals: dict[tuple[str, str], str] = {}
        self.launched: dict[tuple[str, Any], list[tuple[str, str]]] = {}

    def searches(self, cases: Iterable[Case], keep: int = 1) -> list[Search]:
        """Of those cases that the implementation takes, each once."""
        found = {}
        for case in cases:
            sizes = self.op.sizes({**self.op.defaults(self.architecture.arch), **case.sizes})
            text = text_of(asdict(sizes))
            if text not in found and self.implementation.fits(sizes).ok:
                found[text] = Search(self.implementation, self.architecture, self.on, text, sizes, keep)
        return list(found.values())

    def run(self, searches: Sequence[Search]) -> None:
        search.run(searches, self.judge)

    def judge(self, batch: list[tuple[Search, Candidate]]) -> None:
        self.said(f"{len(batch)} candidates")
        told = [(one, self._launches(case, one)) for case, one in batch]
        self._compile(launch for _, launches in told for launch in launches)
        for one, launches in told:
            of_each = [(launch, self.figures[_name(launch)]) for launch in launches]
            if not launches:
                one.judged, one.refused = True, "takes other operands"
            elif all(figures for _, figures in of_each):
                refused = "; ".join(dict.fromkeys(filter(None, (self.refusals[_name(x)] for x in launches))))
                one.judge(self.on, self.architecture, [(x.name, f) for x, f in of_each if f], refused)

    def _launches(self, case: Search, one: Candidate) -> list[Launch]:
        """Of one call; none where the implementation finds that it cannot do it."""
        if case.case not in self.operands:
            self.operands[case.case] = narrowed(self.op, self.implementation, case.sizes)
        operands = self.operands[case.case]
        forced = self.implementation.configured(asdict(one.config))
        try:
            found = launches_of(self.op, forced, self.architecture, operands, case.sizes)
        except Unsupported:
            found = []
        self.launched[case.case, one.config] = [_name(launch) for launch in found]
        return found

    def _compile(self, launches: Iterable[Launch]) -> None:
        new = {_name(launch): launch for launch in launches if _name(launch) not in self.figures}
        at, of = self.shard
        keys = {name: key_of(launch) for name, launch in new.items()}
        own = {name: launch for name, launch in new.items() if int(keys[name], 16) % of == at - 1}
        found = compile_all(list(own.values()), lambda i, n: self.said(f"{i} of {n} compiled"))
        self.figures |= {name: recall(key) for name, key in keys.items() if name not in own}
        self.figures |= dict(zip(own, found, strict=True))
        for name, launch in new.items():
            if (figures := self.figures[name]) is not None:
                self.refusals[name] = "; ".join(objections(launch, figures, self.architecture))


def _name(launch: Launch) -> tuple[str, str]:
    return launch.kernel, launch.data


class Progress:
    """A line on stderr now and then, that says where and what."""

    SAID_S = 10.0

    def __init__(self, where: str) -> None:
        self.where, self.last = where, time.monotonic()

    def __call__(self, what: str) -> None:
        if time.monotonic() - self.last > self.SAID_S:
            self.last = time.monotonic()
            print(f"{self.where}: {what}", file=sys.stderr, flush=True)
