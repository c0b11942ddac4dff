"""Comparison of two quantities: their ratio with all other differences, or a refusal with every reason.

A quantity is a number of a run, chosen by name, and converted to one unit, kind of tokens and number of GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType

from harness import archive
from harness.errors import UsageError
from harness.report.notes import noted
from harness.report.text import significant
from harness.serving.clients.load import load
from harness.serving.compare import identity
from harness.serving.compare.identity import FIELDS, SERVER, UNKNOWN, UP_TO, Difference, all_gpus, length
from harness.serving.compare.settings import beside, server_settings
from harness.serving.integrity import examined
from harness.serving.published_documents import FOLDER, documents
from harness.serving.schema import Metric, ServingRun
from shapes.names import near, unknown

FROM_SETUP = ("image", "flags", "environment", "parallelism")
PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")
NOT_COMPARED = "not alike, not compared"
BEST = ("output", "total", "unknown", "mean", "median")
"""Kinds of tokens and statistics, in the order of choice."""
UNITS = {"s": (1e3, "ms"), "us": (1e-3, "ms")}
"""From a unit to the factor and the unit in which quantities of its kind are compared."""


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
    """The throughput, or else the first metric that both runs have."""
    left, right = (list(dict.fromkeys(metric.name for metric in run.metrics)) for run in (a, b))
    shared = [name for name in (*PREFERRED, *left) if name in left and name in right]
    return (shared or left or [""])[0]


def quantity_of(run: ServingRun, name: str, wanted: str) -> Quantity:
    """The run's metric `NAME` or `NAME:WHICH` (a statistic or kind of tokens). Raises UsageError."""
    metric, _, which = wanted.partition(":")
    alike = [m for m in run.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        names = [m.name for m in run.metrics]
        kinds = [f"{m.name}:{_kinds(m)[0]}" for m in run.metrics] if metric in names else names
        raise UsageError(unknown("metric", wanted, dict.fromkeys(kinds), of=name))
    rank = {word: i for i, word in enumerate(BEST)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return Quantity(run, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What distinguishes metrics of one name. The statistic `total` belongs to every number of tokens."""
    if metric.tokens == "none":
        return (metric.statistic,)
    return (metric.tokens,) if metric.statistic == "total" else (metric.tokens, metric.statistic)


def normalised(a: Quantity, b: Quantity) -> tuple[list[Side], list[Reason]]:
    """Both numbers in one unit and kind of tokens, over the same GPUs; and why they cannot be compared."""
    one, other = a.metric, b.metric
    sides = [_in_one_unit(one, other), _in_one_unit(other, one)]
    aspects = [
        ("metric", one.name, other.name, "they are different quantities"),
        ("statistic", one.statistic, other.statistic, "one does not give the other"),
        ("unit", sides[0].unit, sides[1].unit, "there is no factor between them"),
    ]
    reasons = [Reason(name, against(x, y), why) for name, x, y, why in aspects if x != y]
    if not one.value or not other.value:
        reasons.append(Reason("value", against(f"{one.value:g}", f"{other.value:g}"), "0 is not measured"))
    if one.tokens != other.tokens or one.tokens == "unknown":
        sides = [_output_only(quantity, side) for quantity, side in zip((a, b), sides, strict=True)]
        if not all(side.tokens == "output" for side in sides):
            why = "total is input and output tokens, and nothing says how many of them were output"
            reasons.append(Reason("tokens", against(one.tokens, other.tokens), why))
    if _is_of_a_request(one) and _is_of_a_request(other):
        return sides, reasons
    layouts = [(all_gpus(run), run.nodes, run.parallelism.prefill_gpus, run.parallelism.decode_gpus)
               for run in (a.run, b.run)]  # fmt: skip
    if one.scope == other.scope != "unknown" and (one.scope == "gpu" or layouts[0] == layouts[1]):
        return sides, reasons
    sides = [_per_gpu(quantity.run, side) for quantity, side in zip((a, b), sides, strict=True)]
    if not all(side.scope == "gpu" for side in sides):
        names = [f"{q.metric.scope} ({all_gpus(q.run) or 'unknown number of'} GPUs)" for q in (a, b)]
        why = "a number of one GPU, a node or all GPUs is another number, and how many they are is not known"
        reasons.append(Reason("scope", against(*names), why))
    return sides, reasons


def of_instance(quantity: Quantity) -> float | None:
    """The number over all GPUs that serve; None if their number is not known."""
    metric, gpus = quantity.metric, all_gpus(quantity.run)
    if _is_of_a_request(metric) or metric.scope in ("instance", "cluster"):
        return metric.value
    side = _per_gpu(quantity.run, _in_one_unit(metric, metric))
    return side.value * gpus if side.scope == "gpu" and gpus else None


def _is_of_a_request(metric: Metric) -> bool:
    """Whether a metric is of single requests or steps, so that it is not divided by the number of GPUs."""
    return metric.unit in ("ms", "s", "us") or metric.name == "concurrency"


def _in_one_unit(metric: Metric, other: Metric) -> Side:
    side = Side(metric.value, metric.unit, metric.scope, metric.tokens)
    if metric.unit == other.unit or metric.unit not in UNITS:
        return side
    factor, unit = UNITS[metric.unit]
    return side.to(metric.value * factor, f"{metric.value:g} {metric.unit} x {factor:g}", unit=unit)


def _output_only(quantity: Quantity, side: Side) -> Side:
    """The number for output tokens: the run's own, or by their share of all tokens."""
    run, metric = quantity.run, quantity.metric
    if side.tokens != "total":
        return side
    reported = run.metric(metric.name, metric.statistic, "output", metric.scope)
    if reported:
        step = f"its run's own output throughput, {reported.value:g} {reported.unit}"
        return side.to(reported.value, step, tokens="output")
    into, out = length(run, "input"), length(run, "output")
    if into is None or not out:
        return side
    step = f"x {out:g} / ({into:g} + {out:g}) for output tokens alone"
    return side.to(side.value * out / (into + out), step, tokens="output")


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

    verdict: Literal["alike", "normalised", "refused"]
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
    assumed = FIELDS if "all" in assumed else assumed
    (side_a, side_b), reasons = normalised(a, b)
    differing, unknown, found = [], [], []
    for each in identity.unlike(identity.of_run(a.run), identity.of_run(b.run)):
        if why := _refusal(each, assumed, despite):
            reasons.append(Reason(each.name, against(each.row, each.run), why))
        elif each.is_known or (each.name in despite and each.row != each.run):
            differing.append(f"{each.name}: {against(each.row, each.run)}")
        else:
            unknown.append(each)
    for side, run in (("A", a.run), ("B", b.run)):
        for one in run.findings:
            if one.severity == "wrong":
                reasons.append(Reason(f"numbers of {side}", one.message, "`serving load` finds that wrong"))
            else:
                found.append(f"{side}: {one.severity}: {one.message}")
        found += [f"{side}: {note}" for note in run.notes]
    return Comparison(
        "refused" if reasons else "normalised" if side_a.steps or side_b.steps else "alike",
        tuple(reasons), side_a, side_b, (*differing, *beside(a.run, b.run)),
        (*identity.unsaid(unknown, a.run.id, b.run.id), *_uncertain(a, b)), tuple(found),
        None if reasons else side_a.value / side_b.value,
    )  # fmt: skip


def _refusal(each: Difference, assumed: Collection[str], despite: Collection[str]) -> str:
    """Why a difference refuses the comparison; empty if it does not."""
    field = FIELDS[each.name]
    if each.name in despite:
        return ""
    despite_it = f"; --despite '{each.name}' compares them" if each.name in SERVER else ""
    if each.is_known:
        return field.why and field.why + despite_it
    speculates = each.name == "speculative decoding" and {each.row, each.run} - {"none", UNKNOWN}
    if each.name in assumed or not (field.needed or speculates):
        return ""
    told = "; --engine A=NAME or B=NAME tells it" if each.name == "engine" else despite_it
    return f"what is not known is not alike{told}; --assume '{each.name}' takes it to be alike"


def _uncertain(a: Quantity, b: Quantity) -> Iterator[str]:
    """What may differ, though no known value shows it, a line each."""
    of_a, of_b = identity.of_run(a.run), identity.of_run(b.run)
    for name in ("precision", "input length", "output length"):
        one, other = of_a[name], of_b[name]
        is_loose = "fp8" in (one, other) or UP_TO in one + other
        if one and other and one != other and is_loose and FIELDS[name].agree(one, other):
            yield f"{name}: {against(one, other)}"
    accepted = [quantity.run.accept_length or 1.0 for quantity in (a, b)]
    if abs(accepted[0] / accepted[1] - 1) > 0.01:
        yield f"accept length: {accepted[0]:.3g} against {accepted[1]:.3g}, which the ratio holds, too"
    silent = [quantity.run.id for quantity in (a, b) if not server_settings(quantity.run)]
    if len(silent) == 1:
        yield f"{silent[0]} does not say its server's flags"
    for quantity in (a, b):
        if identity.is_trimmed(quantity.run):
            yield f"{quantity.run.id} counts a trimmed window, which is the steady state at its best"
    gpus = all_gpus(a.run), all_gpus(b.run)
    each = a.run.workload.concurrency
    if each and each == b.run.workload.concurrency and gpus[0] and gpus[1] and gpus[0] != gpus[1]:
        yield f"the same requests in flight are {each / gpus[0]:g} a GPU against {each / gpus[1]:g}"


def _answer(metric: Metric, ratio: float) -> str:
    """Which is better, and by how much. ratio: A over B"""
    better, most = "AB"[(ratio < 1) == ("throughput" in metric.name)], max(ratio, 1 / ratio)
    other, one_each = "AB".replace(better, ""), "one run each: no interval"
    if f"{most:.3g}" == "1":
        return f"A and B are equal ({one_each})"
    if "throughput" in metric.name:
        return f"{better} is {most:.3g}x as fast as {other} ({one_each})"
    if metric.unit in ("ms", "s", "us"):
        return f"{better} takes {100 - 100 / most:.3g} % less than {other} ({one_each})"
    return f"A / B = {ratio:.4g} ({one_each})"


def comparison_text(a: Quantity, b: Quantity, comparison: Comparison) -> RenderableType:
    """The ratio, or that there is none; both numbers; and the reasons of a refusal, or the differences."""
    lines, names = [], []
    for name, quantity, side in (("A", a, comparison.a), ("B", b, comparison.b)):
        m, run = quantity.metric, quantity.run
        kind = "" if m.tokens == "none" else f" of {m.tokens} tokens"
        names.append(f"{'' if m.statistic == 'total' else f'{m.statistic} '}{m.name}{kind}")
        gpus = f"{all_gpus(run)} " if all_gpus(run) else ""
        about = (f"{gpus}{run.hardware or 'unknown hardware'}", run.engine or "unknown engine", run.version)
        lines.append(f"{name}  {run.id}: {' '.join(filter(None, about))}")
        lines.append(f"   {names[-1]}: {significant(m.value, 4)} {m.unit}, scope {m.scope}")
        if side.steps:
            of = f" {side.tokens}" if side.tokens not in ("none", "unknown") else ""
            gpu = " a GPU" if side.scope == "gpu" else ""
            number = f"{significant(side.value, 4)}{of} {side.unit}{gpu}"
            lines.append(f"   normalised: {number}  ({'; '.join(side.steps)})")
    after = ", after normalising" if comparison.verdict == "normalised" else ""
    first = f"{_answer(a.metric, comparison.ratio)}, {names[0]}{after}" if comparison.ratio else NOT_COMPARED
    told = (("refused", [reason.text for reason in comparison.reasons]), ("differs", comparison.differing),
            ("uncertain", comparison.uncertain), ("found", comparison.found))  # fmt: skip
    return Group(first, *lines, "", noted([(label, text) for label, texts in told for text in texts]))


# Finding two runs: in files, or published


@functools.cache
def published_runs() -> dict[str, ServingRun]:
    """The runs of the documents by id, and those of the raw files behind them, as `dstack.online:31`. The
    latter have the documented configuration of their machine, engine and version, if there is one."""
    every = [*documents(FOLDER), *documents(FOLDER / "others")]
    known = {run.id: examined(run) for document in every for run in document.runs}
    setups = [setup for document in every for setup in document.configurations if setup.version]
    for run in (run for path in sorted(FOLDER.glob("*/*.csv")) for run in load(path)):
        own = (run.hardware, run.engine, run.version)
        alike = [setup for setup in setups if (setup.hardware, setup.engine, setup.version) == own]
        name = f"{run.client}:{run.source.rpartition(':')[2]}"
        about = {"id": name}
        if len(alike) == 1:
            about |= {key: getattr(alike[0], key) for key in FROM_SETUP} | {"configuration": alike[0].name}
        known[name] = run.model_copy(update=about)
    return known


def find(name: str) -> ServingRun:
    """A published run by its id, or a row of a file: `FILE`, `FILE:ROW` if it has several, or the id that
    `serving load` gives it. If ids have no line, ROW counts from 1. Raises UsageError."""
    paths = (name, name.rpartition(":")[0], name.rpartition("[")[0])
    path = next((path for path in paths if path and archive.is_file(Path(path))), "")
    if not path:
        known = published_runs()
        if Path(name).is_dir():
            raise UsageError(f"cannot read {name}: it is a directory; name one file in it")
        if name not in known:
            file, colon, row = name.rpartition(":")
            rows = [int(id[len(file) + 1 :]) for id in known if colon and id.startswith(file + colon)]
            if rows:
                raise UsageError(f"{file} has no row {row}; its rows are {min(rows)} to {max(rows)}")
            alike = ", ".join(near(name, known) or sorted(known)[:3])
            raise UsageError(f"{name!r} is neither a file nor the id of a published run (such as {alike})")
        return known[name]
    runs = load(path)
    by_line = any(run.id.rpartition(":")[2].isdigit() for run in runs)
    by_row = {"": runs[0]} if len(runs) == 1 else {}
    by_row |= {str(number): run for number, run in enumerate(runs, 1) if not by_line}
    by_row |= {run.id.removeprefix(path).lstrip(":"): run for run in reversed(runs)}
    row = name.removeprefix(path).lstrip(":")
    if row in by_row:
        return by_row[row]
    ids = ", ".join(run.id for run in runs[:3]) + (" ..." if runs[3:] else "")
    wrong = f"none is {row!r}" if row else "one is to be named"
    raise UsageError(f"{path} has {len(runs)} run{'s' if runs[1:] else ''}, and {wrong}: {ids}")
