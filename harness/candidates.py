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
from harness.errors import one_line
from harness.estimate import peaks
from harness.evidence import Compiled, Judged, judge
from harness.figures import Figures
from harness.launches import Launch, launches_of, narrowed
from harness.search import Candidate, Search
from harness.shippable import objections
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import words
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
        self.compiled: dict[tuple[str, str], Compiled | None] = {}
        self.found: dict[str, dict[str, Judged]] = {}

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
        told = [(case, one, self._launches(case, one)) for case, one in batch]
        self._compile(launch for _, _, found in told if not isinstance(found, str) for launch in found)
        for case, one, found in told:
            judged = found if isinstance(found, str) else self._of_each(found)
            if judged is not None:
                self.found.setdefault(case.case, {})[words(one.config)] = judged
                judge(one, judged, self.on, self.architecture)

    def _of_each(self, launches: Sequence[Launch]) -> list[Compiled] | None:
        """None where some wait for another shard."""
        known = [self.compiled[_name(each)] for each in launches]
        return None if None in known else known

    def _launches(self, case: Search, one: Candidate) -> list[Launch] | str:
        """Of one call, in order; or why the implementation cannot be asked, which costs the configuration
        and not the command."""
        if case.case not in self.operands:
            self.operands[case.case] = narrowed(self.op, self.implementation, case.sizes)
        operands = self.operands[case.case]
        forced = self.implementation.configured(asdict(one.config))
        try:
            return launches_of(self.op, forced, self.architecture, operands, case.sizes)
        except Exception as error:
            return one_line(error)

    def _compile(self, launches: Iterable[Launch]) -> None:
        new = {_name(launch): launch for launch in launches if _name(launch) not in self.compiled}
        at, of = self.shard
        keys = {name: key_of(launch) for name, launch in new.items()}
        own = {name: launch for name, launch in new.items() if int(keys[name], 16) % of == at - 1}
        found = compile_all(list(own.values()), lambda i, n: self.said(f"{i} of {n} compiled"))
        figures = {name: recall(key) for name, key in keys.items() if name not in own}
        figures |= dict(zip(own, found, strict=True))
        self.compiled |= {name: self._judged(launch, figures[name]) for name, launch in new.items()}

    def _judged(self, launch: Launch, figures: Figures | None) -> Compiled | None:
        if figures is None:
            return None
        return Compiled(launch.name, figures, "; ".join(objections(launch, figures, self.architecture)))


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
