"""Notes under the table of a case: why rows have no time, how to check a wrong row, what to know of the
times, where the time went; and the notes at the end of a run."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.paths import command
from harness.report.rows import CaseResult
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import counted, grouped, ratio_text
from harness.results.comparison import DeviceRatio, Spread
from harness.results.schema import CaseDone, Cell, Run, Verdict
from harness.statistics.paired import MAX_NOISE, noise_of
from kernels.engines import SPELLED
from shapes.case import Case, text_of

REPRODUCE = "reproduce"  # the label of a command, which stands below all other notes on a line of its own
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
OTHER_CASE = re.compile(r"at ((?:\S+=\S+ ?)+): ")
"""Begins the reason where the case that showed the error is another one: see CaseRun.ragged."""
FAR = "with addresses of more than 32 bits: "
"""Part of the reason where the cache stood at far addresses (see CaseRun)."""
HELP = {
    "hypervisor": "use a host without other guests",
    "quota": "raise the CPU quota or give fewer --threads",
    **dict.fromkeys(("heat", "thermal"), "let it cool"),
    "MHz": "fix its clock",
    "process": "stop what runs beside",
}
"""What to do against a disturbance, by a word of a monitor's reason."""
DISTURBING = ("clocks", "clock reasons", "GPU metrics", "processes", "others_percent")
"""What monitors take a disturbance from, by its name in `not_read`."""
NUMBER = re.compile(r"\d+(\.\d+)?")

Notes = list[tuple[str, str]]
"""Each a label and a text; a label that several notes have in a row is printed once."""


def noted(notes: Notes) -> RenderableType:
    """Labels in one column, and their texts in the next, broken into lines."""
    commands = [text for label, text in notes if label == REPRODUCE]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    above = ""
    for label, text in (note for note in notes if note[0] != REPRODUCE):
        grid.add_row(Text("" if label == above else label, UNTIMED.get(label, "dim")), Text(text))
        above = label
    if not commands:
        return grid
    return Group(grid, f"{REPRODUCE}:", *(whole_line(COMMAND + text) for text in commands))


def case_notes(case: CaseResult, run: Run | None) -> Notes:
    """All notes of a case whose rows are compared; with the run, commands that check wrong rows, too."""
    return [
        *untimed(case.cells),
        *(_selected(run) if run else ()),
        *_absent_defaults(case),
        *(reproductions(case.cells, run) if run else ()),
        *_remarks(case.timed),
        *_conclusions(case),
        *measuring(case.done, case.verdicts),
    ]


def untimed(cells: Iterable[Cell]) -> Notes:
    """Rows without a time, failures first: each reason once, with the rows that it holds for."""
    # The heading says already which machine this is.
    failed = [cell for cell in cells if cell.status != "ok"]
    groups = grouped(failed, lambda cell: (cell.status, cell.reason.partition("; this is ")[0]))
    notes: Notes = []
    for (status, reason), group in sorted(groups.items(), key=lambda of: list(UNTIMED).index(of[0][0])):
        names = ", ".join(cell.name for cell in group)
        if status == "unsupported":
            count = f" ({len(group)})" if len(group) > 1 else ""
            notes.append((status, f"{reason}{count}: {names}"))
        else:
            notes.append((status, f"{names}: {reason}" if reason else names))
    return notes


def _absent_defaults(case: CaseResult) -> Notes:
    """What engines run by default in this case, where that has no time."""
    timed, rows = {cell.impl for cell in case.timed}, {cell.impl for cell in case.cells}
    said = []
    for engine, row in case.defaults.items():
        if row not in timed:
            why = "has no time" if row in rows else "was not asked for"
            said.append(f"{SPELLED[engine]} runs {row}, which {why}")
    return [("default", "; ".join(said))] if said else []


def _selected(run: Run) -> Notes:
    """The patterns by which rows were chosen, where not all were measured."""
    for option, value in itertools.pairwise([*run.command, ""]):
        if option.startswith("--impl"):
            return [("rows", f"those of --impl {option.partition('=')[2] or value} alone")]
    return []


