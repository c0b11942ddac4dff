"""Quantities by name: a row of a client's file, a published run or claim, and which metric of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare import identity
from harness.serving.compare.quantity import Quantity
from harness.serving.integrity import examined
from harness.serving.names import known_engine
from harness.serving.published.documents import Claim, Configuration
from harness.serving.published.index import known_by_id, published_configurations
from harness.serving.schema import Metric, Parallelism, ServingRun

PREFERRED = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")
MATCH = 1e-3  # relative difference of a claim's number and its run's
OF_CONFIGURATION = ("hardware", "gpus", "nodes", "engine", "version", "image", "flags", "environment",
                    "parallelism", "mode")  # fmt: skip

Known = Mapping[str, ServingRun | Claim]
"""Runs and claims by the ids that `refers_to` writes."""


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
        return _row_of_file(path, row, name)
    known = known_by_id()
    if name not in known:
        near = ", ".join(sorted(known)[:6])
        raise UsageError(
            f"{name!r} is neither a file nor the id of a published run or claim (such as {near})"
        )
    found = known[name]
    return examined(found) if isinstance(found, ServingRun) and not found.findings else found


def engines_of(options: Sequence[str]) -> dict[str, str]:
    """The engines of A and of B that `NAME`, `A=NAME` or `B=NAME` give; empty where none is given."""
    engines = {"A": "", "B": ""}
    for option in options:
        side, _, name = option.rpartition("=")
        if side not in ("", "A", "B"):
            raise UsageError(f"cannot read --engine {option!r}; write NAME, A=NAME or B=NAME")
        engines |= dict.fromkeys([side] if side else engines, known_engine(name))
    return engines


def with_engine(source: ServingRun | Claim, engine: str) -> ServingRun | Claim:
    """With that engine, where it is not empty."""
    if isinstance(source, Claim):
        return source.model_copy(update={"engine": engine or source.engine})
    return identity.with_engine(source, engine) if engine else source


def _row_of_file(path: str, row: str, name: str) -> ServingRun:
    runs = load(path)
    by_id = {run.id: run for run in reversed(runs)}
    if name in by_id:
        return by_id[name]
    by_line = any(run.id.rpartition(":")[2].isdigit() for run in runs)
    if row.isdigit() and 1 <= int(row) <= len(runs) and not by_line:
        return runs[int(row) - 1]
    ids = ", ".join(run.id for run in runs[:3])
    raise UsageError(f"{path} has no row {row!r}; its {len(runs)} rows: {ids}" + (" ..." if runs[3:] else ""))


def default_metric(a: ServingRun | Claim, b: ServingRun | Claim) -> str:
    """The throughput, or else the first metric that both have."""
    left, right = (list(dict.fromkeys(metric.name for metric in _metrics(side))) for side in (a, b))
    return next((name for name in (*PREFERRED, *left) if name in left and name in right), [*left, ""][0])


def _metrics(source: ServingRun | Claim) -> tuple[Metric, ...]:
    if isinstance(source, Claim):
        return tuple(filter(None, (source.metric, source.meant)))
    return source.metrics


def quantity_of(source: ServingRun | Claim, name: str, wanted: str) -> Quantity:
    """Its metric `NAME`, or `NAME:WHICH`, WHICH being a statistic or a kind of tokens."""
    metric, _, which = wanted.partition(":")
    if isinstance(source, Claim):
        return _of_claim(source, name, metric, which)
    alike = [m for m in source.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        kinds = dict.fromkeys(f"{m.name}:{_kinds(m)[0]}" for m in source.metrics)
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {', '.join(kinds) or 'none'}")
    order = ("output", "total", "unknown", "mean", "median")
    rank = {word: i for i, word in enumerate(order)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return Quantity(source, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What tells metrics of one name apart: `total` is of tokens where it counts them."""
    if metric.tokens == "none":
        return (metric.statistic,)
    return (metric.tokens,) if metric.statistic == "total" else (metric.tokens, metric.statistic)


