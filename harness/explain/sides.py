"""What clients and servers said without and with the change: TPOT, the work, settings, names, predictions.

It is of a record of `serving ab`, or of results of any client.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from harness.errors import UsageError
from harness.serving.ab.record import Record
from harness.serving.ab.result import Effect, differences, effect, effects, servers
from harness.serving.clients.load import load
from harness.serving.compare.settings import beside
from harness.serving.ledger import Prediction
from harness.serving.schema import ServingRun
from harness.statistics.intervals import CONFIDENCE
from shapes.names import unknown

DIFFERS, LARGE = 0.01, 0.05
"""From these parts on, another number of tokens or requests is said, and may be a cause; another accept
length is a cause from the first on."""
ASKED = ("concurrency", "input_len", "output_len", "request_rate", "num_prompts")
COUNTED = {"completed": "requests", "input_tokens": "tokens in", "output_tokens": "tokens out"}


@dataclass(frozen=True)
class Sides:
    """what:     was compared, as a reader calls it
    effect:   on TPOT; None: nothing has it
    unread:   says of a differing name that nothing installed reads it, where no other name differs
    names:    of variables and flags that differ
    same:     why the servers are alike; alike: they are launched so
    looked:   whether names and settings were looked at
    work:     lines on requests and tokens that differ, each with the part by which; None: not counted
    accepted: tokens that a request got of a step, before and after; 1 without speculation
    logs:     of the server with the change; base_logs: of that without it
    """

    what: str = ""
    effect: Effect | None = None
    unread: str = ""
    names: tuple[str, ...] = ()
    same: str = ""
    alike: bool = False
    looked: bool = False
    work: Mapping[str, float] | None = None
    accepted: tuple[float, float] = (1.0, 1.0)
    predictions: tuple[Prediction, ...] = ()
    logs: tuple[str, ...] = ()
    base_logs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def large_work(self) -> tuple[str, ...]:
        """What differs by so much that it may be a cause."""
        return tuple(line for line, part in (self.work or {}).items() if part >= LARGE)


def read_sides(record: str | None, name: str, before: Sequence[str], after: Sequence[str]) -> Sides:
    """Raises UsageError."""
    if record:
        return _of_record(Path(record), name)
    return _of_results(before, after) if before else Sides()


def _of_results(before: Sequence[str], after: Sequence[str]) -> Sides:
    if twice := {Path(name).resolve() for name in before} & {Path(name).resolve() for name in after}:
        raise UsageError(f"{min(twice)} is both before and after")
    runs = [[run for name in names for run in load(name)] for names in (before, after)]
    if len(runs[0]) != len(runs[1]):
        raise UsageError(f"{len(runs[0])} runs before and {len(runs[1])} after: they are paired in order")
    for names, side in zip((before, after), runs, strict=True):
        loads = sorted({run.workload.concurrency or 0.0 for run in side} - {0.0})
        if len(loads) > 1:
            several = ", ".join(f"{each:g}" for each in loads)
            of = ", ".join(names)
            raise UsageError(f"{of}: results of several concurrencies ({several}): give those of one load")
    tpots = [(a.value("tpot", "mean"), b.value("tpot", "mean")) for a, b in zip(*runs, strict=True)]
    pairs = [(a, b) for a, b in tpots if a and b]
    found = effect(*zip(*pairs, strict=True), higher=False, level=CONFIDENCE, margin=1.0) if pairs else None
    lines = [f"before against after: {line}" for a, b in zip(*runs, strict=True) for line in beside(a, b)]
    what = f"{Path(before[0]).name} and {Path(after[0]).name}"
    return _with_work(Sides(what, found, notes=tuple(dict.fromkeys(lines))), runs)


def _of_record(folder: Path, name: str) -> Sides:
    record = Record(folder)
    plan = record.plan
    if not name and len(plan.others) > 1:
        raise UsageError(f"{folder} compares {', '.join(plan.others)} with {plan.base}: name one with --arm")
    name = name or plan.others[0]
    if name not in plan.others:
        raise UsageError(unknown("--arm", name, plan.others, of=str(folder)))
    differ = differences(record, name)
    unread = {each["name"]: each["says"] for each in record.names if each["found"] is False}
    names = {key for keys in plan.differing() for key in keys}
    lines = [
        f"{what} {key}: {before} -> {after}"
        for what, part in (("setting", "server_info"), ("variable", "environment"))
        for key, (before, after) in differ[part].items()
    ]
    found_effect = effects(record, name).get("tpot")
    all_unread = next(iter(unread.values())) if names and names <= unread.keys() else ""
    same, alike = _same(record, name)
    interval = found_effect.interval if found_effect else None
    if interval and not interval[0] <= 0 <= interval[1] and (same or all_unread):
        why = same or "; ".join(unread.values())
        lines.append(f"{why}; but TPOT differs, so the two servers are not the same")
        all_unread, same, alike = "", "", False
    elif not all_unread:
        lines += unread.values()
    found = Sides(
        f"{name} against {plan.base}, {folder}", found_effect, all_unread, tuple(sorted(names)), same, alike,
        looked=True, predictions=tuple(each for each in record.predictions if each.of in ("", name)),
        logs=_logs(record, name), base_logs=_logs(record, plan.base), notes=tuple(lines),
    )  # fmt: skip
    runs: list[list[ServingRun]] = [[], []]
    for number, of_pair in record.pairs().items():
        for side, each in enumerate((plan.base, name)):
            result = record.launch_folder(of_pair[each]) / "result.json" if each in of_pair else None
            if number and result and result.exists():
                runs[side] += load(result)
    return _with_work(found, runs)


def _logs(record: Record, arm: str) -> tuple[str, ...]:
    paths = (record.launch_folder(each) / "server.log" for each in record.of("launch", arm=arm))
    return tuple(str(path) for path in paths if path.exists())


def _same(record: Record, name: str) -> tuple[str, bool]:
    """Why both servers are the same, or empty, and whether they are launched alike; flags may be such that no
    setting shows. A server's settings do not show what variables or an image change."""
    plan = record.plan
    own, base = plan.changes(name), plan.changes(plan.base)
    if own == base:
        return f"{name} and {plan.base} are launched alike", True
    said = [server["server_info"] for each in (plan.base, name) for server in servers(record, each)]
    if own[0] == base[0] and own[2] == base[2] and said and all(said):
        found = differences(record, name)
        if not found["server_info"] and not found["environment"]:
            return f"they report the same {len(said[0])} settings, and differ in flags alone", False
    return "", False


