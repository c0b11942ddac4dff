"""The summary of all cases of a run: which row is fastest in how many of them, what the best row gains over
the rows that engines run by default, and which rows are as good."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from harness.plan.toggle import MARGIN
from harness.report.case_table import headline
from harness.report.rows import CaseResult
from harness.report.text import counted, grouped, how_summed, versus
from harness.results.schema import Cell, Run
from harness.statistics.paired import MAX_NOISE, Comparison, noise_of
from harness.statistics.totals import TINY, total_ratio
from kernels.engines import SPELLED

Rows = Sequence[tuple[CaseResult, dict[str, Cell]]]
"""Cases with their cells that have a time, by name, the fastest first."""
Pair = tuple[CaseResult, Cell, Cell]  # a case and two cells of it that share rounds


def summary(cases: Sequence[CaseResult], run: Run) -> list[str]:
    """A sentence for each boundary and launch mode; for a boundary with one case it is the headline of the
    case. Empty where the run has one case, and for a race, which has other configurations in each case.

    cases: those of the run that are finished
    """
    if run.race or not cases or max(len(cases), len(run.cases)) < 2:
        return []
    planned = Counter(case.boundary for case in run.cases)
    finished = grouped(cases, lambda case: case.cells[0].boundary)
    boundaries = list(dict.fromkeys([*finished, *planned]))
    sentences = []
    for boundary in boundaries:
        of_boundary = finished.get(boundary, [])
        by_launch = len(of_boundary) > 1 and len(run.launches) > 1
        for launch in run.launches if by_launch else [""]:
            if len(of_boundary) > 1:
                timed = [{c.name: c for c in case.timed if launch in ("", c.launch)} for case in of_boundary]
                parts = _clauses(list(zip(of_boundary, timed, strict=True)), run)
            else:
                parts = [str(headline(case)) for case in of_boundary]
            missing = planned[boundary] - len(of_boundary)
            if missing > 0:
                parts.append(f"{missing} more not measured" if of_boundary else f"{missing} not measured")
            named = boundary if len(boundaries) > 1 else ""
            about = " ".join(filter(None, [named, launch]))
            sentences.append(": ".join(filter(None, [about, "; ".join(parts)])))
    return sentences


def _clauses(rows: Rows, run: Run) -> list[str]:
    """How many cases each row wins, why other cases have no winner, and what holds for all cases together."""
    wins, without_winner = Counter[str](), Counter[str]()
    for case, cells in rows:
        fastest_first = list(cells.values())
        if not fastest_first:
            without_winner["no row has a time"] += 1
        elif len(fastest_first) == 1:
            without_winner["one row alone"] += 1
        elif (comparison := case.comparison(fastest_first[0], fastest_first[1])) is None:
            without_winner["not compared"] += 1
        elif comparison.verdict == "faster":
            wins[fastest_first[0].name] += 1
        elif comparison.verdict == "same":
            without_winner["two are the same"] += 1
        elif comparison.verdict == "slower":
            without_winner["the first is slower round by round"] += 1
        else:
            without_winner["indistinguishable"] += 1
    whole = counted(len(rows))
    if wins:
        (winner, count), *others = wins.most_common()
        clauses = [f"fastest in {count} of {whole}: {winner}"]
        clauses += [f"in {count}: {name}" for name, count in others]
    else:
        clauses = [f"no row is clearly the fastest in {whole}"]
    clauses += [f"{reason} in {count}" for reason, count in without_winner.items()]
    if any(cells for _, cells in rows):
        clauses += _over_all_cases(rows, run, wins)
    return clauses


def _over_all_cases(rows: Rows, run: Run, wins: Counter[str]) -> Iterator[str]:
    """The row with the least time for all cases together, compared with what engines run by default; or, if
    none of these defaults has a time, with the baseline, or else with the second. And the rows that are as
    good."""
    best = _best(rows)
    with_best = [(case, cells) for case, cells in rows if best in cells]
    in_all_cases = [name for name in with_best[0][1] if all(name in cells for _, cells in with_best)]
    others = [name for name in in_all_cases if name != best]
    ratios = {}  # by name the ratio of another row to the best one, and its noise
    for name in others:
        pairs = _pairs(with_best, best, [cells[name] for _, cells in with_best])
        if len(pairs) == len(with_best):
            ratios[name] = _ratio(pairs, run, len(others))
    against, is_default = _against_defaults(with_best, best, run)
    if ratios and not against:
        second = min(ratios, key=lambda name: ratios[name][0].ratio)
        ratio, noise = ratios[second]
        against = [(ratio.verdict, versus(ratio, second, noise > MAX_NOISE))]

    all_faster = all(ratio.verdict == "faster" for ratio, _ in ratios.values())
    clearly_least = len(ratios) == len(others) and all_faster
    wins_alone = list(wins) == [best]
    sentence = _which_cases(rows, with_best)
    if not clearly_least and all(word == "faster" for word, _ in against):
        sentence += f" {best}, not clearly the fastest,"
    elif clearly_least and not wins_alone:
        sentence += f" {best} takes the least time,"
    elif wins[best] < len(rows):  # a row that is fastest in all cases is named already
        sentence += f" {best}"
    if against or (others and not wins_alone):
        yield f"{sentence} {' and '.join(clause for _, clause in against)}".rstrip(" ,")
    yield from is_default
    as_good = [name for name, (ratio, noise) in ratios.items() if ratio.high * (1 + noise) <= 1 + MARGIN]
    if as_good:
        yield f"within {100 * MARGIN:g} %: {', '.join(as_good)}"


def _against_defaults(rows: Rows, best: str, run: Run) -> tuple[list[tuple[str, str]], list[str]]:
    """The best row against what each engine runs by default, or without any default against the baseline:
    pairs of a verdict and a clause that states it. And a clause for each engine whose default the best row
    is.

    rows: those of the cases in which the best row has a time
    """
    against: list[tuple[str, str]] = []
    is_default: list[str] = []
    for engine, spelled in SPELLED.items():
        pairs = _pairs_by_impl(rows, best, [case.defaults.get(engine, "") for case, _ in rows])
        names, where = _names_and_cases(pairs, rows)
        if names == best:
            is_default.append(f"it is {spelled}'s default{where}")
        elif names:
            against.append(_against(pairs, f"{spelled}'s default {names}", where, run))
    if not (against or is_default):
        pairs = _pairs_by_impl(rows, best, [case.baseline for case, _ in rows])
        names, where = _names_and_cases(pairs, rows)
        if names not in ("", best):
            against.append(_against(pairs, names, where, run))
    return against, is_default


def _names_and_cases(pairs: Sequence[Pair], rows: Rows) -> tuple[str, str]:
    """The names of the second cells; and in how many cases they are, as ` in 1 of 3`, empty for all."""
    names = ", ".join(dict.fromkeys(cell.name for _, _, cell in pairs))
    return names, f" in {len(pairs)} of {len(rows)}" if len(pairs) < len(rows) else ""


def _against(pairs: Sequence[Pair], other: str, where: str, run: Run) -> tuple[str, str]:
    """The verdict on the first rows against the second ones, which `other` names, and a clause that states
    it."""
    ratio, noise = _ratio(pairs, run, len(SPELLED))
    return ratio.verdict, versus(ratio, other, noise > MAX_NOISE) + where


def _which_cases(rows: Rows, with_best: Rows) -> str:
    """How cases are summed and, where the best row has a time in only some of them, in which part."""
    weights = [case.cells[0].weight for case, _ in rows]
    if len(with_best) == len(rows):
        return how_summed(weights)
    share = ""
    if len(set(weights)) > 1:
        weight = sum(case.cells[0].weight for case, _ in with_best)
        share = f", {100 * weight / sum(weights):.0f} % of their weight"
    return f"{how_summed(weights)} ({len(with_best)} of {counted(len(rows))}{share})"


def _best(rows: Rows) -> str:
    """The name of the row that takes the least time for its cases together, relative to the fastest row of
    each of them. Only rows with a time in more than half of the cases count; if there are none, all rows."""
    times: dict[str, list[tuple[float, float]]] = {}  # of a row and of the fastest row, for each case
    for _, cells in rows:
        fastest = next(iter(cells.values()), None)
        for name, cell in cells.items():
            times.setdefault(name, []).append((_weighted_us(cell), _weighted_us(fastest or cell)))
    names = [name for name, of_row in times.items() if 2 * len(of_row) > len(rows)] or list(times)

    def rank(name: str) -> tuple[float, int]:
        total, of_fastest = map(sum, zip(*times[name], strict=True))
        return total / of_fastest, -len(times[name])

    return min(names, key=rank)


def _weighted_us(cell: Cell) -> float:
    return (cell.weight or TINY) * (cell.time_us or 0.0)


def _pairs_by_impl(rows: Rows, best: str, impls: Iterable[str]) -> list[Pair]:
    """The cells of the best row with the fastest cells of the implementations, of which there is one a
    case."""
    cells_of_impls = []
    for (_, cells), impl in zip(rows, impls, strict=True):
        cells_of_impls.append(next((cell for cell in cells.values() if cell.impl == impl), None))
    return _pairs(rows, best, cells_of_impls)


def _pairs(rows: Rows, best: str, others: Iterable[Cell | None]) -> list[Pair]:
    """The cells of the best row with other cells, of which there is one a case; where they share rounds."""
    pairs = []
    for (case, cells), other in zip(rows, others, strict=True):
        if other and cells[best].samples.by_round.keys() & other.samples.by_round.keys():
            pairs.append((case, cells[best], other))
    return pairs


def _ratio(pairs: Sequence[Pair], run: Run, comparisons: int) -> tuple[Comparison, float]:
    """The total time of the second cells over that of the first; and the noise. So many comparisons together
    hold at the confidence of the run.

    The noise is that of the A/A pairs of all cases together, with weights that make the baseline's time in a
    case count as much as the time of the first cell. Where a case has no times of an A/A pair, for example in
    an old record, the noise is the largest of any case.
    """
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
    return total_ratio(times_of_pairs, noise=noise, margin=run.margin, confidence=confidence), noise
