"""Quantities by name: a row of a client's file or a published run, and which metric of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare.quantity import Quantity
from harness.serving.names import known_engine
from harness.serving.published.index import published_runs
from harness.serving.schema import Metric, ServingRun

PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")


def find(name: str) -> ServingRun:
    """A published run by its id, or a row of a file: `FILE`, `FILE:ROW` where it has several.

    ROW is a line as the ids of `serving load` have it, or else counted from 1. Raises UsageError.
    """
    path, _, row = name.rpartition(":")
    if archive.is_file(Path(name)):
        path, row = name, ""
    elif not (path and archive.is_file(Path(path))):
        known = published_runs()
        if name not in known:
            near = ", ".join(sorted(known)[:6])
            raise UsageError(f"{name!r} is neither a file nor the id of a published run (such as {near})")
        return known[name]
    runs = load(path)
    by_line = any(run.id.rpartition(":")[2].isdigit() for run in runs)
    by_row = {str(number): run for number, run in enumerate(runs, 1) if not by_line}
    by_row |= {run.id.removeprefix(f"{path}:"): run for run in reversed(runs)}
    if not row and len(runs) == 1:
        return runs[0]
    if row in by_row:
        return by_row[row]
    ids = ", ".join(run.id for run in runs[:3]) + (" ..." if runs[3:] else "")
    raise UsageError(
        f"{path} has {len(runs)} runs, and {f'none is {row!r}' if row else 'one is to be named'}: {ids}"
    )


def engines_of(options: Sequence[str]) -> dict[str, str]:
    """The engines of A and of B that `NAME`, `A=NAME` or `B=NAME` give; empty where none is given."""
    engines = {"A": "", "B": ""}
    for option in options:
        side, _, name = option.rpartition("=")
        if side not in ("", "A", "B"):
            raise UsageError(f"cannot read --engine {option!r}; write NAME, A=NAME or B=NAME")
        engines |= dict.fromkeys([side] if side else engines, known_engine(name))
    return engines


def default_metric(a: ServingRun, b: ServingRun) -> str:
    """The throughput, or else the first metric that both have."""
    left, right = (list(dict.fromkeys(metric.name for metric in run.metrics)) for run in (a, b))
    return next((name for name in (*PREFERRED, *left) if name in left and name in right), [*left, ""][0])


def quantity_of(run: ServingRun, name: str, wanted: str) -> Quantity:
    """Its metric `NAME`, or `NAME:WHICH`, WHICH being a statistic or a kind of tokens."""
    metric, _, which = wanted.partition(":")
    alike = [m for m in run.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        kinds = dict.fromkeys(f"{m.name}:{_kinds(m)[0]}" for m in run.metrics)
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {', '.join(kinds) or 'none'}")
    order = ("output", "total", "unknown", "mean", "median")
    rank = {word: i for i, word in enumerate(order)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return Quantity(run, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What tells metrics of one name apart: `total` is of tokens where it counts them."""
    if metric.tokens == "none":
        return (metric.statistic,)
    return (metric.tokens,) if metric.statistic == "total" else (metric.tokens, metric.statistic)
