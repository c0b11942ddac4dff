"""What a person reads: a table per case, and what the run left undone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from harness.catalogue.published import PublishedFigure
from harness.report.text import interval_of, micro, ratio_of, unsupported
from harness.results.schema import CaseDone, Cell, Record, Verdict
from harness.statistics.paired import noise_floor
from shapes.case import Case

HEADERS = ("implementation", "status", "boundary", "time", "interval", "host", "vs baseline", "verdict",
           "TFLOPS", "GB/s", "% of limit", "note")  # fmt: skip
ENDED = {
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
    first = cells[0]
    place = f"{first.place}, {first.weight:.1%} of the suite" if first.place != "ad hoc" else first.place
    lines = [f"{first.case}  ({place})", *([_case_rows(rows)] if rows else []), *unsupported(cells)]
    return "\n".join([*lines, *_conclusions(cells, verdicts, done, order[0].name)])


def _case_rows(rows: Sequence[Sequence[str]]) -> str:
    """Without the columns that nobody has anything in."""
    used = [i for i in range(len(HEADERS)) if any(row[i] for row in rows)]
    return tabulate(
        [[row[i] for i in used] for row in rows],
        [HEADERS[i] for i in used],
        disable_numparse=True,
        colalign=["right" if HEADERS[i] in NUMERIC else "left" for i in used],
    )


def _row(cell: Cell, verdict: Verdict | None, is_anchor: bool) -> list[str]:
    ratio = ratio_of(verdict) if verdict else "baseline" if is_anchor else ""
    percent = f"{cell.percent_of_ceiling:.0f}" if cell.percent_of_ceiling is not None else ""
    return [
        cell.name,
        cell.status,
        cell.boundary,
        micro(cell.time_us),
        interval_of(cell),
        micro(cell.host_us),
        ratio,
        verdict.verdict if verdict else "",
        f"{cell.tflops:.3g}" if cell.tflops is not None else "",
        f"{cell.gbps:.3g}" if cell.gbps is not None else "",
        percent,
        cell.reason,
    ]


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
            lines.append(f"noise floor: {v.b} against itself, prepared apart, gave {ratio_of(v)}")
            if noise_floor(v.comparison) == math.inf:
                lines.append("  too much for a verdict: this machine was disturbed, or the budget too short")
        if v.about == "runner-up" and v.a == fastest:
            lines.append(f"fastest: {v.a}, {v.verdict} against the runner-up {v.b}: {ratio_of(v)}")
    if why := cells[0].rotation.get("why"):
        lines.append(f"calls may read caches: {why}")
    if done.disturbed:
        lines.append(_disturbed(done))
    confidence = f"all verdicts together {verdicts[0].confidence:.0%} sure; " if verdicts else ""
    return [*lines, f"{confidence}{ended(done)}"]


def ended(done: CaseDone) -> str:
    """How much was measured, and why no more."""
    after = f" after {done.heats} of heats" if done.heats else ""
    timed = f"{done.rounds} rounds in {done.blocks} blocks{after}, {done.measured_s:.1f} s of measuring"
    why = " and ".join(ENDED.get(word, word) for word in filter(None, done.stopped.split(", ")))
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
            micro(f.time_us),
            f"{f.tflops:.3g}" if f.tflops else "",
            f"{f.source}; {f.method}",
        ]
        for f in figures
        if f.of(case.op, case.sizes)
    ]
    if not rows:
        return ""
    table = tabulate(rows, ["implementation", "device", "time", "TFLOPS", "source; how it was timed"],
                     disable_numparse=True)  # fmt: skip
    return f"published by others, neither measured here nor ranked:\n{table}"


def left_out(cases: Iterable[Case], budget_s: float) -> str:
    """Names what the budget did not reach; empty if nothing."""
    cases = list(cases)
    if not cases:
        return ""
    heading = f"left out, the budget of {budget_s:g} s being spent (more with --budget, or less --per-case):"
    rows = [f"  {case.text} {case.boundary}  ({case.weight:.1%})" for case in cases[:NAMED]]
    if rest := cases[NAMED:]:
        rows.append(f"  and {len(rest)} more  ({sum(case.weight for case in rest):.1%})")
    return "\n".join([heading, *rows])
