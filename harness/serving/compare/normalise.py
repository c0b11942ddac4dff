"""Normalisation of a quantity: to the unit, the tokens and the GPUs that make it comparable, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from harness.serving.compare.quantity import Quantity
from harness.serving.schema import Metric


@dataclass(frozen=True)
class Reason:
    """Why two quantities are not alike: aspect, what it is of each, and why that matters."""

    aspect: str
    a: str
    b: str
    why: str

    @property
    def text(self) -> str:
        return f"{self.aspect}: {self.a} against {self.b}; {self.why}"


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
    sides = [_in_one_unit(quantity, other) for quantity, other in ((a, b), (b, a))]
    if a.metric.tokens != b.metric.tokens or "unknown" in (a.metric.tokens, b.metric.tokens):
        sides = [_output_only(quantity, side) for quantity, side in zip((a, b), sides, strict=True)]
        if not all(side.tokens == "output" for side in sides):
            why = "total is input and output tokens, and nothing says how many of them were output"
            reasons.append(Reason("tokens", a.metric.tokens, b.metric.tokens, why))
    if per_request(a.metric) and per_request(b.metric):
        return sides, reasons
    scopes, gpus = (a.metric.scope, b.metric.scope), (a.all_gpus, b.all_gpus)
    if scopes[0] == scopes[1] != "unknown" and _share_of_all(a) == _share_of_all(b):
        return sides, reasons
    sides = [_per_gpu(quantity, side) for quantity, side in zip((a, b), sides, strict=True)]
    if not all(side.scope == "gpu" for side in sides):
        names = [f"{scope} ({n or 'unknown number of'} GPUs)" for scope, n in zip(scopes, gpus, strict=True)]
        why = (
            "a number of one GPU, of one node or of all of them is another number, and how many is not known"
        )
        reasons.append(Reason("scope", names[0], names[1], why))
    return sides, reasons


def _share_of_all(quantity: Quantity) -> tuple[object, ...]:
    """What fixes how much of all GPUs a quantity's scope is; the same for any two quantities of one GPU."""
    split = quantity.parallelism
    parts = {
        "gpu": (),
        "node": (quantity.all_gpus, quantity.nodes),
        "decode_node": (quantity.all_gpus, quantity.nodes, split.decode_gpus),
        "decode_gpu": (quantity.all_gpus, split.decode_gpus),
        "prefill_gpu": (quantity.all_gpus, split.prefill_gpus),
    }
    return parts.get(quantity.metric.scope, (quantity.all_gpus,))


def per_request(metric: Metric) -> bool:
    """Whether a metric is of single requests or steps, so that no number of GPUs divides it."""
    return metric.unit in ("ms", "s", "us") or metric.name in ("concurrency",)


def _in_one_unit(quantity: Quantity, other: Quantity) -> Side:
    metric = quantity.metric
    side = Side(metric.value, metric.unit, metric.scope, metric.tokens)
    if metric.unit == other.metric.unit:
        return side
    factor, unit = unit_of(metric)
    steps = (f"{metric.value:g} {metric.unit} x {factor:g}",) if unit != metric.unit else ()
    return Side(metric.value * factor, unit, side.scope, side.tokens, steps)


def _output_only(quantity: Quantity, side: Side) -> Side:
    if side.tokens != "total":
        return side
    reported = next(
        (
            metric
            for metric in quantity.others
            if (metric.name, metric.tokens, metric.scope, metric.statistic)
            == (quantity.metric.name, "output", quantity.metric.scope, quantity.metric.statistic)
        ),
        None,
    )
    if reported:
        step = f"its run's own output throughput, {reported.value:g} {reported.unit}"
        return Side(reported.value, side.unit, side.scope, "output", (*side.steps, step))
    if quantity.input_len is None or not quantity.output_len:
        return side
    into, out = quantity.input_len, quantity.output_len
    share = out / (into + out)
    step = f"x {out:g} / ({into:g} + {out:g}) for output tokens alone"
    return Side(side.value * share, side.unit, side.scope, "output", (*side.steps, step))


def _per_gpu(quantity: Quantity, side: Side) -> Side:
    share = gpu_share(quantity)
    if share is None or side.scope == "gpu":
        return side
    factor, step = share
    return Side(side.value * factor, side.unit, "gpu", side.tokens, (*side.steps, step))


def of_instance(quantity: Quantity) -> float | None:
    """The number over all GPUs that serve; None where it is not known of how many it is."""
    metric, gpus = quantity.metric, quantity.all_gpus
    if per_request(metric) or metric.scope in ("instance", "cluster"):
        return metric.value
    side = _per_gpu(quantity, Side(metric.value, metric.unit, metric.scope, metric.tokens))
    return side.value * gpus if side.scope == "gpu" and gpus else None


def gpu_share(quantity: Quantity) -> tuple[float, str] | None:
    """The factor from a quantity's scope to one GPU of all that serve, and how it came; None: not known."""
    gpus, nodes, split = quantity.all_gpus, quantity.nodes, quantity.parallelism
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
    if scope == "decode_node" and gpus and nodes and split.decode_gpus:
        decode = split.decode_gpus * nodes / gpus
        return (
            decode / gpus,
            f"x {decode:g} decode nodes / {gpus} GPUs, {gpus - split.decode_gpus} of prefill",
        )
    return None
