"""Races: one implementation under many configurations, each checked and measured as any contender is.

Who enters: the configuration that would be used if nothing were raced, which is the anchor, and the best by
harness/estimate.py where it knows the architecture, else all that there are. Who wins, and what that is
worth: harness/halving.py. What is stored is read off the records alone, so that a race that is stopped
between recording and storing loses nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import kernels
from harness.architectures import architectures
from harness.plan import Entries
from harness.records import CaseDone, Cell, Record, Run, Verdict
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import Target, Tunable
from shapes.case import Case

TURNED = {"faster": "slower", "slower": "faster"}


class Field:
    """Who enters the races of one implementation on one target: the best `keep` by the estimate."""

    def __init__(self, implementation: Tunable, target: Target, keep: int, said: Any) -> None:
        self.op = kernels.OPS[implementation.op]
        self.implementation, self.target, self.keep = implementation, target, keep
        self.compiling = _compiling(implementation, target, said)

    @property
    def unpruned(self) -> str:
        """Why nothing is left out beforehand; empty where the estimate chooses."""
        if self.compiling:
            return ""
        known = ", ".join(architectures())
        return f"all configurations are raced: only those of Triton kernels on {known} are known by compiling"

    def entries(self, implementation: Tunable, case: Case) -> Entries:
        sizes = self.op.sizes(case.sizes)
        choice = implementation.choose(self.target, sizes)
        if self.compiling:
            best, considered, pruned = self._best(case)
        else:
            best = list(implementation.configurations(self.target, sizes))
            considered, pruned = len(best), {}
        configs = [asdict(config) for config in dict.fromkeys([choice.config, *best])]
        found = {
            "anchor": configs[0],
            "origin": choice.origin,
            "considered": considered,
            "pruned": pruned,
            "raced": len(configs),
        }
        return Entries(configs, found)

    def _best(self, case: Case) -> tuple[list[Any], int, dict[str, int]]:
        """The survivors, of how many, and how many of the others are left out for what."""
        assert self.compiling is not None
        searches = self.compiling.searches([case], self.keep)
        self.compiling.run(searches)
        (search,) = searches
        survivors = [one.config for one in search.fitting_best_first[: self.keep]]
        refused = dict(search.refusals)
        worse = len(search.candidates) - len(survivors) - sum(refused.values())
        return survivors, len(search.candidates), refused | {"worse by the estimate": worse}


def _compiling(implementation: Tunable, target: Target, said: Any) -> Any:
    """What judges its configurations without running them; None where nothing can."""
    known = architectures().get(target.arch)
    if known is None or not isinstance(implementation, SuiteTriton):
        return None
    from harness.candidates import Compiling
    from harness.compile_command import able

    able([known])
    return Compiling(implementation, replace(known, units=target.units), said=said)


def choice(case: Case, records: Sequence[Record], implementation: Tunable, run: Run) -> dict[str, Any] | None:
    """What is stored of a finished case: the challenger if it is faster than the anchor by the engine's own
    verdict, else the anchor, confirmed. None where nothing was told apart from nothing: no verdict, or one
    that the machine's noise swallowed.

    verdict, ratio, low, high: of `config` against `against`: time(against) / time(config)
    """
    cells = {r.name: r for r in records if isinstance(r, Cell)}
    done = next(r for r in records if isinstance(r, CaseDone))
    held = [
        v
        for v in records
        if isinstance(v, Verdict) and v.about == "baseline" and None not in (v.ratio, v.floor)
    ]
    if not held:
        return None
    best = max(held, key=lambda v: (v.verdict == "faster", v.low or 0.0))
    won = best.verdict == "faster"
    this, other = (best.a, best.b) if won else (best.b, best.a)
    ends = [best.ratio, best.low, best.high]
    ratio, low, high = ends if won else [1 / end if end else None for end in (ends[0], ends[2], ends[1])]
    sizes = kernels.OPS[case.op].sizes(case.sizes)
    machine, versions = run.provenance["machine"], run.provenance["versions"]
    return {
        "case": case.text,
        "features": implementation.features(sizes),
        "config": cells[this].config,
        "time_us": _short(cells[this].time_us),
        "verdict": best.verdict if won else TURNED.get(best.verdict, best.verdict),
        "ratio": _short(ratio),
        "low": _short(low),
        "high": _short(high),
        "confidence": best.confidence,
        "against": cells[other].config,
        "before": done.entries["origin"],
        **{name: done.entries[name] for name in ("considered", "pruned", "raced")},
        "failed": dict(Counter(c.status for c in cells.values() if c.status != "ok")),
        "conditions": _conditions(done),
        "launch": cells[this].launch,
        "cache": cells[this].cache,
        "run": run.id,
        "created": run.created,
        "commit": run.provenance["git"]["commit"],
        "driver": machine["driver"],
        **{name: versions.get(name, "") for name in ("torch", "triton")},
    }


def _conditions(done: CaseDone) -> dict[str, float]:
    """The middle of each quantity that was read."""
    values: dict[str, list[float]] = {}
    for group in done.conditions:
        for name, seen in group.items():
            if isinstance(seen, Mapping) and "median" in seen:
                values.setdefault(name, []).append(seen["median"])
    return {name: statistics.median(seen) for name, seen in values.items()}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
