"""A quantity: one number of a run, and its normalisation to the unit, tokens and GPUs of another one."""

from __future__ import annotations

from dataclasses import dataclass

from harness.serving.compare.identity import all_gpus, length
from harness.serving.schema import Metric, ServingRun


@dataclass(frozen=True)
class Quantity:
    """A metric of a run."""

    run: ServingRun
    metric: Metric


@dataclass(frozen=True)
class Reason:
    """Why two quantities are not compared: aspect, what it is of each side, and why that matters."""

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
    """A quantity's number, as far as it could be normalised, and by which steps."""

    value: float
    unit: str
    scope: str
    tokens: str
    steps: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        kind = f"{self.tokens} " if self.tokens not in ("none", "unknown") else ""
        return f"{self.value:,.6g} {kind}{self.unit}" + (" a GPU" if self.scope == "gpu" else "")


def unit_of(metric: Metric) -> tuple[float, str]:
    """(factor, unit) to what all of its kind are compared in."""
    return {"s": (1e3, "ms"), "us": (1e-3, "ms"), "ms": (1.0, "ms")}.get(metric.unit, (1.0, metric.unit))


def normalised(a: Quantity, b: Quantity) -> tuple[list[Side], list[Reason]]:
    """Both numbers in one unit, of one kind of tokens, over the same GPUs; and what stands in the way."""
    reasons = []
    sides = [_in_one_unit(quantity.metric, other.metric) for quantity, other in ((a, b), (b, a))]
    if a.metric.tokens != b.metric.tokens or "unknown" in (a.metric.tokens, b.metric.tokens):
        sides = [_output_only(quantity, side) for quantity, side in zip((a, b), sides, strict=True)]
        if not all(side.tokens == "output" for side in sides):
            why = "total is input and output tokens, and nothing says how many of them were output"
            reasons.append(Reason("tokens", against(a.metric.tokens, b.metric.tokens), why))
    if _is_of_a_request(a.metric) and _is_of_a_request(b.metric):
        return sides, reasons
    scopes = a.metric.scope, b.metric.scope
    if scopes[0] == scopes[1] != "unknown" and (scopes[0] == "gpu" or _layout(a.run) == _layout(b.run)):
        return sides, reasons
    sides = [_per_gpu(quantity, side) for quantity, side in zip((a, b), sides, strict=True)]
    if not all(side.scope == "gpu" for side in sides):
        names = [f"{q.metric.scope} ({all_gpus(q.run) or 'unknown number of'} GPUs)" for q in (a, b)]
        why = "a number of one GPU, a node or all GPUs is another number, and how many they are is not known"
        reasons.append(Reason("scope", against(*names), why))
    return sides, reasons


def of_instance(quantity: Quantity) -> float | None:
    """The number over all GPUs that serve; None where it is not known of how many it is."""
    metric, gpus = quantity.metric, all_gpus(quantity.run)
    if _is_of_a_request(metric) or metric.scope in ("instance", "cluster"):
        return metric.value
    side = _per_gpu(quantity, Side(metric.value, metric.unit, metric.scope, metric.tokens))
    return side.value * gpus if side.scope == "gpu" and gpus else None


def _layout(run: ServingRun) -> tuple[int | None, ...]:
    split = run.parallelism
    return all_gpus(run), run.nodes, split.prefill_gpus, split.decode_gpus


def _is_of_a_request(metric: Metric) -> bool:
    """Whether a metric is of single requests or steps, so that no number of GPUs divides it."""
    return metric.unit in ("ms", "s", "us") or metric.name == "concurrency"


def _in_one_unit(metric: Metric, other: Metric) -> Side:
    factor, unit = unit_of(metric)
    if metric.unit in (other.unit, unit):
        return Side(metric.value, metric.unit, metric.scope, metric.tokens)
    step = f"{metric.value:g} {metric.unit} x {factor:g}"
    return Side(metric.value * factor, unit, metric.scope, metric.tokens, (step,))


def _output_only(quantity: Quantity, side: Side) -> Side:
    """Of output tokens: the run's own such number, or by the share of output tokens."""
    run, metric = quantity.run, quantity.metric
    if side.tokens != "total":
        return side
    reported = run.metric(metric.name, metric.statistic, "output", metric.scope)
    if reported:
        step = f"its run's own output throughput, {reported.value:g} {reported.unit}"
        return Side(reported.value, side.unit, side.scope, "output", (*side.steps, step))
    into, out = length(run, "input"), length(run, "output")
    if into is None or not out:
        return side
    step = f"x {out:g} / ({into:g} + {out:g}) for output tokens alone"
    return Side(side.value * out / (into + out), side.unit, side.scope, "output", (*side.steps, step))


def _per_gpu(quantity: Quantity, side: Side) -> Side:
    share = _gpu_share(quantity)
    if share is None or side.scope == "gpu":
        return side
    factor, step = share
    return Side(side.value * factor, side.unit, "gpu", side.tokens, (*side.steps, step))


def _gpu_share(quantity: Quantity) -> tuple[float, str] | None:
    """The factor from a quantity's scope to one GPU of all that serve, and how it came; None: not known."""
    gpus, nodes, split = all_gpus(quantity.run), quantity.run.nodes, quantity.run.parallelism
    scope = quantity.metric.scope
    if scope in ("instance", "cluster") and gpus:
        prefill = f", {split.prefill_gpus} of prefill with them" if split.prefill_gpus else ""
        return 1 / gpus, f"/ {gpus} GPUs{prefill}"
    if scope == "node" and gpus and nodes:
        return nodes / gpus, f"/ {gpus / nodes:g} GPUs of a node"
    if scope in ("decode_gpu", "prefill_gpu") and gpus:
        role = scope.removesuffix("_gpu")
        of_role = split.decode_gpus if role == "decode" else split.prefill_gpus
        return (of_role / gpus, f"x {of_role} GPUs of {role} / {gpus} GPUs") if of_role else None
    return None
