"""Named suites: the cases of each op that a workload consists of, with their weights.

Each module of shapes.cases makes the cases of one op; an op of a plug-in adds its own module. Listing suites
makes no case: it reads no model data and simulates nothing.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from shapes import cases as _cases
from shapes.attention import Parallel
from shapes.case import MOST_QUERIES, Case, merge, parse
from shapes.cases import R1
from shapes.models import named_model
from shapes.names import unknown
from shapes.workloads import documented

CASE_S = 20.0
"""Seconds of measuring for a case. With less, R1's sizes get too few rounds on a CPU for an interval."""

DEPLOYED = {
    "r1-tp8": (R1, Parallel(tp=8)),
    "r1-tp4": (R1, Parallel(tp=4)),
    "r1-dp-ep8": (R1, Parallel(dp=8, ep=8)),
    "k2-tp8": ("kimi-k2", Parallel(tp=8)),
    "v32-tp8": ("deepseek-v3.2", Parallel(tp=8)),
}
"""Name of a suite, which ends with a degree -> its model, and how the model is split over ranks."""
COMPOSED = re.compile(r"(?P<base>(?P<model>.+?)(?P<degrees>(-(tp|dp|ep)\d+)+))(-mtp(?P<drafts>\w*))?")
"""A composed name, as `suite` explains it."""
PRODUCTION = (
    "DeepSeek's production (deepseek-ai/open-infra-index day 6, and profile-data), and 3200 in, 800 out at "
    "concurrency 128 (dstack, H200) to 1024"
)
DRAFTS = (0, 1, 3)
"""Draft tokens a step in the suites of R1: none; 1 as vLLM and TensorRT-LLM with DP attention have it; 3 as
SGLang and AMD's ATOM have it by default. The suites are named r1-tp8, r1-tp8-mtp1 and r1-tp8-mtp3."""

CASE_MODULES: dict[str, ModuleType] = {
    module.name: importlib.import_module(f"{_cases.__name__}.{module.name}")
    for module in pkgutil.iter_modules(_cases.__path__)
}
"""Op -> the module that makes its cases."""


def add(op: str, cases: ModuleType) -> None:
    """Adds the module of a plug-in's op, with any of the five functions that shapes.cases names."""
    CASE_MODULES[op] = cases
    suites.cache_clear()


@dataclass(frozen=True)
class Suite:
    """The cases are those of a file, or a function of the modules of shapes.cases makes them."""

    name: str
    description: str  # one line: what it holds, and the source
    function: str = ""  # the name of the function, `sweep`; empty for a file
    model: str = ""
    """The name of the model that the function takes first; empty for a function without arguments."""
    arguments: tuple[object, ...] = ()  # the other arguments of the function
    of_file: tuple[Case, ...] = ()  # the cases of the file
    per_case_s: float = CASE_S  # the least seconds of measuring for each case

    def cases(self, op: str) -> list[Case]:
        """The cases of an op, whose weights sum to 1; empty if it has none."""
        cases = self._made(op) if self.function else [case for case in self.of_file if case.op == op]
        total = sum(case.weight for case in cases)
        return [replace(case, weight=case.weight / total) for case in merge(cases)]

    def _made(self, op: str) -> list[Case]:
        make = getattr(CASE_MODULES.get(op), self.function, None)
        if make is None:  # the op is unknown, or its plug-in has no cases of this kind
            return []
        if not self.model:
            return list(make())
        model = named_model(self.model)
        return [] if op in model.inapplicable else list(make(model, *self.arguments))

    def why_no_cases(self, op: str) -> str:
        """One line for an op without cases: it says so, and why if the model is the reason."""
        why = named_model(self.model).inapplicable.get(op) if self.model else None
        line = f"suite {self.name!r} has no cases for {op}"
        return f"{line}: {why}" if why else line


@functools.cache
def suites() -> dict[str, Suite]:
    """Name -> suite: the general suites, then one for each documented workload."""
    text = "seconds on any machine: small and ragged, with every kind of remainder"
    found = [Suite("smoke", text, "smoke", per_case_s=3.0)]
    for name, (model, parallel) in DEPLOYED.items():
        counts = DRAFTS if model == R1 else (0,)
        found += [_deployed(name, model, parallel, drafts) for drafts in counts]
    for name, run in documented().items():
        text = f"{R1} {run.parallel.text}: {run.workload.isl} in, {run.workload.osl} out; {run.source}"
        found.append(Suite(name, text, "served", R1, (run,)))
    return {suite.name: suite for suite in found}


