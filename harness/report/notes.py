"""Notes under the table of a case: why rows have no time, how to check a wrong row, what to know of the
times, where the time went; and the notes at the end of a run."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.report.text import ratio_text
from harness.results.comparison import DeviceRatio, Spread
from harness.results.schema import CaseDone, Cell, Run, Verdict
from harness.statistics.paired import MAX_NOISE, noise_of
from shapes.case import Case, text_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.rows import CaseResult

STOPPED = {
    "tight": "all intervals were tight",
    "clear": "all verdicts were clear",
    "budget": "the budget was spent",
    "complete": "all rounds were made",
    "disturbed": "most rounds had been disturbed",
    "no entries": "no entry was left",
}
UNTIMED = {
    **dict.fromkeys(("wrong", "impossible", "crashed", "timeout", "error"), "bold red"),
    "checked": "cyan",
    "unsupported": "dim",
}
"""Statuses without a time, the worst first, with their styles."""
WRONG_FOLDER = "wrong"
"""The folder in which the printed command saves the output of a wrong row."""
OTHER_CASE = re.compile(r"at ((?:\S+=\S+ ?)+): ")
"""Begins the reason where the case that showed the error is another one: see CaseRun.ragged."""
FAR = "with addresses of more than 32 bits: "
"""Part of the reason where the cache stood at far addresses (see CaseRun)."""
HELP = {
    "hypervisor": "use a host without other guests",
    "quota": "raise the CPU quota or give fewer --threads",
    "heat": "let it cool",
    "MHz": "fix its clock",
    "process": "stop what runs beside",
}
"""What to do against a disturbance, by a word of a monitor's reason."""
PROCESSES = 2
"""The number of processes that are named, those with the most CPU time first."""
NUMBER = re.compile(r"\d+(\.\d+)?")

Notes = list[tuple[str, str]]
"""Each a label and a text; a label that several notes have in a row is printed once."""


def noted(notes: Notes) -> RenderableType:
    """Labels in one column, and their texts in the next, broken into lines."""
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


def case_notes(case: CaseResult, run: Run | None) -> Notes:
    """All notes of a case whose implementations are compared; with commands that check the wrong rows where
    the run is known."""
    return [
        *untimed(case.cells),
        *(reproductions(case.cells, run) if run else ()),
        *_remarks(case.timed),
        *_conclusions(case),
        *measuring(case.done, case.verdicts),
    ]


def untimed(cells: Iterable[Cell]) -> Notes:
    """Rows without a time, failures first: each reason once, with the rows that it holds for."""
    names: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.status != "ok":
            # The heading says already which machine this is.
            reason, _, _ = cell.reason.partition("; this is ")
            names.setdefault((cell.status, reason), []).append(cell.name)
    order = sorted(names, key=lambda key: list(UNTIMED).index(key[0]))
    return [(status, _without_time(status, reason, names[status, reason])) for status, reason in order]


def _without_time(status: str, reason: str, names: Sequence[str]) -> str:
    if status == "unsupported":
        count = f" ({len(names)})" if len(names) > 1 else ""
        return f"{reason}{count}: {', '.join(names)}"
    return ": ".join(filter(None, [", ".join(names), reason]))


def reproductions(cells: Iterable[Cell], run: Run) -> Notes:
    """A command for each wrong row that checks it alone and saves its output beside the reference. Rows of
    another source tree have none, nor rows that are wrong at far addresses only: `check` cannot run these."""
    return [
        ("reproduce", _command(cell, run))
        for cell in cells
        if cell.status == "wrong" and cell.setting not in run.trees and FAR not in cell.reason
    ]


