"""The table of a measured case, fastest first, with what others published; cases the budget left out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from harness.catalogue.published import PublishedFigure
from harness.report.text import (
    WIDTH,
    filled_columns,
    microsecond_interval,
    microseconds,
    ratio,
    significant,
    table,
)
from harness.results.schema import CaseDone, Cell, Record, Verdict
from harness.statistics.paired import noise_floor
from shapes.case import Case

HEADERS = ("implementation", "status", "boundary", "time", "interval", "host", "vs baseline", "verdict",
           "TFLOPS", "GB/s", "% of limit", "note")  # fmt: skip
STOPPED = {
    "tight": "all intervals were tight",
    "clear": "all verdicts were clear",
    "budget": "the budget was spent",
    "complete": "all rounds were made",
    "disturbed": "most rounds had been disturbed",
    "no contenders": "nobody was left",
}
NAMED = 8  # of the cases that the budget did not reach
NUMERIC = ("time", "host", "TFLOPS", "GB/s", "% of limit")


def case_table(records: Sequence[Record]) -> str:
    """The table of one finished case, fastest first, with its noise floor and its winner."""
    cells = [r for r in records if isinstance(r, Cell)]
    verdicts = [r for r in records if isinstance(r, Verdict)]
    done = next(r for r in records if isinstance(r, CaseDone))
    against = {v.a: v for v in verdicts if v.about == "baseline"}
    anchor = next((v.b for v in verdicts if v.about == "A/A"), "")
    order = sorted(cells, key=lambda cell: (cell.time_us is None, cell.time_us or 0, cell.name))
    able = [cell for cell in order if cell.status != "unsupported"]
    rows = [_row(cell, against.get(cell.name), cell.name == anchor) for cell in able]
    ranking = [table(*filled_columns(rows, HEADERS), right=NUMERIC)] if rows else []
    lines = [heading(cells[0]), *ranking, *unsupported(cells)]
    return "\n".join([*lines, *_conclusions(cells, verdicts, done, order[0].name)])


def heading(cell: Cell) -> str:
    """The cell's case, and what share of the suite it is."""
    place = f"{cell.place}, {cell.weight:.1%} of the suite" if cell.place != "ad hoc" else cell.place
    return f"{cell.case}  ({place})"


def unsupported(cells: Iterable[Cell]) -> Iterator[str]:
    """Each reason once, with those that it keeps away."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.status == "unsupported":
            reasons.setdefault(cell.reason, []).append(cell.name)
    for reason, names in reasons.items():
        yield textwrap.fill(f"unsupported, {reason}: {', '.join(names)}", WIDTH, subsequent_indent="  ")


def _row(cell: Cell, verdict: Verdict | None, is_anchor: bool) -> list[str]:
    percent = f"{cell.percent_of_ceiling:.0f}" if cell.percent_of_ceiling is not None else ""
    return [
        cell.name,
        cell.status,
        cell.boundary,
        microseconds(cell.time_us),
        microsecond_interval(cell.low_us, cell.high_us),
        microseconds(cell.host_us),
        verdict_ratio(verdict) if verdict else "baseline" if is_anchor else "",
        verdict.verdict if verdict else "",
        significant(cell.tflops),
        significant(cell.gbps),
        percent,
        cell.reason,
    ]


def verdict_ratio(verdict: Verdict) -> str:
    return ratio(verdict.ratio, verdict.low, verdict.high)


def _conclusions(
    cells: Sequence[Cell], verdicts: Sequence[Verdict], done: CaseDone, fastest: str
) -> list[str]:
    """What the verdicts come to. Contenders that memory splits into groups have an A/A pair and a runner-up
    in each; the runner-up that counts is that of whoever is fastest of all."""
    lines = []
    groups = sum(v.about == "A/A" for v in verdicts)
    if groups > 1:
        lines.append(f"measured in {groups} groups: memory does not hold all at once")
    for v in verdicts:
        if v.about == "A/A":
            lines.append(f"noise floor: {v.b} against itself, prepared apart, gave {verdict_ratio(v)}")
            if noise_floor(v.comparison) == math.inf:
                lines.append("  too much for a verdict: this machine was disturbed, or the budget too short")
        if v.about == "runner-up" and v.a == fastest:
            lines.append(f"fastest: {v.a}, {v.verdict} against the runner-up {v.b}: {verdict_ratio(v)}")
    if why := cells[0].rotation.get("why"):
        lines.append(f"calls may read caches: {why}")
    if done.disturbed:
        lines.append(_disturbed(done))
    confidence = f"all verdicts together {verdicts[0].confidence:.0%} sure; " if verdicts else ""
    return [*lines, f"{confidence}{measuring_line(done)}"]


def measuring_line(done: CaseDone) -> str:
    """How much was measured, and why no more."""
    after = f" after {done.heats} of heats" if done.heats else ""
    timed = f"{done.rounds} rounds in {done.blocks} blocks{after}, {done.measured_s:.1f} s of measuring"
    why = " and ".join(STOPPED.get(word, word) for word in filter(None, done.stopped.split(", ")))
    until = f", until {why}" if why else ""
    return f"{timed}{until}; set-up and checks {done.setup_s:.1f} s"


def _disturbed(done: CaseDone) -> str:
    """How many rounds were, what was done with them, and the first that says what it was."""
    dropped = sum(not r.counted for r in done.disturbed)
    made = done.rounds + done.heats + dropped
    fate = "left out and made again" if dropped else "counted all the same"
    return f"{len(done.disturbed)} of {made} rounds were disturbed, {fate}; e.g. {done.disturbed[0].reason}"


def published(figures: Iterable[PublishedFigure], case: Case) -> str:
    """What others published of a case, a table of its own; empty if nothing."""
    rows = [
        [
            f.implementation,
            f.device,
            microseconds(f.time_us),
            significant(f.tflops or None),
            f"{f.source}; {f.method}",
        ]
        for f in figures
        if f.of(case.op, case.sizes)
    ]
    if not rows:
        return ""
    headers = ["implementation", "device", "time", "TFLOPS", "source; how it was timed"]
    return f"published by others, neither measured here nor ranked:\n{table(rows, headers)}"


def left_out(cases: Iterable[Case], budget_s: float) -> str:
    """Names what the budget did not reach; empty if nothing."""
    cases = list(cases)
    if not cases:
        return ""
    title = f"left out, the budget of {budget_s:g} s being spent (more with --budget, or less --per-case):"
    rows = [f"  {case.text} {case.boundary}  ({case.weight:.1%})" for case in cases[:NAMED]]
    if rest := cases[NAMED:]:
        rows.append(f"  and {len(rest)} more  ({sum(case.weight for case in rest):.1%})")
    return "\n".join([title, *rows])
