"""Predictions of an A/B, which its record holds before the first launch. They are read from a file, or follow
from runs of the suite in which the arms' variables were measured as settings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.results.journal import Journal
from harness.results.read import load, run_folders
from harness.serving.ab.plan import Plan
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import System, link
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name

TP = r"--(?:tp|tp[-_]size|tensor-parallel-size)[ =]+(\d+)"


def predicted(plan: Plan, names: Sequence[str]) -> list[Prediction]:
    """Raises UsageError where a file holds no prediction, or no run measured the arms' variables."""
    files = [name for name in names if Path(name).suffix == ".json" and Path(name).name != "run.json"]
    found = [each for name in files for each in _of_file(plan, Path(name))]
    if runs := [name for name in names if name not in files]:
        for arm in plan.others:
            changes = list(changes_of(plan, arm, runs))
            found += [each.model_copy(update={"of": arm}) for each in _of_link(plan, changes)]
    return found


def _of_file(plan: Plan, path: Path) -> list[Prediction]:
    """What `serving what-if --json` wrote for the plan's concurrency."""
    fitting: list[list[Prediction]] = []
    try:
        for workload in json.loads(path.read_text())["workloads"]:
            if workload["load"]["concurrency"] == plan.concurrency:
                fitting.append([Prediction.model_validate(each) for each in workload["changes"]])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass  # another document
    if len(fitting) != 1 or not fitting[0]:
        load = f"{plan.concurrency} in flight" if plan.concurrency else "a client of unknown concurrency"
        raise UsageError(f"{path} does not hold one prediction for {load}: `what-if --json FILE` writes one")
    return fitting[0]


def changes_of(plan: Plan, arm: str, names: Sequence[str]) -> Iterator[KernelChange]:
    """The change of each op that a run timed under the variables of both arms, by the implementation that
    is fastest under those of the base. The factor is the mean over cases, the interval their scatter."""
    for folder in dict.fromkeys(folder for name in names for folder in run_folders(name)):
        run = Journal(folder).run()
        base, own = (_setting(run.settings, plan.variables(each)) for each in (plan.base, arm))
        cells = load(str(folder))
        times = cells[cells.status == "ok"].pivot_table("time_us", ["case", "impl"], "arm")
        if base != own and {base, own} <= {*times.columns}:
            best = times[[base, own]].dropna().sort_values(base).groupby("case").head(1)
            logs = [math.log(before / after) for before, after in best.itertuples(index=False)]
            mean, apart = statistics.fmean(logs), 1.645 * statistics.pstdev(logs)
            low, factor, high = (math.exp(each) for each in (mean - apart, mean, mean + apart))
            yield KernelChange(op=run.op, factor=factor, low=low, high=high, source=str(folder))


def _setting(settings: dict[str, dict[str, str | None]], variables: dict[str, str]) -> str | None:
    """The run's setting whose variables are the arm's, as far as any setting of the run has them."""
    own = {name: variables[name] for each in settings.values() for name in each if name in variables}
    return next((name for name, each in settings.items() if each == own), None)


def _of_link(plan: Plan, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    if not changes:
        raise UsageError(
            "--predict: no run timed a kernel under the variables of both arms: `toggle` makes one"
        )
    isl, osl = (plan.of_client(f"--(?:random-)?{side}-len") for side in ("input", "output"))
    tp = re.search(TP, plan.launch)
    if not (plan.concurrency and isl and osl):
        raise UsageError("--predict: the client command does not say both lengths and a concurrency")
    machine = Journal(Path(changes[0].source)).run().provenance.get("machine", {})
    hardware = hardware_name(str(machine.get("device", "")))
    model = link(System(hardware=hardware, tp=int(tp[1]) if tp else 1))
    load_ = Load(isl, osl, plan.concurrency, range_ratio=1.0)
    return predict(model, load_, changes)
