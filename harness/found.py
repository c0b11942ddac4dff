"""What tuning by compiling found: as it is stored and printed, and what is stored held against it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import architectures, ceilings, estimate
from harness.candidates import Compiling
from harness.estimate import WITHIN
from harness.evidence import Evidence
from harness.evidence import file as evidence_file
from harness.provenance import git_state
from harness.search import Candidate, Search, fewest
from harness.tuned import Place, path, read, source, store
from kernels.platform import version
from kernels.tuning import Tunable, words


class Found:
    """What was found for an implementation on an architecture.

    choices: as they are stored
    rows:    as they are printed
    """

    def __init__(self, compiling: Compiling, searches: Sequence[Search]) -> None:
        self.compiling, self.searches = compiling, searches
        picked = fewest(searches)
        self.choices = [_choice(one, picked[one.case]) for one in searches if one.case in picked]
        self.rows = [self._row(one, picked.get(one.case)) for one in searches]

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
        beside = evidence_file(folder, implementation.name, self.place)
        known = Evidence.read(beside)
        kept = known.cases if known.source == provenance["source"] else {}
        Evidence(provenance["source"], kept | self.compiling.found).store(beside)
        return stored

    def differences(self, folder: Path) -> list[str]:
        file = path(folder, self.compiling.implementation.name, self.place)
        return differences(self.compiling.implementation, self.place, self.searches, read(file)["choices"])

    def _row(self, search: Search, one: Candidate | None) -> dict[str, Any]:
        judged = search.candidates[: search.at]
        second = next((each for each in search.fitting_best_first if each is not one), None)
        return {
            "target": self.place.arch,
            "op": self.compiling.op.name,
            "implementation": self.compiling.implementation.name,
            "case": search.case,
            "config": asdict(one.config) if one else None,
            "estimate_us": _us(one),
            "bound_by": one.estimate.bound if one else "",
            "resident": one.resident if one else [],
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
    for one in searches:
        choice = choices.get(one.case)
        if choice is None:
            said = "nothing is stored" if one.good else ""
        elif choice["source"] != made_of:
            said = f"stored from other kernels ({choice['source']}, these are {made_of}): tune again"
        elif unknown := sum(not each.judged for each in one.candidates[: one.at]):
            said = f"{unknown} configurations that may be better were not compiled: tune again"
        elif choice["config"] not in [asdict(good.config) for good in one.good]:
            best = f"; the best is {words(one.good[0].config)}" if one.good else ""
            said = f"what is stored is not within {WITHIN:.0%} of the best{best}"
        else:
            said = ""
        lines += [f"{place.arch} {implementation.name} {one.case}: {said}"] if said else []
    return lines


def _choice(search: Search, one: Candidate) -> dict[str, Any]:
    return {
        "case": search.case,
        "features": search.implementation.features(search.sizes),
        "config": asdict(one.config),
        "estimate_us": _us(one),
        "best_us": _us(search.good[0]),
        "bound_by": one.estimate.bound,
        "resident": one.resident,
    }


def _us(one: Candidate | None) -> float | None:
    return round(one.estimate.seconds * 1e6, 2) if one else None


def _criterion() -> str:
    """Changes with the formula and with what it knows of devices."""
    texts = [Path(f).read_text() for f in (estimate.__file__, architectures.LIMITS, ceilings.DATASHEETS)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
