"""What all cases of a run say together: which row is fastest in how many of them, what it gains over the rows
that engines run by default, and which rows are as good."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from harness.plan.toggle import MARGIN
from harness.report.case_table import headline
from harness.report.rows import CaseResult
from harness.report.text import counted, grouped, together, versus
from harness.results.schema import Cell, Run
from harness.statistics.paired import MAX_NOISE, Comparison, noise_of
from harness.statistics.totals import TINY, total_ratio
from kernels.engines import SPELLED

Rows = Sequence[tuple[CaseResult, dict[str, Cell]]]
"""Cases with their rows that have a time, by name, the fastest first."""
Pair = tuple[CaseResult, Cell, Cell]  # a case and two rows of it that share rounds


def summary(cases: Sequence[CaseResult], run: Run) -> list[str]:
    """A sentence for each boundary and launch mode; for one case it is its headline. Empty where the run has
    one case, and for a race, which has other configurations in each case.

    cases: those of the run that are finished
    """
    if run.race or not cases or max(len(cases), len(run.cases)) < 2:
        return []
    planned = Counter(case.boundary for case in run.cases)
    by_boundary = grouped(cases, lambda case: case.cells[0].boundary)
    by_boundary |= {boundary: [] for boundary in planned if boundary not in by_boundary}
    sentences = []
    for boundary, of in by_boundary.items():
        missing = planned[boundary] - len(of)
        for launch in run.launches if len(of) > 1 and len(run.launches) > 1 else [""]:
            timed = [{c.name: c for c in case.timed if launch in ("", c.launch)} for case in of]
            if len(of) > 1:
                parts = list(_said(list(zip(of, timed, strict=True)), run))
            else:
                parts = [str(headline(case)) for case in of]
            parts += [f"{missing}{' more' if of else ''} not measured"] if missing > 0 else []
            about = " ".join(filter(None, [boundary if len(by_boundary) > 1 else "", launch]))
            sentences.append(": ".join(filter(None, [about, "; ".join(parts)])))
    return sentences


def _said(rows: Rows, run: Run) -> Iterator[str]:
    wins, others = Counter[str](), Counter[str]()
    words = {"same": "two are the same", "slower": "the first is slower round by round"}
    for case, of in rows:
        first, second, *_ = [*of.values(), None, None]
        found = case.compared(first, second) if first and second else None
        if first and found and found.verdict == "faster":
            wins[first.name] += 1
        elif found:
            others[words.get(found.verdict, "indistinguishable")] += 1
        elif second:
            others["not compared"] += 1
        else:
            others["one row alone" if first else "no row has a time"] += 1
    whole = counted(len(rows))
    (winner, count), *rest = wins.most_common() or [("", 0)]
    yield (
        f"fastest in {count} of {whole}: {winner}" if winner else f"no row is clearly the fastest in {whole}"
    )
    yield from (f"in {count}: {name}" for name, count in rest)
    yield from (f"{what} in {count}" for what, count in others.items())
    if any(of for _, of in rows):
        yield from _over_all(rows, run, wins)


def _over_all(rows: Rows, run: Run, wins: Counter[str]) -> Iterator[str]:
    """The row with the least time for all cases together, compared with what engines run by default, or where
    none of that has a time with the baseline, or else with the second; and the rows that are as good."""
    best = _best(rows)
    own = [(case, of) for case, of in rows if best in of]
    others = [name for name in own[0][1] if name != best and all(name in of for _, of in own)]
    over = {}
    for name in others:
        pairs = _pairs(own, best, [of[name] for _, of in own])
        if len(pairs) == len(own):
            over[name] = _ratio(pairs, run, len(others))
    against, is_default = _against_defaults(own, best, run)
    if over and not against:
        second = min(over, key=lambda name: over[name][0].ratio)
        ratio, noise = over[second]
        against = [(ratio.verdict, versus(ratio, second, noise > MAX_NOISE))]
    head = _weighed(rows, own)
    clear = len(over) == len(others) and all(ratio.verdict == "faster" for ratio, _ in over.values())
    if not clear and all(word == "faster" for word, _ in against):
        head += f" {best}, not clearly the fastest,"
    elif clear and [*wins] != [best]:
        head += f" {best} takes the least time,"
    elif wins[best] < len(rows):  # where it is fastest in all it need not be named again
        head += f" {best}"
    if against or (others and [*wins] != [best]):
        yield f"{head} {' and '.join(said for _, said in against)}".rstrip(" ,")
    yield from is_default
    near = [name for name, (ratio, noise) in over.items() if ratio.high * (1 + noise) <= 1 + MARGIN]
    yield from [f"within {100 * MARGIN:g} %: {', '.join(near)}"] if near else []


def _against_defaults(own: Rows, best: str, run: Run) -> tuple[list[tuple[str, str]], list[str]]:
    """The best row against what each engine runs by default, or else against the baseline: verdicts, and what
    they say. And for each engine whose default it is, that it is."""
    against: list[tuple[str, str]] = []
    is_default: list[str] = []
    for engine, spelled in [*SPELLED.items(), ("", "")]:
        wanted = [case.defaults.get(engine, "") if engine else case.baseline for case, _ in own]
        cells = [
            next((cell for cell in of.values() if cell.impl == row), None)
            for (_, of), row in zip(own, wanted, strict=True)
        ]
        pairs = _pairs(own, best, cells)
        names = ", ".join(dict.fromkeys(cell.name for *_, cell in pairs))
        part = f" in {len(pairs)} of {len(own)}" if len(pairs) < len(own) else ""
        if names == best:
            is_default += [f"it is {spelled}'s default{part}"] if engine else []
        elif names and (engine or not (against or is_default)):
            ratio, noise = _ratio(pairs, run, len(SPELLED))
            other = f"{spelled}'s default {names}" if engine else names
            against.append((ratio.verdict, versus(ratio, other, noise > MAX_NOISE) + part))
    return against, is_default


def _weighed(rows: Rows, own: Rows) -> str:
    """How cases are summed, and which part of them the best row has a time in."""
    weights = [case.cells[0].weight for case, _ in rows]
    head, share = together(weights), ""
    if len({*weights}) > 1:
        share = f", {100 * sum(case.cells[0].weight for case, _ in own) / sum(weights):.0f} % of their weight"
    return head + (f" ({len(own)} of {counted(len(rows))}{share})" if len(own) < len(rows) else "")


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
    return (cell.weight or TINY) * (cell.time_us or 0.0)


def _pairs(rows: Rows, best: str, others: Iterable[Cell | None]) -> list[Pair]:
    pairs = [(case, of[best], other) for (case, of), other in zip(rows, others, strict=True) if other]
    return [pair for pair in pairs if pair[1].samples.by_round.keys() & pair[2].samples.by_round.keys()]


def _ratio(pairs: Sequence[Pair], run: Run, comparisons: int) -> tuple[Comparison, float]:
    """The total time of the second rows over that of the first, at an equal share of the error of so many
    comparisons; and the noise: that of all A/A pairs, with the shares that the first rows have, or the
    largest of a case where one has no times of such a pair, for example because it is too old."""
    again = [
        (_total(a) / (baseline.time_us or math.inf), times, baseline.samples.by_round)
        for case, a, b in pairs
        for times, baseline in filter(None, [case.again(a, b)])
    ]
    largest = max(case.noise for case, *_ in pairs)
    noise = noise_of(total_ratio(again, confidence=run.confidence)) if len(again) == len(pairs) else largest
    times = [(a.weight, a.samples.by_round, b.samples.by_round) for _, a, b in pairs]
    confidence = 1 - (1 - run.confidence) / comparisons
    return total_ratio(times, noise=noise, margin=run.margin, confidence=confidence), noise
