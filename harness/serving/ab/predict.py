"""Predictions of an A/B, which its record holds before the first launch: of a file, or from runs of the suite in
which the arms' variables were measured as settings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, one_line
from harness.files import JsonObject
from harness.results.read import load as load_runs
from harness.results.read import run_folders
from harness.results.journal import Journal
from harness.serving.ab.plan import Plan
from harness.serving.ledger.prediction import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import System, link
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name

LENGTHS = {"isl": r"--(?:random-)?input-len[ =](\d+)", "osl": r"--(?:random-)?output-len[ =](\d+)"}
TP = r"--(?:tp|tp[-_]size|tensor-parallel-size)[ =](\d+)"


def predicted(plan: Plan, names: Sequence[str]) -> list[JsonObject]:
    """Raises UsageError where one is no prediction, or no run in which the arms' variables were measured."""
    found: list[Prediction] = []
    runs = [name for name in names if not Path(name).is_file() or Path(name).suffix == ".jsonl"]
    for name in names:
        if name not in runs:
            found += _of_file(plan, Path(name))
    for arm in plan.others if runs else []:
        changes = list(_changes(plan, arm, runs))
        found += [each.model_copy(update={"of": arm}) for each in _of_link(plan, changes)]
    return [prediction.model_dump() for prediction in found]


def _of_file(plan: Plan, path: Path) -> list[Prediction]:
    """Those of the plan's concurrency, of `serving what-if --json`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    workloads = document.get("workloads", [document]) if isinstance(document, dict) else [document]
    fitting = [w for w in workloads if _concurrency(w) in (None, plan.concurrency)]
    if len(fitting) > 1:
        raise UsageError(f"{path} predicts {len(fitting)} loads: give what-if the client's concurrency alone")
    found = [prediction for workload in fitting for prediction in _predictions(workload)]
    if not found:
        raise UsageError(
            f"{path} holds no prediction for this load: write one with `serving what-if --json FILE`"
        )
    return found


def _concurrency(workload: Any) -> int | None:
    load = workload.get("load", {}) if isinstance(workload, dict) else {}
    return load.get("concurrency") if isinstance(load, dict) else None


def _predictions(value: Any) -> Iterator[Prediction]:
    """All that stand anywhere in it."""
    if isinstance(value, dict):
        try:
            yield Prediction.model_validate(value)
            return
        except ValidationError:
            value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _predictions(each)


def _changes(plan: Plan, arm: str, names: Sequence[str]) -> Iterator[KernelChange]:
    """Of each op that a run timed under the variables of both arms, by the implementation that was fastest
    under those of the base: the factor is the mean over cases, the interval how far cases lie apart."""
    for folder in dict.fromkeys(folder for name in names for folder in run_folders(name)):
        run = Journal(folder).run()
        settings = [_setting(run.arms, plan.variables(each)) for each in (plan.base, arm)]
        if None in settings or settings[0] == settings[1]:
            continue
        cells = load_runs(str(folder))
        cells = cells[cells.status == "ok"].pivot_table("time_us", ["case", "impl"], "arm").dropna()
        best = cells.sort_values(settings[0]).groupby("case").head(1) if len(cells) else cells
        logs = [math.log(row[settings[0]] / row[settings[1]]) for _, row in best.iterrows()]
        if logs:
            mean, apart = statistics.fmean(logs), 1.645 * statistics.pstdev(logs)
            low, factor, high = (math.exp(each) for each in (mean - apart, mean, mean + apart))
            yield KernelChange(op=run.op, factor=factor, low=low, high=high, source=str(folder))


def _setting(settings: dict[str, dict[str, str | None]], variables: dict[str, str]) -> str | None:
    """The run's setting whose variables are the arm's, as far as any setting of the run has them."""
    known = {name for each in settings.values() for name in each}
    own = {name: value for name, value in variables.items() if name in known}
    return next((name for name, each in settings.items() if each == own), None)


def _of_link(plan: Plan, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    if not changes:
        raise UsageError(
            "--predict: no run timed a kernel under the variables of both arms: `toggle` makes one"
        )
    lengths = {key: re.search(pattern, plan.client) for key, pattern in LENGTHS.items()}
    if not (plan.concurrency and all(lengths.values())):
        raise UsageError("--predict: the client command says no input and output length and concurrency")
    sizes = {key: int(match[1]) for key, match in lengths.items() if match}
    tp = re.search(TP, plan.launch)
    machine = Journal(Path(changes[0].source)).run().provenance.get("machine", {})
    model = link(System(hardware=hardware_name(str(machine.get("device", ""))), tp=int(tp[1]) if tp else 1))
    return predict(model, Load(concurrency=plan.concurrency, range_ratio=1.0, **sizes), changes)