def _with_work(sides: Sides, runs: Sequence[Sequence[ServingRun]]) -> Sides:
    if not all(runs):
        return sides
    known = [[run.accept_length for run in side if run.accept_length] for side in runs]
    accepted = (statistics.fmean(known[0]), statistics.fmean(known[1])) if all(known) else sides.accepted
    wrong = [
        f"`serving load` finds its numbers wrong: {finding.message}"
        for run in chain(*runs) for finding in run.findings if finding.severity == "wrong"
    ]  # fmt: skip
    notes = (*sides.notes, *dict.fromkeys(wrong))
    return replace(sides, work=dict(_differing(*runs)), accepted=accepted, notes=notes)


def _differing(before: Sequence[ServingRun], after: Sequence[ServingRun]) -> Iterator[tuple[str, float]]:
    """Lines on what was asked and counted, where the two differ, each with the part by which they do."""
    for name in ASKED:
        asked = [{getattr(run.workload, name) for run in side} - {None} for side in (before, after)]
        if all(asked) and asked[0] != asked[1]:
            texts = (", ".join(f"{value:g}" for value in sorted(values)) for values in asked)
            was, now = map(statistics.fmean, asked)
            yield f"{name.replace('_', ' ')} asked for: {' -> '.join(texts)}", abs(now / was - 1)
    for name, what in COUNTED.items():
        counts = [[getattr(run.totals, name) for run in side] for side in (before, after)]
        if not any(None in side for side in counts):
            was, now = map(statistics.fmean, counts)
            if was and abs(more := now / was - 1) > DIFFERS:
                yield f"{what} of a run: {was:.0f} -> {now:.0f} ({100 * more:+.1f} %)", abs(more)