def _deployed(name: str, model: str, parallel: Parallel, drafts: int) -> Suite:
    function, text = "sweep", "3200 in, 800 out at concurrency 1 to 128, one case each (AMD's sweep)"
    if parallel.dp > 1:
        function, text = "production", PRODUCTION
    if drafts:
        name = f"{name}-mtp{drafts}"
        text += f"; each step verifies {drafts} draft{'s' if drafts > 1 else ''} a request"
    return Suite(name, f"{model} {parallel.text}: {text}", function, model, (parallel, drafts))


def suite(name: str) -> Suite:
    """A suite by its name, or the cases of a file NAME.json (see cases_file). A name may also be composed as
    MODEL-tpN-dpN-epN-mtpDRAFTS of at least one degree, or as SUITE-mtpDRAFTS of a suite of DEPLOYED:
    `kimi-k2-tp4-mtp2`, `r1-tp4-mtp2`. MODEL is a name of shapes.models or a path. Raises ValueError,
    which lists the suites, for an unknown name."""
    if name.endswith(".json"):
        return Suite(name, f"cases in {name}", of_file=tuple(cases_file(name).cases))
    if name in suites():
        return suites()[name]
    match = COMPOSED.fullmatch(name)
    if not match:
        raise ValueError(unknown("suite", name, suites(), "list suites"))
    base, drafts = match["base"], match["drafts"]
    if drafts is not None and drafts not in map(str, range(1, MOST_QUERIES)):
        raise ValueError(f"suite {name!r}: {base}-mtpN takes 1 to {MOST_QUERIES - 1} drafts")
    if base in DEPLOYED:
        return _deployed(base, *DEPLOYED[base], int(drafts or 0))
    named_model(match["model"])  # raises ValueError for an unknown model
    degrees = re.findall(r"(tp|dp|ep)(\d+)", match["degrees"])
    if len(dict(degrees)) < len(degrees):
        raise ValueError(f"suite {name!r} has a degree twice")
    parallel = Parallel(**{degree: int(number) for degree, number in degrees})
    return _deployed(base, match["model"], parallel, int(drafts or 0))


LOAD = ("isl", "osl", "concurrency", "range_ratio")


@dataclass(frozen=True)
class CasesFile:
    cases: list[Case]
    load: dict[str, float]
    """The LOAD of the traffic that the cases were made from; empty where it is not known."""
    deployment: str  # as Deployment.text has it; empty where it is not known

    @property
    def drafts(self) -> set[int]:
        """The drafts that its steps of MLA decode verify."""
        return {int(case.sizes.get("q", 1)) - 1 for case in self.cases if case.op == "mla_decode"}


def cases_file(path: str) -> CasesFile:
    """Reads a file that `shapes from` wrote:

    {"deployment": "deepseek-r1 tp8", "sources": [line...],
     "load": {"isl", "osl", "concurrency", "range_ratio"},
     "cases": [{"op", "sizes": "batch=16 ctx=4096", "place", "weight"}...]}

    Only cases with op and sizes are needed. Raises ValueError."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = document["cases"]
        cases = [case for row in rows for case in _cases_of(row, path)]
        load = {name: float(document["load"][name]) for name in LOAD} if document.get("load") else {}
        deployment = " ".join(str(document.get("deployment") or "").split())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"cannot read cases in {path}: {why}; `shapes from` writes such files") from None
    for case in cases:
        if case.op not in CASE_MODULES:
            raise ValueError(f"cannot read cases in {path}: no op {case.op!r}")
    numbers = [*(case.weight for case in cases), *load.values()]
    if not cases or len(cases) > len(rows) or not all(0 < number < math.inf for number in numbers):
        raise ValueError(
            f"cannot read cases in {path}: it takes at least one, with one list of sizes each; weights and "
            "load are above 0"
        )
    if any(case.sizes.get("q", 1) not in range(1, MOST_QUERIES + 1) for case in cases):
        raise ValueError(f"cannot read cases in {path}: q of mla_decode is 1 to {MOST_QUERIES}")
    return CasesFile(cases, load, deployment)


def _cases_of(row: Mapping[str, Any], path: str) -> Iterator[Case]:
    """The cases of a row of a file of cases: one for each combination of its sizes."""
    place, weight = str(row.get("place") or path), float(row.get("weight", 1.0))
    for texts in parse(row["sizes"]):
        sizes = {name: int(text) if text.isdecimal() else text for name, text in texts.items()}
        yield Case(str(row["op"]), sizes, place=place, weight=weight)


def ragged(op: str, q: int = 1) -> list[Case]:
    """Small cases of uneven sizes, at which each implementation that is timed is checked too; an op that has
    none gives its smoke cases. They leave out the sizes that say how an op computes: heads, pages, dtypes and
    q. q: the least tokens of a sequence in MLA decode, which has so many query tokens"""
    make = getattr(CASE_MODULES.get(op), "ragged", None)
    if make is None:
        return suites()["smoke"].cases(op)
    return make(q) if q > 1 else make()  # only the function of mla_decode takes q