def _of_claim(claim: Claim, name: str, metric: str, which: str) -> Quantity:
    if claim.metric is None or claim.metric.name != metric:
        has = claim.metric.name if claim.metric else "no number"
        raise UsageError(f"{name} has no metric {metric!r}; it has: {has}")
    quantity = sourced(claim, known_by_id(), published_configurations().get(claim.configuration))
    if which not in ("", quantity.metric.statistic, quantity.metric.tokens):
        has = f"{quantity.metric.statistic}, {quantity.metric.tokens} tokens"
        raise UsageError(f"{name} is no {metric}:{which}: its {metric} is {has}")
    return quantity


def sourced(claim: Claim, known: Known, about: Configuration | None) -> Quantity:
    """A claim's number. What its document leaves open is taken from the run whose throughput it prints, or
    else from the claim's configuration."""
    metric = claim.metric
    if metric is None:
        raise UsageError(f"{claim.id} claims no number")
    if claim.meant and "unknown" in (metric.scope, metric.tokens):
        opened = [key for key in ("scope", "tokens") if getattr(metric, key) == "unknown"]
        metric = metric.model_copy(update={key: getattr(claim.meant, key) for key in opened})
    runs = _runs_of(claim, known) if metric.unit == "tok/s" else []
    fits = [
        (run, kind)
        for run in runs
        for kind, value in by_kind(run).items()
        if claim.upper is None and abs(metric.value - value) <= MATCH * value
    ]
    if len(fits) != 1 and len(runs) == 1:
        fits = [(runs[0], "")]
    if len(fits) != 1:
        return Quantity(_as_run(claim, metric, about), metric, claim.bound)
    [(run, kind)] = fits
    update = {"tokens": kind} if kind in ("output", "total") else {}
    if metric.scope == "unknown" and (whole := run.metric("throughput")):
        update["scope"] = whole.scope
    return Quantity(run.model_copy(update={"id": claim.id}), metric.model_copy(update=update), claim.bound)


def _runs_of(claim: Claim, known: Known, seen: frozenset[str] = frozenset()) -> list[ServingRun]:
    """The runs that a claim rests on, through other claims too, in its order."""
    runs: list[ServingRun] = []
    for reference in claim.refers_to:
        about = known.get(reference)
        if isinstance(about, ServingRun):
            runs.append(about)
        elif about is not None and reference not in seen:
            runs += _runs_of(about, known, seen | {reference})
    return list({run.id: run for run in runs}.values())


def by_kind(run: ServingRun) -> dict[str, float]:
    """Its tokens per second by kind: as reported, from what was counted, and the total as the sum."""
    rates = [m for m in run.metrics if m.name == "throughput" and m.unit == "tok/s"]
    kinds: dict[str, float] = {m.tokens: m.value for m in reversed(rates) if m.scope == rates[0].scope}
    counted = run.totals
    for kind, tokens in (("output", counted.output_tokens), ("input", counted.input_tokens)):
        if tokens and counted.duration_s:
            kinds.setdefault(kind, tokens / counted.duration_s)
    if "input" in kinds and "output" in kinds:
        kinds.setdefault("total", kinds["input"] + kinds["output"])
    return {kind: value for kind, value in kinds.items() if kind in ("output", "total", "unknown")}


def _as_run(claim: Claim, metric: Metric, about: Configuration | None) -> ServingRun:
    """A claim as the run that it says it is of."""
    values = {name: getattr(claim, name, None) for name in OF_CONFIGURATION}
    for name in OF_CONFIGURATION if about else ():
        if values[name] in (None, "", "unknown", (), {}, Parallelism()):
            values[name] = getattr(about, name)
    said = {name: value for name, value in values.items() if value is not None}
    return ServingRun(
        id=claim.id, client="", source=claim.document, workload=claim.workload, metrics=(metric,), **said
    )
