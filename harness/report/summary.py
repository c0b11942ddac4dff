"""What all cases of a run say together: which row is fastest in how many of them, what it gains over the rows
that engines run by default, and which rows are as good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.report.case_table import headline
from harness.report.rows import CaseResult
from harness.report.text import counted, grouped, versus
from harness.results.schema import Cell, Run
from harness.statistics.intervals import weighted_mean
from harness.statistics.paired import MAX_NOISE, Comparison
from harness.statistics.totals import total_ratio
from kernels.engines import SPELLED

NEAR = 0.02
"""Rows that take at most this share longer than the best one over all cases are as good for most purposes."""
MOST_NAMED = 3
"""The number of rows that are named for the cases in which they are fastest."""

Cells = Mapping[str, Cell]
"""The rows of a case that have a time by name, the fastest first."""
Own = tuple[CaseResult, Cell, Cells]
"""A case, a row of it, and all its rows."""
Pair = tuple[CaseResult, Cell, Cell]
"""A case and two rows of it."""


def summary(cases: Sequence[CaseResult], run: Run) -> list[str]:
    """A sentence for each boundary and launch mode; for one case it is its headline. Empty where that is all.

    cases: those of the run that are finished
    """
    if len(cases) < 2:
        return []
    by_boundary = grouped(cases, lambda case: case.cells[0].boundary)
    launches = run.launches if len(run.launches) > 1 else [""]
    sentences = []
    for boundary, of in by_boundary.items():
        planned = sum(case.boundary == boundary for case in run.cases)
        for launch in launches:
            about = [boundary] * (len(by_boundary) > 1) + [launch] * bool(launch)
            said = str(headline(of[0])) if len(of) == 1 else _Together(of, launch, run).sentence()
            missing = f"{planned - len(of)} more not measured" if planned > len(of) else ""
            said = "; ".join(filter(None, [said, missing]))
            sentences.append(": ".join(filter(None, [" ".join(about), said])))
    return sentences


class _Together:
    """Cases of one boundary in one launch mode; an empty launch stands for all that the run has."""

    def __init__(self, cases: Sequence[CaseResult], launch: str, run: Run) -> None:
        self.rows: list[tuple[CaseResult, Cells]] = [
            (case, {cell.name: cell for cell in case.timed if launch in ("", cell.launch)}) for case in cases
        ]
        self.run = run

    def sentence(self) -> str:
        wins, others = Counter[str](), Counter[str]()
        for case, rows in self.rows:
            first, second, *_ = [*rows.values(), None, None]
            verdict = case.compared(first, second) if first and second else None
            if verdict and verdict.verdict == "faster":
                wins[verdict.a] += 1
            elif not (first and second):
                others["one row alone" if first else "no row has a time"] += 1
            else:
                others["two are the same" if verdict and verdict.verdict == "same" else "not told apart"] += 1
        parts: list[str] = []
        for name, count in wins.most_common(MOST_NAMED):
            parts.append(f"in {count}: {name}" if parts else f"fastest in {count} of {self._counted}: {name}")
        if rest := sum(wins.values()) - sum(count for _, count in wins.most_common(MOST_NAMED)):
            parts.append(f"in {rest}: others")
        parts = parts or [f"no row is clearly the fastest in {self._counted}"]
        parts += [f"{what} in {count}" for what, count in others.items()]
        if any(rows for _, rows in self.rows):
            parts += self._over_all(wins.most_common(1)[0][0] if wins else "")
        return "; ".join(parts)

    @property
    def _counted(self) -> str:
        return counted(len(self.rows))

    def _over_all(self, winner: str) -> Iterator[str]:
        """The row with the least time for all cases together, compared with what engines run by default, and
        the rows that are as good."""
        best = self._best()
        own = [(case, rows[best], rows) for case, rows in self.rows if best in rows]
        suite = own[0][1].place != "ad hoc"
        head = "weighted by the suite" if suite else "all cases together"
        if len(own) < len(self.rows):
            head += f" ({len(own)} of {self._counted})"
        if best != winner:
            head += f" {best} takes the least time,"
        against = [self._against(name, pairs, len(own)) for name, pairs in self._rivals(own)]
        if against or best != winner:
            yield f"{head} {' and '.join(against)}".rstrip(" ,")
        names = [name for name in own[0][2] if name != best and all(name in rows for *_, rows in own)]
        ratios = [self._ratio([(c, cell, rows[name]) for c, cell, rows in own], len(names)) for name in names]
        near = [name for name, ratio in zip(names, ratios, strict=True) if ratio.high <= 1 + NEAR]
        perhaps = [
            name
            for name, ratio in zip(names, ratios, strict=True)
            if ratio.low < 1 + NEAR and name not in near
        ]
        for what, found in (("within", near), ("perhaps within", perhaps)):
            if found:
                yield f"{what} {100 * NEAR:g} %: {', '.join(found)}"

    def _best(self) -> str:
        """Of the rows that have a time in more than half of the cases (where there is none, in any) the one
        that takes the least for its cases, compared with the fastest row of each."""
        times: dict[str, list[tuple[float, float]]] = {}
        for _, rows in self.rows:
            least = next(iter(rows.values()), None)
            for name, cell in rows.items():
                times.setdefault(name, []).append((_total_us(cell), _total_us(least or cell)))
        names = [name for name, of in times.items() if 2 * len(of) > len(self.rows)] or [*times]
        sums = {name: list(map(sum, zip(*times[name], strict=True))) for name in names}
        return min(names, key=lambda name: (sums[name][0] / sums[name][1], -len(times[name])))

    def _rivals(self, own: Sequence[Own]) -> Iterator[tuple[str, list[Pair]]]:
        """What the best row is compared with, in the cases that have both: the rows that engines run by
        default, or where none of these has a time the baseline."""
        found: dict[tuple[int, ...], tuple[list[str], list[Pair]]] = {}
        for engine, spelled in SPELLED.items():
            if pairs := _pairs(own, [case.defaults.get(engine, "") for case, *_ in own]):
                same = tuple(id(cell) for *_, cell in pairs)
                found.setdefault(same, ([], pairs))[0].append(f"{spelled}'s")
        for engines, pairs in found.values():
            yield f"{' and '.join(engines)} default {_named(pairs)}", pairs
        if not found:
            pairs = _pairs(own, [case.baseline for case, *_ in own])
            if any(a is not b for _, a, b in pairs):
                yield _named(pairs), pairs

    def _against(self, name: str, pairs: Sequence[Pair], of: int) -> str:
        said = f"it is {name}"
        if any(a is not b for _, a, b in pairs):
            said = versus(self._ratio(pairs, len(SPELLED)), name, self._noise(pairs) > MAX_NOISE)
        return said if len(pairs) == of else f"{said} in {len(pairs)} of {of}"

    def _ratio(self, pairs: Sequence[Pair], comparisons: int) -> Comparison:
        """The total time of the second rows over that of the first, at an equal share of the error of so many
        comparisons."""
        return total_ratio(
            [(_weight(a), a.samples.by_round, b.samples.by_round) for _, a, b in pairs],
            noise=self._noise(pairs),
            margin=self.run.margin,
            confidence=1 - (1 - self.run.confidence) / comparisons,
        )

    def _noise(self, pairs: Sequence[Pair]) -> float:
        """That of the cases, by the time that each takes: as if all were off to the same side."""
        return weighted_mean([case.noise for case, *_ in pairs], [_total_us(a) for _, a, _ in pairs])


def _pairs(own: Sequence[Own], implementations: Sequence[str]) -> list[Pair]:
    """The row of each case with that of the implementation, where both have a time."""
    others = [
        (case, cell, next((row for row in rows.values() if row.impl == name), None))
        for (case, cell, rows), name in zip(own, implementations, strict=True)
    ]
    return [(case, cell, row) for case, cell, row in others if row]


def _named(pairs: Sequence[Pair]) -> str:
    return ", ".join(dict.fromkeys(cell.name for *_, cell in pairs))


def _weight(cell: Cell) -> float:
    return cell.weight or 1.0


def _total_us(cell: Cell) -> float:
    return _weight(cell) * (cell.time_us or 0.0)
