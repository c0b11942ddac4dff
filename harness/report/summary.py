"""The summary of all cases of a run: wins, what the best row gains over engines' defaults, rows as good."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.plan.toggle import MARGIN
from harness.report.case_table import headline
from harness.report.rows import CaseResult
from harness.report.text import counted, grouped, how_summed, versus
from harness.results.schema import Cell, Run
from harness.statistics.paired import MAX_NOISE, Comparison, noise_of
from harness.statistics.totals import TINY, total_ratio
from kernels.engines import SPELLED

Cases = Sequence[tuple[CaseResult, dict[str, Cell]]]
"""Cases, each with its cells that have a time: by name, the fastest first."""
NO_WINNER = {"same": "two are the same", "slower": "the first is slower round by round",
             "unclear": "indistinguishable"}  # fmt: skip
"""Verdict on the fastest row and the second -> why the case has no winner."""
Pair = tuple[CaseResult, Cell, Cell]  # a case and two cells of it that share rounds


class Total(NamedTuple):
    """Two rows compared over all cases together."""

    comparison: Comparison  # above 1 where the first row is faster
    noise: float

    def clause(self, other: str, where: str = "") -> Clause:
        """What it says of the first row, in words; `other` names the second."""
        text = versus(self.comparison, other, too_noisy=self.noise > MAX_NOISE)
        return Clause(text + where, self.comparison.verdict)


class Clause(NamedTuple):
    text: str
    verdict: str  # on the best row against the row that the text names; empty where these are the same row


def summary(cases: Sequence[CaseResult], run: Run) -> list[str]:
    """A sentence for each boundary and launch mode of the finished cases; for a boundary with one case it is
    its headline. Empty where the run has one case, and for a race, whose cases have other configurations."""
    if run.race or not cases or max(len(cases), len(run.cases)) < 2:
        return []
    planned = Counter(case.boundary for case in run.cases)
    finished = grouped(cases, lambda case: case.cells[0].boundary)
    boundaries = list(dict.fromkeys([*finished, *planned]))
    sentences = []
    for boundary in boundaries:
        of_boundary = finished.get(boundary, [])
        by_launch = len(of_boundary) > 1 and len(run.launches) > 1
        for mode in run.launches if by_launch else [None]:  # None: all launch modes together
            if len(of_boundary) > 1:
                timed = [{c.name: c for c in case.timed if mode in (None, c.launch)} for case in of_boundary]
                parts = _clauses(list(zip(of_boundary, timed, strict=True)), run)
            else:
                parts = [str(headline(case)) for case in of_boundary]
            missing = planned[boundary] - len(of_boundary)
            if missing > 0:
                parts.append(f"{missing} more not measured" if of_boundary else f"{missing} not measured")
            title = f"{boundary if len(boundaries) > 1 else ''} {mode or ''}".strip()
            sentences.append(": ".join(filter(None, [title, "; ".join(parts)])))
    return sentences


def _clauses(cases: Cases, run: Run) -> list[str]:
    """How many cases each row wins, why other cases have no winner, and what holds for all cases together."""
    wins, without_winner = Counter[str](), Counter[str]()
    for case, cells in cases:
        fastest_first = list(cells.values())
        if len(fastest_first) < 2:
            without_winner["one row alone" if fastest_first else "no row has a time"] += 1
            continue
        comparison = case.comparison(fastest_first[0], fastest_first[1])
        if comparison and comparison.verdict == "faster":
            wins[fastest_first[0].name] += 1
        else:
            without_winner[NO_WINNER[comparison.verdict] if comparison else "not compared"] += 1
    whole = counted(len(cases))
    clauses = [f"no row is clearly the fastest in {whole}"]
    if wins:
        (winner, count), *others = wins.most_common()
        clauses = [f"fastest in {count} of {whole}: {winner}"]
        clauses += [f"in {count}: {name}" for name, count in others]
    clauses += [f"{reason} in {count}" for reason, count in without_winner.items()]
    if any(cells for _, cells in cases):
        clauses += _over_all_cases(cases, run, wins)
    return clauses


def _over_all_cases(cases: Cases, run: Run, wins: Counter[str]) -> Iterator[str]:
    """Yields clauses on the row with the least time for all cases together. It is compared with what engines
    run by default; if no default has a time, with the baseline; if that has none either, with the second row.
    The last clause names the rows that are as good. `wins` counts the cases that each row wins."""
    best = _best(cases)
    with_best = [(case, cells) for case, cells in cases if best in cells]
    others = _against_others(with_best, best, run)
    totals = {name: total for name, total in others.items() if total}
    clauses = _against_defaults(with_best, best, run)
    if totals and not any(clause.verdict for clause in clauses):
        second = min(totals, key=lambda name: totals[name].comparison.ratio)
        clauses.append(totals[second].clause(second))
    compared = [clause for clause in clauses if clause.verdict]

    is_only_winner = list(wins) == [best]
    if compared or (others and not is_only_winner):  # else the clause on wins says it all
        clearly_least = all(total and total.comparison.verdict == "faster" for total in others.values())
        subject = best
        if clearly_least and not is_only_winner:
            subject = f"{best} takes the least time,"
        elif not clearly_least and all(clause.verdict == "faster" for clause in compared):
            subject = f"{best}, not clearly the fastest,"
        elif wins[best] == len(cases):
            subject = ""  # the clause on wins, which stands before this one, names it
        texts = " and ".join(clause.text for clause in compared)
        sentence = " ".join(filter(None, [_which_cases(cases, with_best), subject, texts]))
        yield sentence.rstrip(",")  # the comma of the subject, where no text follows
    yield from (clause.text for clause in clauses if not clause.verdict)
    as_good = [name for name, (ratio, noise) in totals.items() if ratio.high * (1 + noise) <= 1 + MARGIN]
    if as_good:
        yield f"within {100 * MARGIN:g} %: {', '.join(as_good)}"


def _against_others(cases: Cases, best: str, run: Run) -> dict[str, Total | None]:
    """The best row against each other row that has a time in all of these cases, by the other's name; None
    where the two do not share rounds in all of them."""
    first_case, *other_cases = [cells for _, cells in cases]
    others = [name for name in first_case if name != best and all(name in cells for cells in other_cases)]
    totals = {}
    for name in others:
        pairs = _pairs(cases, best, [cells[name] for _, cells in cases])
        totals[name] = _total(pairs, run, len(others)) if len(pairs) == len(cases) else None
    return totals


def _against_defaults(cases: Cases, best: str, run: Run) -> list[Clause]:
    """A clause for each engine: the best row against what the engine runs by default, or that it is the
    default. Without any default, the best row against the baseline. In all cases the best row has a time."""
    clauses = [
        _clause(cases, best, [case.defaults.get(engine) for case, _ in cases], f"{spelled}'s default", run)
        for engine, spelled in SPELLED.items()
    ]
    if not any(clauses):
        clauses = [_clause(cases, best, [case.baseline for case, _ in cases], "", run)]
    return [clause for clause in clauses if clause]


def _clause(cases: Cases, best: str, impls: Sequence[str | None], title: str, run: Run) -> Clause | None:
    """The best row against the fastest row of the implementation that `impls` has for each case. `title` says
    what these are; it may be empty. None where no such row has a time, or where all are the best row itself
    and there is no title."""
    fastest = []
    for (_, cells), impl in zip(cases, impls, strict=True):
        fastest.append(next((cell for cell in cells.values() if cell.impl == impl), None))
    pairs = _pairs(cases, best, fastest)
    names = ", ".join(dict.fromkeys(cell.name for _, _, cell in pairs))
    where = f" in {len(pairs)} of {len(cases)}" if len(pairs) < len(cases) else ""
    if names == best and title:
        return Clause(f"it is {title}{where}", "")
    if not names or names == best:
        return None
    total = _total(pairs, run, comparisons=len(SPELLED))  # at most one for each engine
    return total.clause(f"{title} {names}".lstrip(), where)


def _which_cases(cases: Cases, with_best: Cases) -> str:
    """How cases are summed and, where the best row has a time in only some of them, in which part."""
    weights = [case.cells[0].weight for case, _ in cases]
    if len(with_best) == len(cases):
        return how_summed(weights)
    share = ""
    if len(set(weights)) > 1:
        weight = sum(case.cells[0].weight for case, _ in with_best)
        share = f", {100 * weight / sum(weights):.0f} % of their weight"
    return f"{how_summed(weights)} ({len(with_best)} of {counted(len(cases))}{share})"


def _best(cases: Cases) -> str:
    """The name of the row with the least total time, divided by what the fastest rows take for the cases in
    which it has one. Only rows with a time in more than half of the cases count; if there are none, all."""
    counts = Counter(name for _, cells in cases for name in cells)
    names = [name for name, count in counts.items() if 2 * count > len(cases)] or list(counts)

    def multiple_of_fastest(name: str) -> float:
        with_row = [cells for _, cells in cases if name in cells]
        total = sum(_weighted_us(cells[name]) for cells in with_row)
        return total / sum(min(map(_weighted_us, cells.values())) for cells in with_row)

    return min(names, key=lambda name: (multiple_of_fastest(name), -counts[name]))


def _weighted_us(cell: Cell) -> float:
    return (cell.weight or TINY) * (cell.time_us or 0.0)


def _pairs(cases: Cases, best: str, others: Iterable[Cell | None]) -> list[Pair]:
    """For each case the cell of the best row and the other cell, where the two share rounds."""
    pairs = []
    for (case, cells), other in zip(cases, others, strict=True):
        if other and cells[best].samples.by_round.keys() & other.samples.by_round.keys():
            pairs.append((case, cells[best], other))
    return pairs


def _total(pairs: Sequence[Pair], run: Run, comparisons: int) -> Total:
    """The first cells of the pairs against the second ones; `comparisons` such totals hold together at the
    run's confidence. The noise is that of the A/A pairs of all cases together, so weighted that the baseline
    of a case counts as much as its first cell. Where a case has no times of an A/A pair, as in an old record,
    it is the largest noise of any case."""
    reruns = []
    for case, a, b in pairs:
        if rerun := case.rerun(a, b):
            times, baseline = rerun
            weight = _weighted_us(a) / (baseline.time_us or math.inf)
            reruns.append((weight, times, baseline.samples.by_round))
    noise = max(case.noise for case, _, _ in pairs)
    if len(reruns) == len(pairs):
        noise = noise_of(total_ratio(reruns, confidence=run.confidence))
    times_of_pairs = [(a.weight, a.samples.by_round, b.samples.by_round) for _, a, b in pairs]
    confidence = 1 - (1 - run.confidence) / comparisons
    return Total(total_ratio(times_of_pairs, noise=noise, margin=run.margin, confidence=confidence), noise)
