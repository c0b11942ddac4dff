"""The notes under the table of a case: who has no time and why, what there is to know of the times, where
the time went; and what the budget left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.report.text import uncertain_ratio
from harness.results.schema import CaseDone, Cell, Verdict
from harness.statistics.paired import MAX_NOISE, noise_of
from shapes.case import Case

if TYPE_CHECKING:
    from rich.console import RenderableType

STOPPED = {
    "tight": "all intervals were tight",
    "clear": "all verdicts were clear",
    "budget": "the budget was spent",
    "complete": "all rounds were made",
    "disturbed": "most rounds had been disturbed",
    "no entries": "nobody was left",
}
UNTIMED = {
    **dict.fromkeys(("wrong", "impossible", "crashed", "timeout", "error"), "bold red"),
    "checked": "cyan",
    "unsupported": "dim",
}
"""Statuses without a time, the worst first, with their styles."""

Notes = list[tuple[str, str]]
"""Labels, and what stands beside them; a label that several have in a row is printed once."""


def noted(notes: Notes) -> RenderableType:
    """Labels in one column, each once, and in the next their texts, broken into lines."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    above = ""
    for label, text in notes:
        grid.add_row(Text("" if label == above else label, UNTIMED.get(label, "dim")), Text(text))
        above = label
    return grid


def untimed(cells: Iterable[Cell]) -> Notes:
    """Who has no time, failures first: each reason once, with those that it keeps away."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.status != "ok":
            # Which machine this is stands above already.
            reason, _, _ = cell.reason.partition("; this is ")
            reasons.setdefault((cell.status, reason), []).append(cell.name)
    order = sorted(reasons, key=lambda key: list(UNTIMED).index(key[0]))
    return [(status, _said_of(status, reason, reasons[status, reason])) for status, reason in order]


def _said_of(status: str, reason: str, names: Sequence[str]) -> str:
    if status == "unsupported":
        return f"{reason}{f' ({len(names)})' if len(names) > 1 else ''}: {', '.join(names)}"
    return ": ".join(filter(None, [", ".join(names), reason]))


def remarks(timed: Sequence[Cell]) -> Notes:
    """What there is to know of times."""
    said: dict[str, list[str]] = {}
    for cell in timed:
        for remark in filter(None, cell.reason.split("; ")):
            said.setdefault(remark, []).append(cell.name)
    everyone = len(timed) if len(timed) > 1 else 0
    return [
        ("note", f"{'all rows' if len(names) == everyone else ', '.join(names)}: {remark}")
        for remark, names in said.items()
    ]


def conclusions(cells: Sequence[Cell], verdicts: Iterable[Verdict], done: CaseDone) -> Notes:
    """What stands beside the times. Of entries that memory splits into groups each has an A/A pair."""
    pairs = [v for v in verdicts if v.about == "A/A"]
    notes: Notes = []
    if len(pairs) > 1:
        notes.append(("groups", f"measured in {len(pairs)}: memory does not hold all at once"))
    for pair in pairs:
        notes.append(("noise", f"{pair.b} against itself, prepared apart: {verdict_ratio(pair)}"))
        if (noise := noise_of(pair.comparison)) > MAX_NOISE:
            what = (
                "no verdict" if noise == math.inf else f"none on what differs by less than {1 + noise:.2g}x"
            )
            notes.append(("noise", f"{what}: this machine was disturbed, or the budget too short"))
    if why := cells[0].rotation.get("why"):
        notes.append(("cache", f"calls may read caches: {why}"))
    if done.disturbed:
        notes.append(("disturbed", _disturbed(done)))
    return notes


def verdict_ratio(verdict: Verdict) -> str:
    return " ".join(uncertain_ratio(verdict.ratio, verdict.low, verdict.high)).rstrip()


def measuring(done: CaseDone, verdicts: Sequence[Verdict] = ()) -> Notes:
    """How much was measured, why no more, on which device, and where the time went."""
    after = f" after {done.eliminations} of eliminations" if done.eliminations else ""
    why = " and ".join(STOPPED.get(word, word) for word in filter(None, done.stopped.split(", ")))
    rounds = f"{done.rounds} rounds in {done.blocks} blocks{after}{f', until {why}' if why else ''}"
    sure = f"; all verdicts together {100 * verdicts[0].confidence:.0f} % sure" if verdicts else ""
    spent = time_spent(done.measured_s, done.setup_s, done.phases)
    where = [("device", done.device)] if done.device else []
    return [("measured", f"{rounds}{sure}"), *where, ("time", spent)]


def time_spent(measured_s: float, setup_s: float, phases: Mapping[str, float]) -> str:
    """What part of the time was measuring, and what the rest went into, the longest first.

    phases: seconds of the set-up's parts by name; none where they are not known
    """
    whole = measured_s + setup_s
    longest = (
        sorted(phases.items(), key=lambda phase: -phase[1]) if phases else [("set-up and checks", setup_s)]
    )
    rest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest if seconds >= 0.05)
    share = f" ({100 * measured_s / whole:.0f} %)" if whole else ""
    return "; ".join(filter(None, [f"measuring {measured_s:.1f} s of {whole:.1f} s{share}", rest]))


def _disturbed(done: CaseDone) -> str:
    """How many rounds were, what was done with them, and the first that says what it was."""
    dropped = sum(not r.counted for r in done.disturbed)
    made = done.rounds + done.eliminations + dropped
    fate = "left out and made again" if dropped else "counted all the same"
    return f"{len(done.disturbed)} of {made} rounds, {fate}; e.g. {done.disturbed[0].reason}"


def left_out(cases: Iterable[Case], measured: Iterable[Cell], budget_s: float) -> str:
    """What the budget did not reach, and how much of each boundary's weight that is; empty if nothing."""
    missing: dict[str, list[Case]] = {}
    for case in cases:
        missing.setdefault(case.boundary, []).append(case)
    weights: dict[str, dict[str, float]] = {}
    for cell in measured:
        weights.setdefault(cell.boundary, {})[cell.case] = cell.weight
    shares = []
    for boundary, of_it in missing.items():
        weight = sum(case.weight for case in of_it)
        whole = weight + sum(weights.get(boundary, {}).values())
        share = f" ({100 * weight / whole:.0f} % of its weight)" if whole else ""
        shares.append(f"{counted(len(of_it))} of {boundary}{share}")
    return f"left out, the budget of {budget_s:g} s being spent: {', '.join(shares)}" if missing else ""


def counted(cases: int) -> str:
    return f"{cases} case" + "s" * (cases != 1)
