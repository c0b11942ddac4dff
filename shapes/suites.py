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
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from shapes import cases as _cases
from shapes.attention import Parallel
from shapes.case import MOST_QUERIES, Case, merge, parse
from shapes.cases import R1
from shapes.models import named_model
from shapes.names import unknown
from shapes.workloads import documented

CASE_S = 20.0
"""Seconds of measuring for a case. With less, a case of R1's sizes gets too few rounds on a CPU for an
interval."""

SPREAD = (
    ("r1-tp8", R1, Parallel(tp=8)),
    ("r1-tp4", R1, Parallel(tp=4)),
    ("r1-dp-ep8", R1, Parallel(dp=8, ep=8)),
    ("k2-tp8", "kimi-k2", Parallel(tp=8)),
    ("v32-tp8", "deepseek-v3.2", Parallel(tp=8)),
)
"""(name of a suite, model, how it is spread over ranks)."""
PRODUCTION = (
    "DeepSeek's production (deepseek-ai/open-infra-index day 6, and profile-data), and 3200 in, 800 out at "
    "concurrency 128 (dstack, H200) to 1024"
)
DRAFTS = (0, 1, 3)
"""Draft tokens a step in the suites of R1: none; 1 as vLLM and TensorRT-LLM with DP attention have it; 3 as
SGLang and AMD's ATOM have it by default. The suites are named r1-tp8, r1-tp8-mtp1 and r1-tp8-mtp3."""

OPS: dict[str, ModuleType] = {
    module.name: importlib.import_module(f"{_cases.__name__}.{module.name}")
    for module in pkgutil.iter_modules(_cases.__path__)
}


def add(op: str, cases: ModuleType) -> None:
    """Adds the cases of an op of a plug-in: a module with any of the five functions that shapes.cases
    names."""
    OPS[op] = cases
    suites.cache_clear()


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    """One line: what it holds, and the source."""
    what: str = ""
    """The function of the modules of shapes.cases that makes its cases."""
    model: str = ""
    """The name of the model that this function gets first; empty for none."""
    arguments: tuple[object, ...] = ()
    """What it gets after that."""
    read: tuple[Case, ...] = ()
    """The cases of a file."""
    per_case_s: float = CASE_S
    """The least seconds of measuring for each case."""

    def cases(self, op: str) -> list[Case]:
        """The cases of an op, whose weights sum to 1; empty if it has none."""
        cases = [case for case in self.read if case.op == op]
        make = getattr(OPS.get(op), self.what, None) if self.what else None
        if make and not self.model:
            cases = make()
        elif make and op not in (model := named_model(self.model)).unheld:
            cases = make(model, *self.arguments)
        total = sum(case.weight for case in cases)
        return [replace(case, weight=case.weight / total) for case in merge(cases)]

    def without(self, op: str) -> str:
        """That it has no cases for an op, and why."""
        why = named_model(self.model).unheld.get(op) if self.model else None
        return f"suite {self.name!r} has no cases for {op}{f': {why}' if why else ''}"


@functools.cache
def suites() -> dict[str, Suite]:
    """Name -> suite: the general suites, then one for each documented workload."""
    text = "seconds on any machine: small and ragged, with every kind of remainder"
    found = [Suite("smoke", text, "smoke", per_case_s=3.0)]
    for name, model, parallel in SPREAD:
        found += [_spread(name, model, parallel, drafts) for drafts in (DRAFTS if model == R1 else (0,))]
    for name, run in documented().items():
        text = f"{R1} {run.parallel.text}: {run.workload.isl} in, {run.workload.osl} out; {run.source}"
        found.append(Suite(name, text, "served", R1, (run,)))
    return {suite.name: suite for suite in found}


def _spread(name: str, model: str, parallel: Parallel, drafts: int) -> Suite:
    what, text = "sweep", "3200 in, 800 out at concurrency 1 to 128, one case each (AMD's sweep)"
    if parallel.dp > 1:
        what, text = "production", PRODUCTION
    if drafts:
        name = f"{name}-mtp{drafts}"
        text += f"; each step verifies {drafts} draft{'s' if drafts > 1 else ''} a request"
    return Suite(name, f"{model} {parallel.text}: {text}", what, model, (parallel, drafts))


