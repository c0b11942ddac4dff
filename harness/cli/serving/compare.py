"""`python -m harness serving compare A B`."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from harness import archive
from harness.errors import FAILED, OK, UsageError
from harness.files import write
from harness.serving.audit.rows import sourced
from harness.serving.clients.load import load
from harness.serving.compare.alike import Compared, compare
from harness.serving.compare.quantity import Figure, of_run
from harness.serving.published.documents import Claim
from harness.serving.published.index import known_by_id, published_configurations, published_corpus
from harness.serving.schema import Metric, ServingRun

FIRST = ("throughput", "output_throughput", "tpot", "itl", "ttft", "e2e")
WIDTH = 150


def show(a: str, b: str, metric: str | None, json_to: str | None) -> int:
    """Prints both numbers, normalised where they can be, or why not. Returns the exit code."""
    one, two = find(a), find(b)
    wanted = metric or default_metric(one, two)
    left, right = figure(one, a, wanted), figure(two, b, wanted)
    found = compare(left, right)
    if json_to:
        write(json_to, json.dumps({**asdict(found), "ratio": found.ratio}, indent=1) + "\n")
    else:
        print("\n".join(lines(left, right, found)))
    return OK if found.verdict != "refused" else FAILED


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
        chosen = next((run for run in runs if run.id == name), None)
        if (
            chosen is None
            and row.isdigit()
            and 1 <= int(row) <= len(runs)
            and not any(_by_line(r) for r in runs)
        ):
            chosen = runs[int(row) - 1]
        if chosen is None:
            ids = ", ".join(run.id for run in runs[:3])
            raise UsageError(
                f"{path} has no row {row!r}; its {len(runs)} rows: {ids}" + (" ..." if runs[3:] else "")
            )
        return chosen
    known = known_by_id()
    if name not in known:
        near = ", ".join(sorted(known)[:6])
        raise UsageError(
            f"{name!r} is neither a file nor the id of a published run or claim (such as {near})"
        )
    return known[name]


def _by_line(run: ServingRun) -> bool:
    return run.id.rpartition(":")[2].isdigit()


def metrics_of(one: ServingRun | Claim) -> tuple[Metric, ...]:
    if isinstance(one, Claim):
        return tuple(filter(None, (one.metric, one.meant)))
    return one.metrics


def default_metric(a: ServingRun | Claim, b: ServingRun | Claim) -> str:
    """The throughput, of output tokens where both say so; else the first that both have."""
    left, right = ({m.name for m in metrics_of(one)} for one in (a, b))
    names = [*FIRST, *(m.name for m in metrics_of(a))]
    return next((name for name in names if name in left & right), next(iter(left), "throughput"))


def figure(one: ServingRun | Claim, name: str, wanted: str) -> Figure:
    """Its metric `NAME`, or `NAME:WHICH`, WHICH being a statistic or a kind of tokens."""
    if isinstance(one, Claim):
        return claimed(one, name, wanted)
    metric, _, which = wanted.partition(":")
    alike = [m for m in one.metrics if m.name == metric and which in ("", *_kinds(m))]
    if not alike:
        has = ", ".join(
            dict.fromkeys(f"{m.name}:{m.statistic if m.tokens == 'none' else m.tokens}" for m in one.metrics)
        )
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {has or 'none'}")
    order = ("output", "total", "unknown", "mean", "median")
    rank = {word: i for i, word in enumerate(order)}
    best = min(alike, key=lambda m: min(rank.get(m.tokens, 9), rank.get(m.statistic, 9)))
    return of_run(one, best)


def _kinds(metric: Metric) -> tuple[str, ...]:
    """What tells metrics of one name apart: `total` is of tokens where it counts them."""
    sums = metric.tokens != "none" and metric.statistic == "total"
    return (metric.tokens,) if sums else (metric.tokens, metric.statistic)


def claimed(claim: Claim, name: str, wanted: str) -> Figure:
    """What its document leaves open is taken from the row that it prints, or from its source."""
    metric, _, which = wanted.partition(":")
    if claim.metric is None or claim.metric.name != metric:
        has = claim.metric.name if claim.metric else "no number"
        raise UsageError(f"{name} has no metric {wanted!r}; it has: {has}")
    found = sourced(claim, published_corpus(), published_configurations().get(claim.configuration))
    if which not in ("", found.metric.statistic, found.metric.tokens):
        raise UsageError(
            f"{name} is no {wanted!r}: its {metric} is {found.metric.statistic}, {found.metric.tokens} tokens"
        )
    return found


def lines(a: Figure, b: Figure, found: Compared) -> list[str]:
    text = []
    for name, one, side in (("A", a, found.a), ("B", b, found.b)):
        m = one.metric
        kind = "" if m.tokens == "none" else f" of {m.tokens} tokens"
        statistic = "" if m.statistic == "total" else f"{m.statistic} "
        gpus = f"{one.all_gpus} " if one.all_gpus else ""
        where = " ".join(
            filter(None, (f"{gpus}{one.hardware or 'unknown hardware'}", one.engine, one.version))
        )
        text.append(f"{name}  {one.id}: {where}")
        text.append(f"   {statistic}{m.name}{kind}: {m.value:,.6g} {m.unit}, scope {m.scope}")
        if side.steps:
            text.append(f"   normalised: {side.text}  ({'; '.join(side.steps)})")
    if found.verdict == "refused":
        text.append("not alike, so not compared:")
        text += [_wrapped(reason.text) for reason in found.reasons]
    else:
        text.append(
            f"A / B = {found.ratio:.4g}" + (" after normalising" if found.verdict == "normalised" else "")
        )
    if found.confounders:
        text.append("not only the GPU differs:" if a.hardware != b.hardware else "what differs:")
        text += [_wrapped(one) for one in found.confounders]
    if found.uncertain:
        text.append("uncertain:")
        text += [_wrapped(one) for one in found.uncertain]
    return text


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