def reproductions(cells: Iterable[Cell], run: Run) -> Notes:
    """A command for each wrong row that checks it alone and saves its output beside the reference. Rows of
    another source tree have none, nor rows that are wrong at far addresses only: `check` cannot run these."""
    return [
        (REPRODUCE, _command(cell, run))
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
    return f"{before}{command('check')} {' '.join(words)} --save wrong"


def _quoted(text: str) -> str:
    """In double quotes, as the documents have it, unless the shell would change what is between them."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _remarks(timed: Sequence[Cell]) -> Notes:
    """Remarks on times, each once with the rows that it holds for."""
    remarks = [(remark, cell.name) for cell in timed for remark in cell.reason.split("; ") if remark]
    notes = []
    for remark, pairs in grouped(remarks, lambda pair: pair[0]).items():
        everywhere = len(pairs) == len(timed) > 1
        names = "all rows" if everywhere else ", ".join(name for _, name in pairs)
        notes.append(("note", f"{names}: {remark}"))
    if amx := [c.name for c in timed if c.impl.startswith("vllm.amx") and c.arch == "x86-avx512"]:
        notes.append(("note", f"{', '.join(amx)}: this CPU has no AMX tiles, so it computes with AVX-512"))
    return notes


def _conclusions(case: CaseResult) -> Notes:
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
    if disturbed := case.done.disturbed:
        dropped = sum(not r.counted for r in disturbed)
        made = case.done.rounds + case.done.eliminations + dropped
        fate = "left out and made again" if dropped else "counted all the same"
        what = f"{len(disturbed)} of {made} rounds, {fate}; e.g. {disturbed[0].reason}"
        notes.append(("disturbed", what))
    not_read = {name: why for each in case.done.conditions for name, why in each.get("not_read", {}).items()}
    if unseen := [name for name in DISTURBING if name in not_read]:
        text = f"what these would tell of disturbances: {', '.join(unseen)} ({not_read[unseen[0]]})"
        notes.append(("not seen", text))
    return notes


def measuring(done: CaseDone, verdicts: Sequence[Verdict] = ()) -> Notes:
    """How much was measured, why measuring stopped, on which device, and how long it took."""
    after = f" after {counted(done.eliminations, 'elimination round')}" if done.eliminations else ""
    why = " and ".join(STOPPED.get(word, word) for word in filter(None, done.stopped.split(", ")))
    until = f", until {why}" if why else ""
    rounds = f"{counted(done.rounds, 'round')} in {counted(done.blocks, 'block')}{after}{until}"
    sure = f"; all verdicts together {100 * verdicts[0].confidence:.0f} % sure" if verdicts else ""
    where = [("device", done.device)] if done.device else []
    spent = time_spent(done.measured_s, done.setup_s)
    return [("measured", f"{rounds}{sure}"), *where, ("time", spent)]


def time_spent(measured_s: float, setup_s: float) -> str:
    """The share of the time that was measuring; records have the parts of the rest."""
    whole = measured_s + setup_s
    share = f" ({100 * measured_s / whole:.0f} %)" if whole else ""
    return f"measuring {measured_s:.1f} s of {whole:.1f} s{share}"


# The end of a run


def left_out(cases: Iterable[Case], measured: Iterable[Cell], budget_s: float) -> str:
    """How many cases the budget did not reach, and their share of each boundary's weight; empty if none."""
    weights = {cell.case: (cell.boundary, cell.weight) for cell in measured}
    shares = []
    for boundary, missing in grouped(cases, lambda case: case.boundary).items():
        weight = sum(case.weight for case in missing)
        whole = weight + sum(of_case for of, of_case in weights.values() if of == boundary)
        share = f" ({100 * weight / whole:.0f} % of its weight)" if whole else ""
        shares.append(f"{counted(len(missing))} of {boundary}{share}")
    return f"left out, the budget of {budget_s:g} s being spent: {', '.join(shares)}" if shares else ""


def disturbance(cases: Iterable[CaseDone]) -> str:
    """What used the machine during rounds that count, and what would help; empty if nothing did."""
    disturbed = [case for case in cases if any(r.counted for r in case.disturbed)]
    if not disturbed:
        return ""
    reasons = [r.reason for case in disturbed for r in case.disturbed if r.counted]
    rounds = sum(case.rounds + case.eliminations for case in disturbed)
    # Reasons of a kind are equal except for their numbers.
    kinds = grouped(sorted(reasons), lambda reason: NUMBER.sub("#", reason))
    kind, typical = max(kinds.items(), key=lambda of: len(of[1]))
    what = typical[len(typical) // 2]
    percents = Counter[str]()
    for case in disturbed:
        for conditions in case.conditions:
            percents |= Counter(conditions.get("processes", {}))  # the larger of both
    if percents:  # the two with the most CPU time are named
        what += f", most of it {', '.join(name for name, _ in percents.most_common(2))}"
    help = [*(advice for word, advice in HELP.items() if word in kind), "give a longer --budget"]
    return f"not quiet: {len(reasons)} of {rounds} rounds were disturbed ({what}): {', or '.join(help)}"


def spread_lines(spreads: Iterable[Spread]) -> list[str]:
    """A line for each type of device, and one for each device that lags or drifted."""
    lines = []
    for spread in spreads:
        lines.append(f"{len(spread.devices)} devices of type {spread.type} {apart(spread)}")
        for at in _worst(spread.lagging):
            times = ratio_text(at.comparison)
            lines.append(f"{at.device} lags: {times} the median device's time of {at.case}")
        for at in _worst(spread.drifted):
            times = ratio_text(at.comparison)
            lines.append(f"{at.device} drifted: {times} its first time of {at.case} at the end")
    return lines


def apart(spread: Spread) -> str:
    """What is known of how far the devices lie apart, as a predicate."""
    if spread.verdict == "apart":
        return f"lie apart: the slowest takes {ratio_text(spread.widest)} the time of the fastest"
    if spread.verdict == "alike":
        return f"are alike within {spread.max_difference:.1%}"
    return f"are indistinguishable at this noise: they may differ by up to {spread.max_difference:.1%}"


def _worst(ratios: Sequence[DeviceRatio]) -> Iterable[DeviceRatio]:
    """For each device the case in which it is furthest off."""
    by_size = sorted(ratios, key=lambda r: max(r.comparison.ratio, 1 / r.comparison.ratio))
    return {ratio.device: ratio for ratio in by_size}.values()
