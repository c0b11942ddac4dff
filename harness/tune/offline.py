"""Configurations chosen offline: every one compiled or pruned, the survivors ranked by cost."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue import architectures, devices
from harness.catalogue.architectures import Architecture
from harness.compile.compiler import CompileEach, compile_all, key_of, recall
from harness.compile.launches import KernelLaunch, launches_of, narrowed
from harness.compile.limits import violations
from harness.compile.resources import Resources
from harness.errors import one_line
from harness.machine.provenance import git_state
from harness.tune import cost_model
from harness.tune.compile_records import CompiledLaunch, CompileRecords, CompileResult, judge
from harness.tune.compile_records import file as records_file
from harness.tune.cost_model import WITHIN, peaks
from harness.tune.search import Candidate, Search, fewest, run
from harness.tune.store import Place, path, read, source, store
from kernels.platform import version
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import Tunable, words
from shapes.case import Case, text_of

Shard = tuple[int, int]
"""(i, of): this process compiles the i-th, from 1, of so many parts of what there is to compile."""


class Compiling:
    """Judges candidates of one implementation for one architecture, each launch compiled once.

    shard:        only this part is compiled; candidates that wait for other parts stay unjudged
    log:          is told what is being done, in words
    compile_each: as of `compile_all`
    """

    def __init__(
        self,
        implementation: SuiteTriton,
        architecture: Architecture,
        shard: Shard = (1, 1),
        log: Callable[[str], None] = lambda _: None,
        compile_each: CompileEach | None = None,
    ) -> None:
        self.compile_each = compile_each
        self.op = kernels.OPS[implementation.op]
        self.implementation, self.architecture = implementation, architecture
        self.shard, self.log = shard, log
        self.on = peaks(architecture)
        self.operands: dict[str, Any] = {}
        self.compiled: dict[tuple[str, str], CompiledLaunch | None] = {}
        self.results: dict[str, dict[str, CompileResult]] = {}

    def searches(self, cases: Iterable[Case], keep: int = 1) -> list[Search]:
        """Of those cases that the implementation takes, each once."""
        searches = {}
        for case in cases:
            sizes = self.op.sizes({**self.op.defaults(self.architecture.arch), **case.sizes})
            text = text_of(self.op.said(sizes))
            if text not in searches and self.implementation.fits(sizes).ok:
                searches[text] = Search(
                    self.implementation, self.architecture, self.on, text, sizes, keep=keep
                )
        return list(searches.values())

    def run(self, searches: Sequence[Search]) -> None:
        run(searches, self.judge)

    def judge(self, batch: list[tuple[Search, Candidate]]) -> None:
        self.log(f"{len(batch)} candidates")
        batches = [(case, candidate, self._launches(case, candidate)) for case, candidate in batch]
        self._compile(launch for _, _, each in batches if not isinstance(each, str) for launch in each)
        for case, candidate, launches in batches:
            judged = launches if isinstance(launches, str) else self._of_each(launches)
            if judged is not None:
                self.results.setdefault(case.case, {})[words(candidate.config)] = judged
                judge(candidate, judged, self.on, self.architecture)

    def _of_each(self, launches: Sequence[KernelLaunch]) -> list[CompiledLaunch] | None:
        """None where some wait for another shard."""
        known = [self.compiled[_name(each)] for each in launches]
        compiled = [launch for launch in known if launch is not None]
        return compiled if len(compiled) == len(known) else None

    def _launches(self, case: Search, candidate: Candidate) -> list[KernelLaunch] | str:
        """Of one call, in order; or why the implementation cannot be asked, which costs the configuration
        and not the command."""
        if case.case not in self.operands:
            self.operands[case.case] = narrowed(self.op, self.implementation, case.sizes)
        operands = self.operands[case.case]
        forced = self.implementation.configured(asdict(candidate.config))
        try:
            return launches_of(self.op, forced, self.architecture, operands, case.sizes)
        except Exception as error:
            return one_line(error)

    def _compile(self, launches: Iterable[KernelLaunch]) -> None:
        new = {_name(launch): launch for launch in launches if _name(launch) not in self.compiled}
        at, of = self.shard
        keys = {name: key_of(launch) for name, launch in new.items()}
        own = {name: launch for name, launch in new.items() if int(keys[name], 16) % of == at - 1}
        compiled = compile_all(
            list(own.values()), lambda i, n: self.log(f"{i} of {n} compiled"), self.compile_each
        )
        figures = {name: recall(key) for name, key in keys.items() if name not in own}
        figures |= dict(zip(own, compiled, strict=True))
        self.compiled |= {name: self._judged(launch, figures[name]) for name, launch in new.items()}

    def _judged(self, launch: KernelLaunch, figures: Resources | None) -> CompiledLaunch | None:
        if figures is None:
            return None
        return CompiledLaunch(launch.name, figures, "; ".join(violations(launch, figures, self.architecture)))


def _name(launch: KernelLaunch) -> tuple[str, str]:
    return launch.kernel, launch.data


class CompileProgress:
    """A line on stderr now and then, that says where and what."""

    EVERY_S = 10.0

    def __init__(self, where: str) -> None:
        self.where, self.last = where, time.monotonic()

    def __call__(self, what: str) -> None:
        if time.monotonic() - self.last > self.EVERY_S:
            self.last = time.monotonic()
            print(f"{self.where}: {what}", file=sys.stderr, flush=True)


class OfflineResult:
    """What was found for an implementation on an architecture.

    choices: as they are stored
    rows:    as they are printed
    """

    def __init__(self, compiling: Compiling, searches: Sequence[Search]) -> None:
        self.compiling, self.searches = compiling, searches
        picked = fewest(searches)
        self.choices = [_choice(search, picked[search.case]) for search in searches if search.case in picked]
        self.rows = [self._row(search, picked.get(search.case)) for search in searches]

    @property
    def place(self) -> Place:
        return Place(self.compiling.architecture.kind, self.compiling.architecture.arch)

    def store(self, folder: Path) -> Path:
        implementation = self.compiling.implementation
        provenance = {
            "triton": version("triton"),
            "commit": git_state()["commit"],
            "source": source(implementation),
            "criterion": _criterion(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        stored = store(folder, implementation.name, self.place, self.choices, provenance)
        beside = records_file(folder, implementation.name, self.place)
        known = CompileRecords.read(beside)
        kept = known.cases if known.source == provenance["source"] else {}
        CompileRecords(provenance["source"], kept | self.compiling.results).store(beside)
        return stored

    def differences(self, folder: Path) -> list[str]:
        file = path(folder, self.compiling.implementation.name, self.place)
        return differences(self.compiling.implementation, self.place, self.searches, read(file)["choices"])

    def _row(self, search: Search, candidate: Candidate | None) -> dict[str, Any]:
        judged = search.candidates[: search.at]
        second = next((each for each in search.fitting_best_first if each is not candidate), None)
        return {
            "target": self.place.arch,
            "op": self.compiling.op.name,
            "implementation": self.compiling.implementation.name,
            "case": search.case,
            "config": asdict(candidate.config) if candidate else None,
            "estimate_us": _us(candidate),
            "bound_by": candidate.estimate.bound if candidate and candidate.estimate else "",
            "resident": candidate.resident if candidate else [],
            "second": asdict(second.config) if second else None,
            "second_us": _us(second),
            "configurations": len(search.candidates),
            "judged": sum(each.judged for each in judged),
            "refused": dict(search.refusals),
        }


def differences(
    implementation: Tunable, place: Place, searches: Iterable[Search], stored: Iterable[Mapping[str, Any]]
) -> list[str]:
    """One line for each case whose stored choice is not as good as the best of the search, was made from
    other kernels, or is missing; and for each whose search could not judge all that may be as good."""
    choices = {choice["case"]: choice for choice in stored}
    made_of = source(implementation)
    lines = []
    for search in searches:
        choice = choices.get(search.case)
        if choice is None:
            problem = "nothing is stored" if search.good else ""
        elif choice["source"] != made_of:
            problem = f"stored from other kernels ({choice['source']}, these are {made_of}): tune again"
        elif unknown := sum(not each.judged for each in search.candidates[: search.at]):
            problem = f"{unknown} configurations that may be better were not compiled: tune again"
        elif choice["config"] not in [asdict(good.config) for good in search.good]:
            best = f"; the best is {words(search.good[0].config)}" if search.good else ""
            problem = f"what is stored is not within {WITHIN:.0%} of the best{best}"
        else:
            problem = ""
        lines += [f"{place.arch} {implementation.name} {search.case}: {problem}"] if problem else []
    return lines


def _choice(search: Search, candidate: Candidate) -> dict[str, Any]:
    assert candidate.estimate is not None
    return {
        "case": search.case,
        "features": search.implementation.features(search.sizes),
        "config": asdict(candidate.config),
        "estimate_us": _us(candidate),
        "best_us": _us(search.good[0]),
        "bound_by": candidate.estimate.bound,
        "resident": candidate.resident,
    }


def _us(candidate: Candidate | None) -> float | None:
    return round(candidate.seconds * 1e6, 2) if candidate else None


def _criterion() -> str:
    """Changes with the formula and with what it knows of devices."""
    texts = [Path(f).read_text() for f in (cost_model.__file__, architectures.LIMITS, devices.DATASHEETS)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
