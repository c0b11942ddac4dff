"""What an A/B is expected to show: predictions that its record holds from before the first launch.

They are read from files of `serving what-if --json`, or follow from runs of the suite in which the arms'
variables were measured as settings.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.files import JsonObject
from harness.results.journal import Journal
from harness.results.read import load, run_folders
from harness.serving.ab.plan import Plan
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import System, link
from harness.serving.link.predictions import predict
from harness.serving.names import KNOWN_ENGINES, hardware_name

TP = r"--(?:tp|tp[-_]size|tensor-parallel-size)[ =]+(\d+)"
DRAFTS = re.compile(
    r"num[-_](?:speculative[-_]tokens|steps)\W+(?P<drafted>\d+)|num[-_]draft[-_]tokens\W+(?P<verified>\d+)"
)
PREDICTED_OF = "predicted of "  # begins the assumption that names a prediction's model and machine


def predicted(plan: Plan, names: Sequence[str]) -> list[Prediction]:
    """The predictions of files and runs. Raises UsageError for a file or a run that gives none."""
    predictions: list[Prediction] = []
    runs = []
    for name in names:
        path = Path(name)
        if path.suffix == ".json" and path.name != "run.json":
            predictions += _predictions_of_file(plan, path)
        else:
            runs.append(name)
    if runs:
        for arm in plan.others:
            changes = list(changes_of(plan, arm, runs))
            predictions += [item.model_copy(update={"of": arm}) for item in link_predictions(plan, changes)]
    return predictions


def _predictions_of_file(plan: Plan, path: Path) -> list[Prediction]:
    """The predictions in a file of `serving what-if --json` for the plan's concurrency. Raises UsageError if
    the plan's commands name another engine, number of GPUs or length. Machine and model are only noted."""
    try:
        document = json.loads(path.read_bytes())
        where = f"{PREDICTED_OF}DeepSeek-R1 on {document['gpus']} x {document['hardware'].upper()}"
        fitting = [each for each in document["workloads"] if each["load"]["concurrency"] == plan.concurrency]
        changes = [Prediction.model_validate(change) for each in fitting for change in each["changes"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        fitting, changes = [], []  # no document of `what-if`
    if len(fitting) != 1 or not changes:
        load = f"{plan.concurrency} in flight" if plan.concurrency else "a client of unknown concurrency"
        raise UsageError(f"{path} does not hold one prediction for {load}: `what-if --json FILE` writes one")
    # The engine, the GPUs and the drafts are the document's, which has no drafts if it is old; lengths are
    # the workload's.
    predicted_for = {"drafts": 0, **document, **fitting[0]["load"]}
    unlike = [
        f"{name} {predicted_for[name]}, in the plan {value}"
        for name, value in _deployment(plan).items()
        if value is not None and value != predicted_for[name]
    ]
    if unlike:
        raise UsageError(f"{path} is no prediction for this plan: it is of {'; '.join(unlike)}")
    return [change.model_copy(update={"assumptions": (where, *change.assumptions)}) for change in changes]


def assumed_deployments(predictions: Iterable[Prediction]) -> list[str]:
    """`predicted of DeepSeek-R1 on 8 x H200` for each file of predictions. No command of a plan names the
    model and the machine, so a reader has to compare them."""
    texts = dict.fromkeys(text for prediction in predictions for text in prediction.assumptions)
    return [text for text in texts if text.startswith(PREDICTED_OF)]


def _deployment(plan: Plan) -> JsonObject:
    """Engine, number of GPUs, lengths and draft tokens by the plan's commands; None where they do not say."""
    command = f"{plan.image} {plan.launch}"
    tp = re.search(TP, plan.launch)
    drafts = DRAFTS.search(plan.launch)
    if drafts is None and "--speculative" in plan.launch:
        raise UsageError("--predict: the launch command does not say how many tokens a step drafts")
    draft_tokens = 0
    if drafts and drafts["drafted"]:
        draft_tokens = int(drafts["drafted"])
    elif drafts:  # SGLang's num-draft-tokens also counts the token that is verified with the drafts
        draft_tokens = int(drafts["verified"]) - 1
    return {
        "engine": next((name for name in KNOWN_ENGINES if re.search(rf"\b{name}\b", command)), None),
        "gpus": int(tp[1]) if tp else None,
        "isl": plan.of_client("--(?:random-)?input-len"),
        "osl": plan.of_client("--(?:random-)?output-len"),
        "drafts": draft_tokens,
    }


def changes_of(plan: Plan, arm: str, names: Sequence[str]) -> Iterator[KernelChange]:
    """The change of each op that a run timed under the variables of both arms: in each case that of the
    implementation that is fastest under the base's variables. The interval shows the scatter over cases."""
    for folder in dict.fromkeys(folder for name in names for folder in run_folders(name)):
        run = Journal(folder).run()
        before = _setting(run.settings, plan.variables(plan.base))
        after = _setting(run.settings, plan.variables(arm))
        cells = load(str(folder))
        # `arm` is the name of a setting in records.
        times_us = cells[cells.status == "ok"].pivot_table("time_us", ["case", "impl"], "arm")
        if before == after or not {before, after} <= set(times_us.columns):
            continue
        fastest = times_us[[before, after]].dropna().sort_values(before).groupby("case").head(1)
        logs = [math.log(before_us / after_us) for before_us, after_us in fastest.itertuples(index=False)]
        mean = statistics.fmean(logs)
        half_width = 1.645 * statistics.pstdev(logs)  # nine tenths of a normal distribution
        low, high = math.exp(mean - half_width), math.exp(mean + half_width)
        yield KernelChange(op=run.op, factor=math.exp(mean), low=low, high=high, source=str(folder))


def _setting(settings: dict[str, dict[str, str | None]], variables: dict[str, str]) -> str | None:
    """The name of the setting of a run that has the values of an arm's variables; None if there is none.
    Variables of the arm that no setting of the run has do not count."""
    varied = {name for setting in settings.values() for name in setting}
    of_arm = {name: value for name, value in variables.items() if name in varied}
    return next((name for name, setting in settings.items() if setting == of_arm), None)


def link_predictions(plan: Plan, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """What changes of kernels are worth to the server that the plan's commands describe. Raises UsageError if
    there is no change, or if the commands do not describe it."""
    if not changes:
        why = "no run timed a kernel under the variables of both arms: `toggle` makes one"
        raise UsageError(f"--predict: {why}")
    deployment = _deployment(plan)
    isl, osl = deployment["isl"], deployment["osl"]
    if not (plan.concurrency and isl and osl):
        raise UsageError("--predict: the client command does not say both lengths and a concurrency")
    machine = Journal(Path(changes[0].source)).run().provenance.get("machine", {})
    hardware = hardware_name(str(machine.get("device", "")))
    model = link(System(hardware=hardware, tp=deployment["gpus"] or 1, drafts=deployment["drafts"]))
    return predict(model, Load(isl, osl, plan.concurrency, range_ratio=1.0), changes)
