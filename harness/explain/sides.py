"""What clients and servers said without and with the change, by `serving ab` or results of any client."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from harness.errors import UsageError
from harness.serving.ab.effect import Effect, effect
from harness.serving.ab.record import Record
from harness.serving.ab.result import differences, effects, servers
from harness.serving.clients.load import load
from harness.serving.compare.settings import other_differences
from harness.serving.ledger import Prediction
from harness.serving.schema import ServingRun
from harness.statistics.intervals import CONFIDENCE
from shapes.names import unknown

DIFFERS = 0.01  # the part beyond which tokens or requests that differ are shown, and accept lengths a cause
LARGE = 0.05  # the part from which tokens or requests that differ may be a cause
ASKED = ("concurrency", "input_len", "output_len", "request_rate", "num_prompts")
COUNTED = {"completed": "requests", "input_tokens": "tokens in", "output_tokens": "tokens out"}


@dataclass(frozen=True)
class Sides:
    """What is known of the servers without and with the change."""

    title: str = ""  # what was compared, for a reader
    effect: Effect | None = None  # on TPOT; None: the inputs do not have it
    unread: str = ""  # says that nothing reads the names that differ; empty where other names differ, too
    names: tuple[str, ...] = ()  # of the variables and flags that differ
    same: str = ""  # why the two servers are the same; empty: they are not, or it is not known
    launched_alike: bool = False  # whether they are launched with the same variables, flags and image
    settings_known: bool = False  # whether names and settings were compared
    work: Mapping[str, float] | None = None
    """A line on requests or tokens that differ -> the part by which they do; None: they were not counted."""
    accepted_before: float = 1.0  # tokens that a step gives a request
    accepted_after: float = 1.0
    predictions: tuple[Prediction, ...] = ()
    logs: tuple[str, ...] = ()  # files, of the server with the change
    base_logs: tuple[str, ...] = ()  # files, of the server without it
    notes: tuple[str, ...] = ()

    @property
    def large_work(self) -> tuple[str, ...]:
        """The lines of `work` that differ by so much that they may be a cause."""
        return tuple(line for line, part in (self.work or {}).items() if part >= LARGE)


def read_sides(record: str | None, arm: str, before: Sequence[str], after: Sequence[str]) -> Sides:
    """From a folder of `serving ab` and the name of the server with the change, empty where it has one such
    server; else from files of results before and after, paired in order. Raises UsageError."""
    if record:
        return _of_record(Path(record), arm)
    return _of_results(before, after) if before else Sides()


def _of_results(before: Sequence[str], after: Sequence[str]) -> Sides:
    if twice := {Path(file).resolve() for file in before} & {Path(file).resolve() for file in after}:
        raise UsageError(f"{min(twice)} is both before and after")
    runs = [[run for file in files for run in load(file)] for files in (before, after)]
    if len(runs[0]) != len(runs[1]):
        raise UsageError(f"{len(runs[0])} runs before and {len(runs[1])} after: they are paired in order")
    for files, runs_of_side in zip((before, after), runs, strict=True):
        loads = sorted({run.workload.concurrency or 0.0 for run in runs_of_side} - {0.0})
        if len(loads) > 1:
            several = f"results of several concurrencies ({', '.join(f'{load:g}' for load in loads)})"
            raise UsageError(f"{', '.join(files)}: {several}: give those of one load")
    pairs = list(zip(*runs, strict=True))
    both = [(first.value("tpot", "mean"), second.value("tpot", "mean")) for first, second in pairs]
    tpots = [(first, second) for first, second in both if first and second]
    tpot = None
    if tpots:
        firsts, seconds = zip(*tpots, strict=True)
        tpot = effect(firsts, seconds, higher=False, level=CONFIDENCE, margin=1.0)
    lines = [f"before against after: {line}" for pair in pairs for line in other_differences(*pair)]
    title = f"{Path(before[0]).name} and {Path(after[0]).name}"
    return _with_work(Sides(title, tpot, notes=tuple(dict.fromkeys(lines))), runs)


def _of_record(folder: Path, arm: str) -> Sides:
    record = Record(folder)
    plan = record.plan
    if not arm and len(plan.others) > 1:
        raise UsageError(f"{folder} compares {', '.join(plan.others)} with {plan.base}: name one with --arm")
    arm = arm or plan.others[0]
    if arm not in plan.others:
        raise UsageError(unknown("--arm", arm, plan.others, of=str(folder)))
    tpot = effects(record, arm).get("tpot")
    differing = differences(record, arm)
    notes = [
        f"{what} {key}: {before} -> {after}"
        for what, part in (("setting", "server_info"), ("variable", "environment"))
        for key, (before, after) in differing[part].items()
    ]
    names = {name for names in plan.differing() for name in names}
    says_unread = {row["name"]: row["says"] for row in record.names if row["found"] is False}
    unread = next(iter(says_unread.values())) if names and names <= says_unread.keys() else ""
    same, launched_alike = _same(record, arm)
    low, high = tpot.interval if tpot and tpot.interval else (0.0, 0.0)
    is_tpot_different = low > 0 or high < 0
    if is_tpot_different and (same or unread):  # what clients saw counts more than names and settings
        why = same or "; ".join(says_unread.values())
        notes.append(f"{why}; but TPOT differs, so the two servers are not the same")
        unread = same = ""
        launched_alike = False
    elif not unread:
        notes += says_unread.values()
    sides = Sides(
        f"{arm} against {plan.base}, {folder}", tpot, unread, tuple(sorted(names)), same, launched_alike,
        settings_known=True, predictions=tuple(each for each in record.predictions if each.of in ("", arm)),
        logs=_logs(record, arm), base_logs=_logs(record, plan.base), notes=tuple(notes),
    )  # fmt: skip
    runs: dict[str, list[ServingRun]] = {plan.base: [], arm: []}
    for number, launches in record.pairs().items():
        for side, runs_of_side in runs.items():
            if number and side in launches:  # pair 0 is not counted
                result = record.launch_folder(launches[side]) / "result.json"
                runs_of_side += load(result) if result.exists() else []
    return _with_work(sides, list(runs.values()))


def _logs(record: Record, arm: str) -> tuple[str, ...]:
    paths = (record.launch_folder(launch) / "server.log" for launch in record.of("launch", arm=arm))
    return tuple(str(path) for path in paths if path.exists())


def _same(record: Record, arm: str) -> tuple[str, bool]:
    """Why a server and that without the change are the same, or empty, and whether they are launched alike.

    Settings that a server reports do not show what variables or an image change. So servers with the same
    settings count as the same only where their flags alone differ.
    """
    base = record.plan.base
    variables, flags, image = record.plan.changes(arm)
    base_variables, base_flags, base_image = record.plan.changes(base)
    if (variables, flags, image) == (base_variables, base_flags, base_image):
        return f"{arm} and {base} are launched alike", True
    reported = [server["server_info"] for name in (base, arm) for server in servers(record, name)]
    if variables == base_variables and image == base_image and reported and all(reported):
        differing = differences(record, arm)
        if not differing["server_info"] and not differing["environment"]:
            return f"they report the same {len(reported[0])} settings, and differ in flags alone", False
    return "", False


def _with_work(sides: Sides, runs: Sequence[Sequence[ServingRun]]) -> Sides:
    """The sides with what their runs before and after say of the work, where both have runs."""
    if not all(runs):
        return sides
    lengths = [[run.accept_length for run in runs_of_side if run.accept_length] for runs_of_side in runs]
    before = after = 1.0
    if all(lengths):
        before, after = map(statistics.fmean, lengths)
    wrong = [
        f"`serving load` finds its numbers wrong: {finding.message}"
        for run in chain(*runs) for finding in run.findings if finding.severity == "wrong"
    ]  # fmt: skip
    notes = (*sides.notes, *dict.fromkeys(wrong))
    return replace(
        sides, work=dict(_differing_work(*runs)), accepted_before=before, accepted_after=after, notes=notes
    )


def _differing_work(before: Sequence[ServingRun], after: Sequence[ServingRun]) -> Iterator[tuple[str, float]]:
    """Lines on what was asked and counted and differs, each with the part by which it does."""
    for name in ASKED:
        asked_before, asked_after = (
            sorted({getattr(run.workload, name) for run in runs} - {None}) for runs in (before, after)
        )
        if asked_before and asked_after and asked_before != asked_after:
            texts = (", ".join(f"{value:g}" for value in values) for values in (asked_before, asked_after))
            part = abs(statistics.fmean(asked_after) / statistics.fmean(asked_before) - 1)
            yield f"{name.replace('_', ' ')} asked for: {' -> '.join(texts)}", part
    for name, what in COUNTED.items():
        counts = [[getattr(run.totals, name) for run in runs] for runs in (before, after)]
        if not any(None in counts_of_side for counts_of_side in counts):
            mean_before, mean_after = map(statistics.fmean, counts)
            if mean_before and abs(change := mean_after / mean_before - 1) > DIFFERS:
                counted = f"{mean_before:.0f} -> {mean_after:.0f} ({100 * change:+.1f} %)"
                yield f"{what} of a run: {counted}", abs(change)
