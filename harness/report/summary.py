"""What all cases of a run say together: which row is fastest in how many of them, what it gains over the rows
that engines run by default, and which rows are as good."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from harness.report.case_table import headline
from harness.report.rows import CaseResult
from harness.report.text import counted, grouped, versus
from harness.results.schema import Cell, Run
from harness.statistics.paired import MAX_NOISE, Comparison, noise_of
from harness.statistics.totals import total_ratio
from kernels.engines import SPELLED

NEAR = 0.02
"""Rows that take at most this share longer than the best one over all cases are as good for most purposes."""

Rows = Sequence[tuple[CaseResult, dict[str, Cell]]]
"""Cases with their rows that have a time, by name, the fastest first."""
Pair = tuple[CaseResult, Cell, Cell]
"""A case and two rows of it that share rounds."""


def summary(cases: Sequence[CaseResult], run: Run) -> list[str]:
    """A sentence for each boundary and launch mode; for one case it is its headline. Empty where that is all.

    cases: those of the run that are finished
    """
    if len(cases) < 2:
        return []
    by_boundary = grouped(cases, lambda case: case.cells[0].boundary)
    sentences = []
    for boundary, of in by_boundary.items():
        missing = sum(case.boundary == boundary for case in run.cases) - len(of)
        for launch in run.launches if len(run.launches) > 1 else [""]:
            timed = [{c.name: c for c in case.timed if launch in ("", c.launch)} for case in of]
            parts = (
                [str(headline(of[0]))]
                if len(of) == 1
                else list(_said(list(zip(of, timed, strict=True)), run))
            )
            parts += [f"{missing} more not measured"] if missing > 0 else []
            about = " ".join(filter(None, [boundary if len(by_boundary) > 1 else "", launch]))
            sentences.append(": ".join(filter(None, [about, "; ".join(parts)])))
    return sentences


def _said(rows: Rows, run: Run) -> Iterator[str]:
    wins, others = Counter[str](), Counter[str]()
    for case, of in rows:
        first, second, *_ = [*of.values(), None, None]
        found = case.compared(first, second) if first and second else None
        if first and found and found.verdict == "faster":
            wins[first.name] += 1
        elif first and second:
            others["two are the same" if found and found.verdict == "same" else "indistinguishable"] += 1
        else:
            others["one row alone" if first else "no row has a time"] += 1
    whole, (winner, count), *rest = counted(len(rows)), *(wins.most_common() or [("", 0)])
    yield (
        f"fastest in {count} of {whole}: {winner}" if winner else f"no row is clearly the fastest in {whole}"
    )
    yield from (f"in {count}: {name}" for name, count in rest)
    yield from (f"{what} in {count}" for what, count in others.items())
    if any(of for _, of in rows):
        yield from _over_all(rows, run, winner)


def _over_all(rows: Rows, run: Run, winner: str) -> Iterator[str]:
    """The row with the least time for all cases together, compared with what engines run by default, or where
    none of that has a time with the baseline; and the rows that are as good."""
    best = _best(rows)
    own = [(case, of) for case, of in rows if best in of]
    against: list[str] = []
    own_defaults: list[str] = []
    for engine, spelled in [*SPELLED.items(), ("", "")]:
        wanted = [case.defaults.get(engine, "") if engine else case.baseline for case, _ in own]
        pairs = _pairs(own, best, [
            next((cell for cell in of.values() if cell.impl == row), None)
            for (_, of), row in zip(own, wanted, strict=True)
        ])  # fmt: skip
        names = ", ".join(dict.fromkeys(cell.name for *_, cell in pairs))
        part = f" in {len(pairs)} of {len(own)}" if len(pairs) < len(own) else ""
        if names == best:
            own_defaults += [f"it is {spelled}'s default{part}"] if engine else []
        elif names and (engine or not (against or own_defaults)):
            ratio, noise = _ratio(pairs, run, len(SPELLED))
            other = f"{spelled}'s default {names}" if engine else names
            against.append(versus(ratio, other, noise > MAX_NOISE) + part)
    head = "weighted by the suite" if own[0][1][best].place != "ad hoc" else "all cases together"
    head += f" ({len(own)} of {counted(len(rows))})" if len(own) < len(rows) else ""
    head += f" {best} takes the least time," if best != winner else ""
    if against or best != winner:
        yield f"{head} {' and '.join(against)}".rstrip(" ,")
    yield from own_defaults
    others = [name for name in own[0][1] if name != best and all(name in of for _, of in own)]
    near: dict[str, list[str]] = {"within": [], "perhaps within": []}
    for name in others:
        pairs = _pairs(own, best, [of[name] for _, of in own])
        if len(pairs) == len(own) and (ratio := _ratio(pairs, run, len(others))[0]).low < 1 + NEAR:
            near["within" if ratio.high <= 1 + NEAR else "perhaps within"].append(name)
    yield from (f"{what} {100 * NEAR:g} %: {', '.join(names)}" for what, names in near.items() if names)


def _best(rows: Rows) -> str:
    """Of the rows that have a time in more than half of the cases (where there is none, in any) the one that
    takes the least for its cases, compared with the fastest row of each."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _, of in rows:
        for name, cell in of.items():
            times.setdefault(name, []).append((_total(cell), _total(next(iter(of.values())))))
    names = [name for name, of_row in times.items() if 2 * len(of_row) > len(rows)] or [*times]
    sums = {name: list(map(sum, zip(*times[name], strict=True))) for name in names}
    return min(names, key=lambda name: (sums[name][0] / sums[name][1], -len(times[name])))


def _total(cell: Cell) -> float:
    return (cell.weight or 1.0) * (cell.time_us or 0.0)


def _pairs(rows: Rows, best: str, others: Iterable[Cell | None]) -> list[Pair]:
    pairs = [(case, of[best], other) for (case, of), other in zip(rows, others, strict=True) if other]
    return [pair for pair in pairs if pair[1].samples.by_round.keys() & pair[2].samples.by_round.keys()]


def _ratio(pairs: Sequence[Pair], run: Run, comparisons: int) -> tuple[Comparison, float]:
    """The total time of the second rows over that of the first, at an equal share of the error of so many
    comparisons; and the noise: that of all A/A pairs, with the shares that the first rows have, or the
    largest of a case where records are too old to have the times of these pairs."""
    again = [
        (_total(a) / (baseline.time_us or math.inf), times, baseline.samples.by_round)
        for case, a, _ in pairs
        for times, baseline in filter(None, [case.again])
    ]
    largest = max(case.noise for case, *_ in pairs)
    noise = noise_of(total_ratio(again, confidence=run.confidence)) if again else largest
    times = [(a.weight or 1.0, a.samples.by_round, b.samples.by_round) for _, a, b in pairs]
    confidence = 1 - (1 - run.confidence) / comparisons
    return total_ratio(times, noise=noise, margin=run.margin, confidence=confidence), noise
