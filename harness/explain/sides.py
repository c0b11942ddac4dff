"""What clients and servers said without and with the change: TPOT, the work, settings, names, predictions.

It is of a record of `serving ab`, or of results of any client.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.serving.ab.record import Record
from harness.serving.ab.result import Effect, differences, effect, effects, servers
from harness.serving.clients.load import load
from harness.serving.compare.settings import OF_SERVER, server_settings
from harness.serving.ledger import Prediction
from harness.serving.schema import ServingRun
from harness.statistics.intervals import CONFIDENCE
from shapes.names import unknown

DIFFERS = 0.01
"""From this part on, another number of tokens or requests is other work."""


@dataclass(frozen=True)
class Sides:
    """what:        was compared, as a reader calls it
    effect:      on TPOT; None: nothing has it
    unread:      lines on differing names that nothing installed reads; all_unread: no other name differs
    same:        why the servers are alike; same_surely: nothing was left out
    work:        lines on requests and tokens that differ
    accepted:    tokens that a request got of a step, before and after; 1 without speculation
    logs:        of the server with the change; logs_before: of the other one
    """

    what: str
    effect: Effect | None = None
    unread: tuple[str, ...] = ()
    all_unread: bool = False
    looked_up: bool = False
    same: str = ""
    same_surely: bool = False
    settings_known: bool = False
    work: tuple[str, ...] = ()
    work_known: bool = False
    accepted: tuple[float, float] = (1.0, 1.0)
    predictions: tuple[Prediction, ...] = ()
    logs: tuple[str, ...] = ()
    logs_before: tuple[str, ...] = ()


def of_results(before: Sequence[str], after: Sequence[str]) -> Sides:
    """Raises UsageError where files cannot be read or make no pairs."""
    runs = [[run for name in names for run in load(name)] for names in (before, after)]
    if len(runs[0]) != len(runs[1]):
        raise UsageError(f"{len(runs[0])} runs before and {len(runs[1])} after: they are paired in order")
    tpots = [(a.value("tpot", "mean"), b.value("tpot", "mean")) for a, b in zip(*runs, strict=True)]
    pairs = [(a, b) for a, b in tpots if a and b]
    found = effect(*zip(*pairs, strict=True), higher=False, level=CONFIDENCE, margin=1.0) if pairs else None
    every = [*runs[0], *runs[1]]
    told = all(any(run.extra.get(key) for key in OF_SERVER) or run.flags for run in every)
    all_settings = [server_settings(run) | run.environment for run in every]
    alike = told and all(each == all_settings[0] for each in all_settings)
    return Sides(
        what=f"{Path(before[0]).name} and {Path(after[0]).name}", effect=found,
        same=f"the files say the same settings of both servers: {len(all_settings[0])}" if alike else "",
        settings_known=told, **_work(*runs),
    )  # fmt: skip


def of_record(folder: Path, name: str) -> Sides:
    """name: of the side that is compared with the first; empty: the only one. Raises UsageError."""
    record = Record(folder)
    plan = record.plan
    if not name and len(plan.others) > 1:
        raise UsageError(
            f"{folder} compares {len(plan.others)} with {plan.base}: give --arm {plan.others[0]}"
        )
    name = name or plan.others[0]
    if name not in plan.others:
        raise UsageError(unknown("--arm", name, plan.others, of=str(folder)))
    said = [servers(record, each) for each in (plan.base, name)]
    reports = bool(said[0] and said[1]) and all(server["server_info"] for side in said for server in side)
    differ = differences(record, name)
    same, surely = "", False
    if plan.changes(name) == plan.changes(plan.base):
        same, surely = f"{name} and {plan.base} are launched alike", True
    elif reports and not differ["server_info"]:
        variables = ", ".join(differ["environment"])
        same = f"the servers of {name} and {plan.base} report the same settings"
        same += f"; other variables: {variables}" if variables else ""
        surely = not variables and plan.changes(name)[2] == plan.changes(plan.base)[2]
    unread = [each for each in record.names if each["found"] is False]
    names = {key for keys in plan.differing() for key in keys}
    runs: list[list[ServingRun]] = [[], []]
    for number, of_pair in record.pairs().items():
        for side, each in enumerate((plan.base, name)):
            result = record.launch_folder(of_pair[each]) / "result.json" if each in of_pair else None
            if number and result and result.exists():
                runs[side] += load(result)
    logs = [[str(path) for each in record.of("launch", arm=of)
             if (path := record.launch_folder(each) / "server.log").exists()]
            for of in (plan.base, name)]  # fmt: skip
    return Sides(
        what=f"{name} against {plan.base}", effect=effects(record, name).get("tpot"),
        unread=tuple(each["says"] for each in unread),
        all_unread=bool(names) and names <= {each["name"] for each in unread}, looked_up=bool(names),
        same=same, same_surely=surely, settings_known=reports or surely,
        predictions=tuple(each for each in record.predictions if each.of in ("", name)),
        logs=tuple(logs[1]), logs_before=tuple(logs[0]), **_work(*runs),
    )  # fmt: skip


def _work(before: Sequence[ServingRun], after: Sequence[ServingRun]) -> dict:  # type: ignore[type-arg]
    if not before or not after:
        return {}
    lengths = [[run.accept_length for run in side] for side in (before, after)]
    known = [[each for each in side if each] for side in lengths]
    accepted = (1.0, 1.0)
    if known[0] and known[1]:
        accepted = (statistics.fmean(known[0]), statistics.fmean(known[1]))
    return {"work": tuple(_differing(before, after)), "work_known": True, "accepted": accepted}


def _differing(before: Sequence[ServingRun], after: Sequence[ServingRun]) -> Iterator[str]:
    """Lines on what was asked and counted, where the two differ."""
    asked = ("concurrency", "input_len", "output_len", "request_rate", "num_prompts")
    counts = {"completed": "requests", "input_tokens": "tokens in", "output_tokens": "tokens out"}
    for name in asked:
        sides = [sorted({getattr(run.workload, name) for run in side} - {None}) for side in (before, after)]
        if sides[0] and sides[1] and sides[0] != sides[1]:
            texts = (", ".join(f"{value:g}" for value in values) for values in sides)
            yield f"{name.replace('_', ' ')} asked for: {' -> '.join(texts)}"
    for name, what in counts.items():
        values = [[getattr(run.totals, name) for run in side] for side in (before, after)]
        if None in itertools.chain(*values):
            continue
        sums = [sum(each) / len(each) for each in values]
        if sums[0] and abs(sums[1] / sums[0] - 1) > DIFFERS:
            yield f"{what} of a run: {sums[0]:.0f} -> {sums[1]:.0f} ({100 * (sums[1] / sums[0] - 1):+.1f} %)"