def _command(cell: Cell, run: Run) -> str:
    """The command, without the options that a run has by default."""
    variables = run.settings.get(cell.setting, {})
    text = cell.case.removeprefix(f"{cell.op} ").removesuffix(f" {cell.boundary}")
    if other_case := OTHER_CASE.match(cell.reason):
        text = other_case[1]
    words = [f"--op {cell.op} --impl {shlex.quote(cell.impl)} --case {_quoted(text)}"]
    if cell.boundary != "core":
        words.append(f"--boundary {cell.boundary}")
    if cell.cache != "serving":
        words.append(f"--cache {cell.cache}")
    if cell.platform == "cpu":
        words.append("--device cpu")
    elif cell.launch == "eager":
        words.append("--launch eager")
    for name, value in variables.items():
        if value is not None:
            words.append(f"--set {shlex.quote(f'{name}={value}')}")
    if cell.config:
        words.append(f"--config {_quoted(text_of(cell.config))}")
    if run.seed:
        words.append(f"--seed {run.seed}")
    if "--threads" in run.command:
        words.append(f"--threads {run.threads}")
    unset = [f"-u {name}" for name, value in variables.items() if value is None]
    before = f"env {' '.join(unset)} " if unset else ""
    return f"{before}python -m harness check {' '.join(words)} --save {WRONG_FOLDER}"


def _quoted(text: str) -> str:
    """In double quotes, as the documents have it, unless the shell would change what is between them."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _remarks(timed: Sequence[Cell]) -> Notes:
    """Remarks on times, each once with the rows that it holds for."""
    names: dict[str, list[str]] = {}
    for cell in timed:
        for remark in filter(None, cell.reason.split("; ")):
            names.setdefault(remark, []).append(cell.name)
    notes = []
    for remark, rows in names.items():
        whose = "all rows" if len(rows) == len(timed) > 1 else ", ".join(rows)
        notes.append(("note", f"{whose}: {remark}"))
    return notes


def _conclusions(case: CaseResult) -> Notes:
    """The noise, what calls may read from caches, and disturbed rounds."""
    pairs = [v for v in case.verdicts if v.about == "A/A"]
    notes: Notes = []
    if len(pairs) > 1:
        notes.append(("groups", f"measured in {len(pairs)}: memory does not hold all at once"))
    for pair in pairs:
        notes.append(("noise", f"{pair.b} against itself, prepared apart: {ratio_text(pair)}"))
        noise = noise_of(pair.comparison)
        if noise > MAX_NOISE:
            what = "no verdict"
            if noise < math.inf:
                what = f"none on what differs by less than {1 + noise:.2g}x"
            notes.append(("noise", f"{what}: this machine was disturbed, or the budget too short"))
    if why := case.cells[0].rotation.get("why"):
        notes.append(("cache", f"calls may read caches: {why}"))
    if case.done.disturbed:
        notes.append(("disturbed", _disturbed(case.done)))
    return notes


def _disturbed(done: CaseDone) -> str:
    """How many rounds were disturbed, what was done with them, and the reason of the first."""
    dropped = sum(not r.counted for r in done.disturbed)
    made = done.rounds + done.eliminations + dropped
    fate = "left out and made again" if dropped else "counted all the same"
    return f"{len(done.disturbed)} of {made} rounds, {fate}; e.g. {done.disturbed[0].reason}"


def measuring(done: CaseDone, verdicts: Sequence[Verdict] = ()) -> Notes:
    """How much was measured, why measuring stopped, on which device, and where the time went."""
    after = f" after {done.eliminations} of eliminations" if done.eliminations else ""
    why = " and ".join(STOPPED.get(word, word) for word in filter(None, done.stopped.split(", ")))
    until = f", until {why}" if why else ""
    rounds = f"{done.rounds} rounds in {done.blocks} blocks{after}{until}"
    sure = f"; all verdicts together {100 * verdicts[0].confidence:.0f} % sure" if verdicts else ""
    where = [("device", done.device)] if done.device else []
    spent = time_spent(done.measured_s, done.setup_s, done.phases)
    return [("measured", f"{rounds}{sure}"), *where, ("time", spent)]


def time_spent(measured_s: float, setup_s: float, phases: Mapping[str, float]) -> str:
    """The share of the time that was measuring, and what the rest was spent on, the longest first.

    phases: seconds of the parts of set-up by name; empty where they are not known
    """
    whole = measured_s + setup_s
    known = phases or {"set-up and checks": setup_s}
    longest = sorted(known.items(), key=lambda phase: -phase[1])
    rest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest if seconds >= 0.05)
    share = f" ({100 * measured_s / whole:.0f} %)" if whole else ""
    return "; ".join(filter(None, [f"measuring {measured_s:.1f} s of {whole:.1f} s{share}", rest]))


# The end of a run


def left_out(cases: Iterable[Case], measured: Iterable[Cell], budget_s: float) -> str:
    """How many cases the budget did not reach, and their share of each boundary's weight; empty if none."""
    missing: dict[str, list[Case]] = {}
    for case in cases:
        missing.setdefault(case.boundary, []).append(case)
    weights: dict[str, dict[str, float]] = {}
    for cell in measured:
        weights.setdefault(cell.boundary, {})[cell.case] = cell.weight
    shares = []
    for boundary, of_boundary in missing.items():
        weight = sum(case.weight for case in of_boundary)
        whole = weight + sum(weights.get(boundary, {}).values())
        share = f" ({100 * weight / whole:.0f} % of its weight)" if whole else ""
        shares.append(f"{counted(len(of_boundary))} of {boundary}{share}")
    return f"left out, the budget of {budget_s:g} s being spent: {', '.join(shares)}" if missing else ""


