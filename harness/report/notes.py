"""Notes under the table of a case, such as why rows have no time; and the notes at the end of a run."""

from __future__ import annotations

import itertools
import math
import re
import shlex
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

REPRODUCE = "reproduce"
"""The label of a command. Commands stand below all other notes, each on a line of its own."""
STOPPED = {  # why measuring ended, as records have it -> the same in words
    "tight": "all intervals were tight", "clear": "all verdicts were clear",
    "budget": "the budget was spent", "complete": "all rounds were made",
    "disturbed": "most rounds had been disturbed", "no entries": "no entry was left",
}  # fmt: skip
UNTIMED = {
    **dict.fromkeys(("wrong", "impossible", "crashed", "timeout", "error"), "bold red"),
    "checked": "cyan",
    "unsupported": "dim",
}
"""Statuses without a time, the worst first, with their styles."""
OTHER_CASE = re.compile(r"at ((?:\S+=\S+ ?)+): ")
"""The sizes with which the reason of a row begins that was wrong only at ragged sizes, see CaseMeasurer."""
FAR = "with addresses of more than 32 bits: "
"""Stands in the reason of a row that was wrong only with the KV cache at such addresses, see CaseMeasurer."""
ADVICE = {
    "hypervisor": "use a host without other guests", "quota": "raise the CPU quota or give fewer --threads",
    "heat": "let it cool", "thermal": "let it cool", "MHz": "fix its clock",
    "process": "stop what runs beside",
}  # fmt: skip
"""A word in the reason of a disturbance -> what to do against it."""
SIGNS = ("clocks", "clock reasons", "GPU metrics", "processes", "others_percent")
"""The readings from which monitors tell a disturbance, under their names in the conditions' `not_read`."""
NUMBER = re.compile(r"\d+(\.\d+)?")

Notes = list[tuple[str, str]]
"""Pairs of a label and a text. Where consecutive notes have the same label, it is printed once."""


def printed_notes(notes: Notes) -> RenderableType:
    """The notes as they are printed: labels in one column, their texts in the next, then the commands."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    label_above, commands = "", []
    for label, text in notes:
        if label == REPRODUCE:
            commands.append(whole_line(COMMAND + text))
        else:
            shown_label = "" if label == label_above else label
            grid.add_row(Text(shown_label, UNTIMED.get(label, "dim")), Text(text))
            label_above = label
    return Group(grid, f"{REPRODUCE}:", *commands) if commands else grid


def case_notes(case: CaseResult, run: Run | None) -> Notes:
    """All notes of a case whose implementations are compared; some need the run, such as its commands."""
    return [
        *untimed(case.cells),
        *(_chosen_rows(run) if run else ()),
        *_absent_defaults(case),
        *(reproductions(case.cells, run) if run else ()),
        *_remarks(case.timed),
        *_reliability(case),
        *measuring(case.done, case.verdicts),
    ]


def untimed(cells: Iterable[Cell]) -> Notes:
    """Rows without a time, failures first: each reason once, with the rows that it holds for."""
    failed = [cell for cell in cells if cell.status != "ok"]
    failed.sort(key=lambda cell: list(UNTIMED).index(cell.status))
    notes: Notes = []
    # The heading says already which machine this is, so reasons are cut there.
    groups = grouped(failed, lambda cell: (cell.status, cell.reason.partition("; this is ")[0]))
    for (status, reason), group in groups.items():
        text = ", ".join(cell.name for cell in group)
        if status == "unsupported":
            text = f"{reason}{f' ({len(group)})' if len(group) > 1 else ''}: {text}"
        elif reason:
            text += f": {reason}"
        notes.append((status, text))
    return notes


def _absent_defaults(case: CaseResult) -> Notes:
    """The implementations that engines run by default in this case, but that have no time."""
    timed, rows = {cell.impl for cell in case.timed}, {cell.impl for cell in case.cells}
    clauses = [
        f"{SPELLED[engine]} runs {row}, which {'has no time' if row in rows else 'was not asked for'}"
        for engine, row in case.defaults.items()
        if row not in timed
    ]
    return [("default", "; ".join(clauses))] if clauses else []


def _chosen_rows(run: Run) -> Notes:
    """The patterns of `--impl`; empty if the run's command has none."""
    for option, next_word in itertools.pairwise([*run.command, ""]):
        if option.startswith("--impl"):
            _, _, value = option.partition("=")
            return [("rows", f"those of --impl {value or next_word} alone")]
    return []


