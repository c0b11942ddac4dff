"""Comparison of two quantities: their ratio with all other differences, or a refusal with every reason.

A quantity is a number of a run, chosen by name, and converted to one unit, kind of tokens and number of GPUs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare import identity
from harness.serving.compare.identity import FIELDS, SERVER, UNKNOWN, UP_TO, Difference, all_gpus, length
from harness.serving.compare.settings import other_differences, server_settings
from harness.serving.integrity import examined
from harness.serving.published_documents import FOLDER, documents
from harness.serving.schema import Metric, ServingRun
from shapes.names import near, unknown

FROM_SETUP = ("image", "flags", "environment", "parallelism")  # what a published run has of its configuration
PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")
ORDER_OF_CHOICE = ("output", "total", "unknown", "mean", "median")
"""Kinds of tokens and statistics: of several metrics of one name the earliest here is taken."""
UNITS = {"s": (1e3, "ms"), "us": (1e-3, "ms")}  # from a unit to a factor and the unit for comparisons


@dataclass(frozen=True)
class Quantity:
    """A metric of a run."""

    run: ServingRun
    metric: Metric


@dataclass(frozen=True)
class Reason:
    """Why two quantities are not compared: what differs, its values on both sides, and why that matters."""

    aspect: str
    sides: str
    why: str

    @property
    def text(self) -> str:
        return f"{self.aspect}: {self.sides}; {self.why}"


def against(a: str, b: str) -> str:
    return f"{a or 'unknown'} against {b or 'unknown'}"


@dataclass(frozen=True)
class Side:
    """A quantity's number, normalised as far as possible. steps: how, one line each"""

    value: float
    unit: str
    scope: str
    tokens: str
    steps: tuple[str, ...] = ()

    def to(self, value: float, step: str, **changes: Any) -> Side:
        return replace(self, value=value, steps=(*self.steps, step), **changes)


def default_metric(a: ServingRun, b: ServingRun) -> str:
    """The first of PREFERRED, or else of `a`'s metrics, that both have; else the first of `a`, or empty."""
    names_of_a = [metric.name for metric in a.metrics]
    names_of_b = {metric.name for metric in b.metrics}
    for name in (*PREFERRED, *names_of_a):
        if name in names_of_a and name in names_of_b:
            return name
    return names_of_a[0] if names_of_a else ""


def quantity_of(run: ServingRun, name: str, wanted: str) -> Quantity:
    """The metric `NAME` or `NAME:WHICH` (statistic or kind of tokens). Raises UsageError. name: the run's"""
    metric_name, _, which = wanted.partition(":")
    of_name = [metric for metric in run.metrics if metric.name == metric_name]
    fitting = [metric for metric in of_name if which in ("", *_kinds(metric))]
    if fitting:
        return Quantity(run, min(fitting, key=_place_in_choice))
    if of_name:
        known = [f"{metric.name}:{_kinds(metric)[0]}" for metric in of_name]
    else:
        known = [metric.name for metric in run.metrics]
    raise UsageError(unknown("metric", wanted, dict.fromkeys(known), of=name))


def _place_in_choice(metric: Metric) -> int:
    """The place of a metric's tokens or of its statistic in ORDER_OF_CHOICE, whichever comes first."""
    kinds = (metric.tokens, metric.statistic)
    return min((place for place, kind in enumerate(ORDER_OF_CHOICE) if kind in kinds), default=sys.maxsize)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """The words that choose among metrics of one name: the kind of tokens, the statistic, or both. `total` is
    no such statistic, because every throughput of a whole run has it."""
    if metric.tokens == "none":
        return (metric.statistic,)
    return (metric.tokens,) if metric.statistic == "total" else (metric.tokens, metric.statistic)