def suite(name: str) -> Suite:
    """A suite by its name, a file of cases (NAME.json, see cases_file), or one like r1-tp8-mtp3 or r1-dp-ep8
    of another model, which shapes.models names or reads from a path: `kimi-k2-tp4-mtp2`, `kimi-k2-dp8-ep8`;
    at most 7 drafts. Raises ValueError, which lists the suites, for an unknown name."""
    if name.endswith(".json"):
        return Suite(name, f"cases in {name}", read=tuple(cases_file(name).cases))
    if name in suites():
        return suites()[name]
    match = re.fullmatch(r"(.+?)(?:-mtp(\w*))?", name)
    base, drafts = match.groups() if match else (name, None)
    known = {each: (model, parallel) for each, model, parallel in SPREAD}
    degrees = re.fullmatch(r"(.+?)((?:-(?:tp|dp|ep)\d+)+)", base)
    if base not in known and not degrees:
        raise ValueError(unknown("suite", name, suites(), "list suites"))
    if drafts is not None and drafts not in map(str, range(1, MOST_QUERIES)):
        raise ValueError(f"suite {name!r}: {base}-mtpN takes 1 to {MOST_QUERIES - 1} drafts")
    if degrees and base not in known:
        named_model(degrees[1])
        given = [(degree[:2], int(degree[2:])) for degree in degrees[2].split("-")[1:]]
        if len(dict(given)) < len(given):
            raise ValueError(f"suite {name!r} has a degree twice")
        known[base] = degrees[1], Parallel(**dict(given))
    return _spread(base, *known[base], int(drafts or 0))


LOAD = ("isl", "osl", "concurrency", "range_ratio")


@dataclass(frozen=True)
class CasesFile:
    """What a file of cases says."""

    cases: list[Case]
    load: dict[str, float]
    """The load that it was read from, by LOAD; empty where that is not known."""
    deployment: str
    """As Deployment.text has it; empty where that is not known."""

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
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [(row, parse(row["sizes"])) for row in read["cases"]]
        cases = [
            Case(
                str(row["op"]),
                {name: int(text) if text.isdecimal() else text for name, text in sizes[0].items()},
                place=str(row.get("place") or path),
                weight=float(row.get("weight", 1.0)),
            )
            for row, sizes in rows
        ]
        load = {name: float(read["load"][name]) for name in LOAD} if read.get("load") else {}
        deployment = " ".join(str(read.get("deployment") or "").split())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"cannot read cases in {path}: {why}; `shapes from` writes such files") from None
    if wrong := next((case.op for case in cases if case.op not in OPS), None):
        raise ValueError(f"cannot read cases in {path}: no op {wrong!r}")
    numbers = [*(case.weight for case in cases), *load.values()]
    if not cases or not all(0 < n < math.inf for n in numbers) or any(len(sizes) > 1 for _, sizes in rows):
        raise ValueError(
            f"cannot read cases in {path}: it takes at least one, with one list of sizes each; weights and "
            "load are above 0"
        )
    if any(case.sizes.get("q", 1) not in range(1, MOST_QUERIES + 1) for case in cases):
        raise ValueError(f"cannot read cases in {path}: q of mla_decode is 1 to {MOST_QUERIES}")
    return CasesFile(cases, load, deployment)


def ragged(op: str, q: int = 1) -> list[Case]:
    """Small cases of uneven sizes, at which each implementation that is timed is checked too; an op that has
    none gives its smoke cases. They leave out the sizes that say how an op computes: heads, pages, dtypes,
    and q, the query tokens of each sequence in MLA decode, though they have room for so many."""
    make = getattr(OPS.get(op), "ragged", None)
    if make is None:
        return suites()["smoke"].cases(op)
    return make(q) if q > 1 else make()  # only mla_decode's takes it