def reproductions(cells: Iterable[Cell], run: Run) -> Notes:
    """A command for each wrong row, which checks the row alone and saves its output and the reference. There
    is none for rows of another source tree, or wrong at far addresses only, as `check` cannot run these."""
    wrong = [cell for cell in cells if cell.status == "wrong" and FAR not in cell.reason]
    return [(REPRODUCE, _command(cell, run)) for cell in wrong if cell.setting not in run.trees]


def _command(cell: Cell, run: Run) -> str:
    """The `check` command of a cell, without options that have their default values."""
    variables = run.settings.get(cell.setting, {})
    sizes = cell.case.removeprefix(f"{cell.op} ").removesuffix(f" {cell.boundary}")
    if other_case := OTHER_CASE.match(cell.reason):
        sizes = other_case[1]
    words = [f"--op {cell.op} --impl {shlex.quote(cell.impl)} --case {_quoted(sizes)}"]
    if cell.boundary != "core":
        words.append(f"--boundary {cell.boundary}")
    if cell.cache != "serving":
        words.append(f"--cache {cell.cache}")
    if cell.platform == "cpu":
        words.append("--device cpu")
    elif cell.launch == "eager":
        words.append("--launch eager")
    words += [f"--set {shlex.quote(f'{name}={v}')}" for name, v in variables.items() if v is not None]
    if cell.config:
        words.append(f"--config {_quoted(text_of(cell.config))}")
    if run.seed:
        words.append(f"--seed {run.seed}")
    if "--threads" in run.command:
        words.append(f"--threads {run.threads}")
    unset = [f"-u {name}" for name, value in variables.items() if value is None]
    environment = f"env {' '.join(unset)} " if unset else ""
    return f"{environment}{command('check')} {' '.join(words)} --save wrong"


def _quoted(text: str) -> str:
    """In double quotes, as in the documents, unless the shell would change something between them."""
    is_changed = any(character in text for character in '"$`\\!')
    return shlex.quote(text) if is_changed else f'"{text}"'


def _remarks(timed: Sequence[Cell]) -> Notes:
    """Remarks on times, each once with the rows that it holds for."""
    remarks = [(remark, cell.name) for cell in timed for remark in cell.reason.split("; ") if remark]
    notes = []
    for remark, pairs in grouped(remarks, lambda pair: pair[0]).items():
        rows = "all rows" if len(pairs) == len(timed) > 1 else ", ".join(name for _, name in pairs)
        notes.append(("note", f"{rows}: {remark}"))
    if amx := [c.name for c in timed if c.impl.startswith("vllm.amx") and c.arch == "x86-avx512"]:
        notes.append(("note", f"{', '.join(amx)}: this CPU has no AMX tiles, so it computes with AVX-512"))
    return notes


def _reliability(case: CaseResult) -> Notes:
    """How far the times can be trusted: noise, caches, disturbed rounds, and what no monitor could see."""
    pairs = [v for v in case.verdicts if v.about == "A/A"]
    notes: Notes = []
    if len(pairs) > 1:
        notes.append(("groups", f"measured in {len(pairs)}: memory does not hold all at once"))
    for pair in pairs:
        notes.append(("noise", f"{pair.b} against itself, prepared apart: {ratio_text(pair)}"))
        noise = noise_of(pair.comparison)
        if noise > MAX_NOISE:
            what = f" on what differs by less than {1 + noise:.2g}x" if noise < math.inf else ""
            notes.append(("noise", f"no verdict{what}: this machine was disturbed, or the budget too short"))
    if why := case.cells[0].rotation.get("why"):
        notes.append(("cache", f"calls may read caches: {why}"))
    if disturbed := case.done.disturbed:
        not_counted = len([r for r in disturbed if not r.counted])
        made = case.done.rounds + case.done.eliminations + not_counted
        consequence = "left out and made again" if not_counted else "counted all the same"
        example = disturbed[0].reason
        notes.append(("disturbed", f"{len(disturbed)} of {made} rounds, {consequence}; e.g. {example}"))
    not_read: dict[str, str] = {}  # the name of a reading -> why the monitor could not read it
    for conditions in case.done.conditions:
        not_read |= conditions.get("not_read", {})
    if unseen := [name for name in SIGNS if name in not_read]:
        text = f"disturbances that would show in {', '.join(unseen)} ({not_read[unseen[0]]})"
        notes.append(("not seen", text))
    return notes