def normalised(a: Quantity, b: Quantity) -> tuple[list[Side], list[Reason]]:
    """Both numbers in one unit and kind of tokens, over the same GPUs; and why they cannot be compared."""
    metric_a, metric_b = a.metric, b.metric
    side_a, side_b = _side(metric_a), _side(metric_b)
    if metric_a.unit != metric_b.unit:
        side_a, side_b = _in_common_unit(side_a), _in_common_unit(side_b)
    aspects = [
        ("metric", metric_a.name, metric_b.name, "they are different quantities"),
        ("statistic", metric_a.statistic, metric_b.statistic, "one does not give the other"),
        ("unit", side_a.unit, side_b.unit, "there is no factor between them"),
    ]
    reasons = [Reason(name, against(of_a, of_b), why) for name, of_a, of_b, why in aspects if of_a != of_b]
    if not metric_a.value or not metric_b.value:
        values = against(f"{metric_a.value:g}", f"{metric_b.value:g}")
        reasons.append(Reason("value", values, "0 is not measured"))
    if metric_a.tokens != metric_b.tokens or metric_a.tokens == "unknown":
        side_a, side_b = _output_only(a, side_a), _output_only(b, side_b)
        if (side_a.tokens, side_b.tokens) != ("output", "output"):
            why = "total is input and output tokens, and nothing says how many of them were output"
            reasons.append(Reason("tokens", against(metric_a.tokens, metric_b.tokens), why))
    of_requests = _is_of_a_request(metric_a) and _is_of_a_request(metric_b)
    if of_requests or _have_one_scope(a, b):
        return [side_a, side_b], reasons
    side_a, side_b = _per_gpu(a.run, side_a), _per_gpu(b.run, side_b)
    if (side_a.scope, side_b.scope) != ("gpu", "gpu"):
        scopes = [f"{q.metric.scope} ({all_gpus(q.run) or 'unknown number of'} GPUs)" for q in (a, b)]
        why = "a number of one GPU, a node or all GPUs is another number, and how many they are is not known"
        reasons.append(Reason("scope", against(*scopes), why))
    return [side_a, side_b], reasons


def _have_one_scope(a: Quantity, b: Quantity) -> bool:
    """Whether both are numbers of one GPU, or of the same part of deployments that are laid out alike."""
    if a.metric.scope != b.metric.scope or a.metric.scope == "unknown":
        return False
    return a.metric.scope == "gpu" or _layout(a.run) == _layout(b.run)


def _layout(run: ServingRun) -> tuple[int | None, ...]:
    return all_gpus(run), run.nodes, run.parallelism.prefill_gpus, run.parallelism.decode_gpus


def of_instance(quantity: Quantity) -> float | None:
    """The number over all GPUs that serve; None if their number is not known."""
    metric, gpus = quantity.metric, all_gpus(quantity.run)
    if _is_of_a_request(metric) or metric.scope in ("instance", "cluster"):
        return metric.value
    side = _per_gpu(quantity.run, _side(metric))
    return side.value * gpus if side.scope == "gpu" and gpus else None


def _is_of_a_request(metric: Metric) -> bool:
    """Whether a metric is of single requests or steps, so that it is not divided by the number of GPUs."""
    return metric.unit in ("ms", "s", "us") or metric.name == "concurrency"


def _side(metric: Metric) -> Side:
    return Side(metric.value, metric.unit, metric.scope, metric.tokens)


def _in_common_unit(side: Side) -> Side:
    if side.unit not in UNITS:
        return side
    factor, unit = UNITS[side.unit]
    return side.to(side.value * factor, f"{side.value:g} {side.unit} x {factor:g}", unit=unit)


def _output_only(quantity: Quantity, side: Side) -> Side:
    """The number for output tokens: the run's own, or by their share of all tokens."""
    run, metric = quantity.run, quantity.metric
    if side.tokens != "total":
        return side
    reported = run.metric(metric.name, metric.statistic, "output", metric.scope)
    if reported:
        step = f"its run's own output throughput, {reported.value:g} {reported.unit}"
        return side.to(reported.value, step, tokens="output")
    isl, osl = length(run, "input"), length(run, "output")
    if isl is None or not osl:
        return side
    step = f"x {osl:g} / ({isl:g} + {osl:g}) for output tokens alone"
    return side.to(side.value * osl / (isl + osl), step, tokens="output")


