"""Quantities by name: a row of a client's file, a published run or claim, and which metric of it."""

from __future__ import annotations

from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare.quantity import Quantity, quantity_of_run
from harness.serving.compare.sourced import sourced
from harness.serving.published.documents import Claim
from harness.serving.published.index import known_by_id, published_configurations
from harness.serving.schema import Metric, ServingRun

PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")


def find(name: str) -> ServingRun | Claim:
    """A published run or claim by its id, or a row of a file: `FILE`, `FILE:ROW` where it has several.

    ROW is a line as the ids of `serving load` have it, or else counted from 1. Raises UsageError.
    """
    path, _, row = name.rpartition(":")
    if archive.is_file(Path(name)):
        runs = load(name)
        if len(runs) > 1:
            raise UsageError(
                f"{name} has {len(runs)} runs: name one, {name}:1 to {name}:{len(runs)}, or by its id"
            )
        return runs[0]
    if path and archive.is_file(Path(path)):
        runs = load(path)
        by_id = {run.id: run for run in reversed(runs)}
        if name in by_id:
            return by_id[name]
        if row.isdigit() and 1 <= int(row) <= len(runs) and not any(_by_line(run) for run in runs):
            return runs[int(row) - 1]
        ids = ", ".join(run.id for run in runs[:3])
        raise UsageError(
            f"{path} has no row {row!r}; its {len(runs)} rows: {ids}" + (" ..." if runs[3:] else "")
        )
    known = known_by_id()
    if name not in known:
        near = ", ".join(sorted(known)[:6])
        raise UsageError(
            f"{name!r} is neither a file nor the id of a published run or claim (such as {near})"
        )
    return known[name]


def _by_line(run: ServingRun) -> bool:
    return run.id.rpartition(":")[2].isdigit()


def metrics_of(source: ServingRun | Claim) -> tuple[Metric, ...]:
    if isinstance(source, Claim):
        return tuple(filter(None, (source.metric, source.meant)))
    return source.metrics


def default_metric(a: ServingRun | Claim, b: ServingRun | Claim) -> str:
    """The throughput, of output tokens where both say so; else the first that both have."""
    left, right = ({m.name for m in metrics_of(source)} for source in (a, b))
    names = [*PREFERRED, *(m.name for m in metrics_of(a))]
    return next((name for name in names if name in left & right), next(iter(left), "throughput"))


def quantity_of(source: ServingRun | Claim, name: str, wanted: str) -> Quantity:
    """Its metric `NAME`, or `NAME:WHICH`, WHICH being a statistic or a kind of tokens."""
    if isinstance(source, Claim):
        return _of_claim(source, name, wanted)
    metric, _, which = wanted.partition(":")
    alike = [m for m in source.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        has = ", ".join(
            dict.fromkeys(
                f"{m.name}:{m.statistic if m.tokens == 'none' else m.tokens}" for m in source.metrics
            )
        )
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {has or 'none'}")
    order = ("output", "total", "unknown", "mean", "median")
    rank = {word: i for i, word in enumerate(order)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return quantity_of_run(source, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What tells metrics of one name apart: `total` is of tokens where it counts them."""
    sums = metric.tokens != "none" and metric.statistic == "total"
    return (metric.tokens,) if sums else (metric.tokens, metric.statistic)


def _of_claim(claim: Claim, name: str, wanted: str) -> Quantity:
    """What its document leaves open is taken from the row that it prints, or from its source."""
    metric, _, which = wanted.partition(":")
    if claim.metric is None or claim.metric.name != metric:
        has = claim.metric.name if claim.metric else "no number"
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {has}")
    quantity = sourced(
        claim, claim.metric, known_by_id(), published_configurations().get(claim.configuration)
    )
    if which not in ("", quantity.metric.statistic, quantity.metric.tokens):
        has = f"{quantity.metric.statistic}, {quantity.metric.tokens} tokens"
        raise UsageError(f"{name} is no {wanted!r}: its {metric} is {has}")
    return quantity