def measuring(done: CaseDone, verdicts: Sequence[Verdict] = ()) -> Notes:
    """How much was measured, why measuring stopped, on which device, and how long it took."""
    text = f"{counted(done.rounds, 'round')} in {counted(done.blocks, 'block')}"
    if done.eliminations:
        text += f" after {counted(done.eliminations, 'elimination round')}"
    if done.stopped:
        text += f", until {' and '.join(STOPPED.get(word, word) for word in done.stopped.split(', '))}"
    if verdicts:
        text += f"; all verdicts together {100 * verdicts[0].confidence:.0f} % sure"
    device = [("device", done.device)] if done.device else []
    return [("measured", text), *device, ("time", time_spent(done.measured_s, done.setup_s))]


def time_spent(measured_s: float, setup_s: float) -> str:
    """How much of the time was measuring."""
    whole = measured_s + setup_s
    share = f" ({100 * measured_s / whole:.0f} %)" if whole else ""
    return f"measuring {measured_s:.1f} s of {whole:.1f} s{share}"


# The end of a run


def left_out(cases: Iterable[Case], measured: Iterable[Cell], budget_s: float) -> str:
    """How many cases the budget did not reach, and their share of each boundary's weight; empty if none."""
    weights: dict[str, dict[str, float]] = {}  # of measured cases, by boundary and case
    for cell in measured:
        weights.setdefault(cell.boundary, {})[cell.case] = cell.weight
    shares = []
    for boundary, missing in grouped(cases, lambda case: case.boundary).items():
        weight = sum(case.weight for case in missing)
        whole = weight + sum(weights.get(boundary, {}).values())
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
    # Reasons of a kind are equal except for their numbers. The middle one of the most frequent kind is named.
    kinds = grouped(sorted(reasons), lambda reason: NUMBER.sub("#", reason))
    kind = max(kinds, key=lambda kind: len(kinds[kind]))
    example = kinds[kind][len(kinds[kind]) // 2]
    usages = [conditions.get("processes", {}) for case in disturbed for conditions in case.conditions]
    loads = [(percent, process) for usage in usages for process, percent in usage.items() if percent > 0]
    busiest = list(dict.fromkeys(process for _, process in sorted(loads, reverse=True)))
    if busiest:
        example += f", most of it {', '.join(busiest[:2])}"
    advice = [text for word, text in ADVICE.items() if word in kind] + ["give a longer --budget"]
    return f"not quiet: {len(reasons)} of {rounds} rounds were disturbed ({example}): {', or '.join(advice)}"


def spread_lines(spreads: Iterable[Spread]) -> list[str]:
    """A line for each type of device, and one for each device that lags or drifted."""
    lines = []
    for spread in spreads:
        lines.append(f"{len(spread.devices)} devices of type {spread.type} {apart(spread)}")
        for r in _worst_case_of_each_device(spread.lagging):
            lines.append(f"{r.device} lags: {ratio_text(r.comparison)} the median device's time of {r.case}")
        for r in _worst_case_of_each_device(spread.drifted):
            ratio = ratio_text(r.comparison)
            lines.append(f"{r.device} drifted: {ratio} its first time of {r.case} at the end")
    return lines


def apart(spread: Spread) -> str:
    """What is known of how far the devices lie apart, as a predicate: `are alike within 1.2%`."""
    if spread.verdict == "apart":
        return f"lie apart: the slowest takes {ratio_text(spread.widest)} the time of the fastest"
    if spread.verdict == "alike":
        return f"are alike within {spread.max_difference:.1%}"
    return f"are indistinguishable at this noise: they may differ by up to {spread.max_difference:.1%}"


def _worst_case_of_each_device(ratios: Sequence[DeviceRatio]) -> Iterable[DeviceRatio]:
    """For each device the ratio that is furthest from 1."""
    nearest_first = sorted(ratios, key=lambda ratio: abs(math.log(ratio.comparison.ratio)))
    # The last ratio of a device replaces the earlier ones.
    return {ratio.device: ratio for ratio in nearest_first}.values()