def _per_gpu(run: ServingRun, side: Side) -> Side:
    """The number for one GPU of all that serve, if their number is known."""
    gpus, split = all_gpus(run), run.parallelism
    if not gpus:
        return side
    if side.scope in ("instance", "cluster"):
        prefill = f", {split.prefill_gpus} of prefill with them" if split.prefill_gpus else ""
        return side.to(side.value / gpus, f"/ {gpus} GPUs{prefill}", scope="gpu")
    if side.scope == "node" and run.nodes:
        return side.to(side.value * run.nodes / gpus, f"/ {gpus / run.nodes:g} GPUs of a node", scope="gpu")
    for role, share in (("decode", split.decode_gpus), ("prefill", split.prefill_gpus)):
        if side.scope == f"{role}_gpu" and share:
            step = f"x {share} GPUs of {role} / {gpus} GPUs"
            return side.to(side.value * share / gpus, step, scope="gpu")
    return side


Verdict = Literal["alike", "normalised", "refused"]


@dataclass(frozen=True)
class Comparison:
    """Two quantities, compared or refused.

    reasons:   why it is refused; empty if it is not
    a, b:      the numbers, as far as they could be normalised, also if it is refused
    differing: differences that do not refuse it: the hardware, the server's flags ...
    uncertain: what one side or both do not say
    found:     what `serving load` finds in either, except what refuses
    ratio:     a over b; None if it is refused
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    a: Side
    b: Side
    differing: tuple[str, ...]
    uncertain: tuple[str, ...]
    found: tuple[str, ...]
    ratio: float | None


def compare(
    a: Quantity, b: Quantity, assumed: Collection[str] = (), despite: Collection[str] = ()
) -> Comparison:
    """Compares a quantity with another.

    assumed: names of identity fields that are assumed to be alike if they are not known; `all`: each
    despite: names of identity.SERVER that may differ
    """
    if "all" in assumed:
        assumed = FIELDS
    (side_a, side_b), reasons = normalised(a, b)
    differing = []
    not_known = []
    for difference in identity.unlike(identity.of_run(a.run), identity.of_run(b.run)):
        values = against(difference.a, difference.b)
        # A value that one side alone says is a difference if the user lets them differ.
        is_shown = difference.is_known or (difference.name in despite and difference.a != difference.b)
        if why := _refusal(difference, assumed, despite):
            reasons.append(Reason(difference.name, values, why))
        elif is_shown:
            differing.append(f"{difference.name}: {values}")
        else:
            not_known.append(difference)
    found = []
    for side, run in (("A", a.run), ("B", b.run)):
        for finding in run.findings:
            if finding.severity == "wrong":
                why = "`serving load` finds that wrong"
                reasons.append(Reason(f"numbers of {side}", finding.message, why))
            else:
                found.append(f"{side}: {finding.severity}: {finding.message}")
        found += [f"{side}: {note}" for note in run.notes]
    verdict: Verdict = "normalised" if side_a.steps or side_b.steps else "alike"
    return Comparison(
        verdict="refused" if reasons else verdict,
        reasons=tuple(reasons),
        a=side_a,
        b=side_b,
        differing=(*differing, *other_differences(a.run, b.run)),
        uncertain=(*identity.unsaid(not_known, a.run.id, b.run.id), *_uncertain(a, b)),
        found=tuple(found),
        ratio=None if reasons else side_a.value / side_b.value,
    )


def _refusal(difference: Difference, assumed: Collection[str], despite: Collection[str]) -> str:
    """Why a difference refuses the comparison; empty if it does not."""
    name = difference.name
    field = FIELDS[name]
    if name in despite:
        return ""
    hint = f"; --despite '{name}' compares them" if name in SERVER else ""
    if difference.is_known:
        return f"{field.why}{hint}" if field.why else ""
    # If one side speculates, the other has to say whether it does.
    speculates = name == "speculative decoding" and {difference.a, difference.b} - {"none", UNKNOWN}
    if name in assumed or not (field.needed or speculates):
        return ""
    if name == "engine":
        hint = "; --engine A=NAME or B=NAME tells it"
    return f"what is not known is not alike{hint}; --assume '{name}' takes it to be alike"


def _uncertain(a: Quantity, b: Quantity) -> Iterator[str]:
    """What may differ, though no known value shows it, a line each."""
    run_a, run_b = a.run, b.run
    of_a, of_b = identity.of_run(run_a), identity.of_run(run_b)
    for name in ("precision", "input length", "output length"):
        pair = of_a[name], of_b[name]
        is_vague = "fp8" in pair or any(value.startswith(UP_TO) for value in pair)
        if UNKNOWN not in pair and pair[0] != pair[1] and is_vague and FIELDS[name].agree(*pair):
            yield f"{name}: {against(*pair)}"
    accepted_a, accepted_b = run_a.accept_length or 1.0, run_b.accept_length or 1.0
    if abs(accepted_a / accepted_b - 1) > 0.01:
        yield f"accept length: {accepted_a:.3g} against {accepted_b:.3g}, which the ratio holds, too"
    silent = [run.id for run in (run_a, run_b) if not server_settings(run)]
    if len(silent) == 1:
        yield f"{silent[0]} does not say its server's flags"
    for run in (run_a, run_b):
        if identity.is_trimmed(run):
            yield f"{run.id} counts a trimmed window, which is the steady state at its best"
    gpus_a, gpus_b = all_gpus(run_a), all_gpus(run_b)
    in_flight = run_a.workload.concurrency
    if in_flight and in_flight == run_b.workload.concurrency and gpus_a and gpus_b and gpus_a != gpus_b:
        yield f"the same requests in flight are {in_flight / gpus_a:g} a GPU against {in_flight / gpus_b:g}"


@functools.cache
def published_runs() -> dict[str, ServingRun]:
    """The runs of the documents by id, and those of the raw files behind them, as `dstack.online:31`. The
    latter have the documented configuration of their machine, engine and version, if there is one."""
    published = [*documents(FOLDER), *documents(FOLDER / "others")]
    runs = {run.id: examined(run) for document in published for run in document.runs}
    setups = [setup for document in published for setup in document.configurations if setup.version]
    for path in sorted(FOLDER.glob("*/*.csv")):
        for run in load(path):
            server = (run.hardware, run.engine, run.version)
            alike = [setup for setup in setups if (setup.hardware, setup.engine, setup.version) == server]
            update = {"id": f"{run.client}:{run.source.rpartition(':')[2]}"}
            if len(alike) == 1:
                update |= {key: getattr(alike[0], key) for key in FROM_SETUP}
                update["configuration"] = alike[0].name
            runs[update["id"]] = run.model_copy(update=update)
    return runs


def find(name: str) -> ServingRun:
    """A published run by its id, or a run of a file: `FILE` if it is the only one, the id that `serving load`
    gives it, or `FILE:ROW`. ROW is what such an id has after the file's name; if the ids do not end with a
    line, it may also be the number of the run, from 1. Raises UsageError."""
    paths = (name, name.rpartition(":")[0], name.rpartition("[")[0])
    path = next((path for path in paths if path and archive.is_file(Path(path))), "")
    if not path:
        return _published(name)
    runs, row = load(path), name.removeprefix(path).lstrip(":")
    by_row = {run.id.removeprefix(path).lstrip(":"): run for run in reversed(runs)}
    if not any(run.id.rpartition(":")[2].isdigit() for run in runs):
        by_row = {str(number): run for number, run in enumerate(runs, 1)} | by_row
    if row in by_row:
        return by_row[row]
    if not row and len(runs) == 1:
        return runs[0]
    ids = ", ".join(run.id for run in runs[:3]) + (" ..." if len(runs) > 3 else "")
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    wrong = f"none is {row!r}" if row else "one is to be named"
    raise UsageError(f"{path} has {count}, and {wrong}: {ids}")


def _published(name: str) -> ServingRun:
    runs = published_runs()
    if name in runs:
        return runs[name]
    if Path(name).is_dir():
        raise UsageError(f"cannot read {name}: it is a directory; name one file in it")
    file, colon, row = name.rpartition(":")
    rows = [int(id.removeprefix(f"{file}:")) for id in runs if colon and id.startswith(f"{file}:")]
    if rows:
        raise UsageError(f"{file} has no row {row}; its rows are {min(rows)} to {max(rows)}")
    alike = ", ".join(near(name, runs) or sorted(runs)[:3])
    raise UsageError(f"{name!r} is neither a file nor the id of a published run (such as {alike})")
