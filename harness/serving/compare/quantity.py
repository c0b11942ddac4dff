"""Quantities: numbers of runs, chosen by name, and brought to one unit, kind of tokens and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UsageError
from harness.serving.compare.identity import all_gpus, length
from harness.serving.schema import Metric, ServingRun

PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")
BEST = ("output", "total", "unknown", "mean", "median")
"""Kinds of tokens and statistics, in the order in which they are chosen."""
UNITS = {"s": (1e3, "ms"), "us": (1e-3, "ms")}
"""Unit -> factor to the unit that quantities of its kind are compared in."""


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
    """A quantity's number, as far as it could be normalised. steps: how, one line each"""

    value: float
    unit: str
    scope: str
    tokens: str
    steps: tuple[str, ...] = ()

    def to(self, value: float, step: str, **changes: Any) -> Side:
        return replace(self, value=value, steps=(*self.steps, step), **changes)


def default_metric(a: ServingRun, b: ServingRun) -> str:
    """The throughput, or else the first metric that both have."""
    left, right = (list(dict.fromkeys(metric.name for metric in run.metrics)) for run in (a, b))
    shared = [name for name in (*PREFERRED, *left) if name in left and name in right]
    return (shared or left or [""])[0]


def quantity_of(run: ServingRun, name: str, wanted: str) -> Quantity:
    """The run's metric `NAME`, or `NAME:WHICH`; WHICH is a statistic or a kind of tokens. Raises UsageError
    where the run, which the user calls `name`, has no such metric."""
    metric, _, which = wanted.partition(":")
    alike = [m for m in run.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        kinds = dict.fromkeys(f"{m.name}:{_kinds(m)[0]}" for m in run.metrics)
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {', '.join(kinds) or 'none'}")
    rank = {word: i for i, word in enumerate(BEST)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return Quantity(run, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What tells metrics of one name apart. The statistic `total` is that of every number of tokens."""
    if metric.tokens == "none":
        return (metric.statistic,)
    return (metric.tokens,) if metric.statistic == "total" else (metric.tokens, metric.statistic)


def normalised(a: Quantity, b: Quantity) -> tuple[list[Side], list[Reason]]:
    """Both numbers in one unit, of one kind of tokens, over the same GPUs; and why they cannot be set beside
    each other."""
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
    """The number over all GPUs that serve; None where the number of GPUs is not known."""
    metric, gpus = quantity.metric, all_gpus(quantity.run)
    if _is_of_a_request(metric) or metric.scope in ("instance", "cluster"):
        return metric.value
    side = _per_gpu(quantity.run, _in_one_unit(metric, metric))
    return side.value * gpus if side.scope == "gpu" and gpus else None


def _is_of_a_request(metric: Metric) -> bool:
    """Whether a metric is of single requests or steps, so that it is not divided by GPUs."""
    return metric.unit in ("ms", "s", "us") or metric.name == "concurrency"


def _in_one_unit(metric: Metric, other: Metric) -> Side:
    side = Side(metric.value, metric.unit, metric.scope, metric.tokens)
    if metric.unit == other.unit or metric.unit not in UNITS:
        return side
    factor, unit = UNITS[metric.unit]
    return side.to(metric.value * factor, f"{metric.value:g} {metric.unit} x {factor:g}", unit=unit)


def _output_only(quantity: Quantity, side: Side) -> Side:
    """The number of output tokens: as the run itself has it, or by their share of all tokens."""
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
    """The number over one GPU of all that serve, where it is known how many they are."""
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