def counted(cases: int) -> str:
    """`1 case`, `2 cases`"""
    return f"{cases} case" if cases == 1 else f"{cases} cases"


def disturbance(cases: Iterable[CaseDone]) -> str:
    """What used the machine during rounds that count, and what would help; empty if nothing did."""
    disturbed = [case for case in cases if any(r.counted for r in case.disturbed)]
    if not disturbed:
        return ""
    reasons = [r.reason for case in disturbed for r in case.disturbed if r.counted]
    rounds = sum(case.rounds + case.eliminations for case in disturbed)
    # Reasons of a kind are equal except for their numbers.
    kinds = Counter(NUMBER.sub("#", reason) for reason in reasons)
    kind = kinds.most_common(1)[0][0]
    typical = sorted(reason for reason in reasons if NUMBER.sub("#", reason) == kind)
    what = typical[len(typical) // 2]
    help = [*(advice for word, advice in HELP.items() if word in kind), "give a longer --budget"]
    return (
        f"not quiet: {len(reasons)} of {rounds} rounds count though something else used the machine, or "
        f"slowed it ({what}{_processes(disturbed)}). For narrower intervals, {', or '.join(help)}"
    )


def _processes(cases: Iterable[CaseDone]) -> str:
    """The processes that took the most CPU time."""
    percents: dict[str, float] = {}
    for case in cases:
        for conditions in case.conditions:
            for process, percent in conditions.get("processes", {}).items():
                percents[process] = max(percent, percents.get(process, 0.0))
    names = sorted(percents, key=percents.__getitem__, reverse=True)[:PROCESSES]
    return f", most of it {', '.join(names)}" if names else ""


def spread_lines(spreads: Iterable[Spread]) -> list[str]:
    """A line for each type of device, and one for each device that lags or drifted."""
    return [line for spread in spreads for line in _spread_lines(spread)]


def _spread_lines(spread: Spread) -> Iterator[str]:
    yield f"{len(spread.devices)} devices of type {spread.type} {apart(spread)}"
    for worst in _worst(spread.lagging):
        yield f"{worst.device} lags: {ratio_text(worst.comparison)} the median device's time of {worst.case}"
    for worst in _worst(spread.drifted):
        times = ratio_text(worst.comparison)
        yield f"{worst.device} drifted: {times} its first time of {worst.case} at the end"


def apart(spread: Spread) -> str:
    """What is known of how far the devices lie apart, as a predicate."""
    if spread.verdict == "apart":
        return f"lie apart: the slowest takes {ratio_text(spread.widest)} the time of the fastest"
    if spread.verdict == "alike":
        return f"are alike within {spread.most:.1%}"
    return f"were measured too noisily to tell apart: they may differ by up to {spread.most:.1%}"


def _worst(ratios: Sequence[DeviceRatio]) -> list[DeviceRatio]:
    """For each device the case in which it is furthest off."""
    worst: dict[str, DeviceRatio] = {}
    for ratio in sorted(ratios, key=lambda r: max(r.comparison.ratio, 1 / r.comparison.ratio)):
        worst[ratio.device] = ratio
    return list(worst.values())
