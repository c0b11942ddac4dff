"""Lists of single requests beside the totals and statistics that were made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.serving.integrity.common import (
    MARGIN,
    apart,
    broken,
    found,
    stated,
)
from harness.serving.integrity.latencies import quantile, statistics
from harness.serving.schema import Finding, ServingRun

TAIL, TAIL_MS = 0.05, 20.0  # after the last token: a share of the request, and ms
SAME_MS = 2.0  # between two sums of one request's times
MOST = 0.9  # of the requests


def lists(run: ServingRun) -> Iterator[Finding]:
    """As many entries as requests."""
    totals = run.totals
    counts = {name.removesuffix("_ms"): len(values) for name, values in run.samples if values}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{n} {name}" for name, n in counts.items())
        yield found("samples", "wrong", "unlike", sizes=sizes)
    elif counts and totals.completed is not None:
        count = next(iter(counts.values()))
        if count not in (totals.completed, totals.completed + (totals.failed or 0), run.workload.num_prompts):
            values = {"names": ", ".join(counts), "entries": count, "completed": totals.completed}
            yield broken(run, "samples", "wrong", "entries", **values)


def sums(run: ServingRun) -> Iterator[Finding]:
    """Lengths add up to the totals."""
    for name in ("input", "output") if _of_completed(run) else ():
        values, total = getattr(run.samples, f"{name}_lens"), getattr(run.totals, f"{name}_tokens")
        if values and total is not None and sum(values) != total:
            yield broken(run, "samples", "wrong", "sum", name=name, sum=sum(values), total=total)


def means(run: ServingRun) -> Iterator[Finding]:
    """Statistics of the lists are those reported."""
    if not _of_completed(run):
        return
    samples, known = run.samples, statistics(run)
    named = {"ttft": samples.ttfts_ms, "e2e": samples.e2es_ms, "batch_latency": samples.e2es_ms,
             "tpot": _tpots(run), "itl": [time for times in samples.itls_ms for time in times]}  # fmt: skip
    if samples.itls_ms and not named["itl"] and (itl := stated(run, "itl", "mean")):
        yield broken(run, "samples", "wrong", "empty", itl=itl)
    for name, values in named.items():
        for statistic, value in known.get(name, {}).items() if values else ():
            if statistic not in ("mean", "std") and quantile(statistic) is None:
                continue
            low, exact, high = _of_samples(np.array(values), statistic)
            if apart(value, low) > MARGIN and apart(value, high) > MARGIN and not low <= value <= high:
                about: dict[str, Any] = {"name": name, "statistic": statistic, "count": len(values)}
                yield broken(run, "samples", "wrong", "statistic", value=value, of_samples=exact, **about)


def single_requests(run: ServingRun) -> Iterator[Finding]:
    """A request's time is that of its first token and of all others after it, and little more. The lists are
    of the same requests in the same order: what adds up over all requests does so in each."""
    samples = run.samples
    if not samples.ttfts_ms or len(samples.ttfts_ms) != len(samples.itls_ms):
        return
    ends, lens = np.array(samples.e2es_ms), np.array(samples.output_lens)
    follows = np.array(samples.ttfts_ms) + np.array([sum(gaps) for gaps in samples.itls_ms])
    if len(ends) == len(follows) and (off := np.abs(ends - follows) > TAIL * ends + TAIL_MS).any():
        first = int(np.argmax(off))
        e2e, tokens = float(ends[first]), float(follows[first])
        values: dict[str, Any] = {"off": off.sum(), "every": len(ends), "at": first}
        yield broken(run, "samples", "suspect", "time", e2e=e2e, follows=tokens, **values)
    pieces = np.array([len(gaps) + 1 for gaps in samples.itls_ms])
    for a, of_a, b, of_b, same in (
        ("output_lens", lens, "itls and the first token", pieces, 0.0),
        ("e2es", ends, "ttfts and itls", follows, SAME_MS),
    ):
        if len(of_a) != len(of_b) or not (off := np.abs(of_a - of_b) > same).any():
            continue
        if abs((of_a - of_b).sum()) <= same or off.mean() < 1 - MOST:
            at = int(np.argmax(off))
            values = {"first": a, "second": b, "a": float(of_a[at]), "b": float(of_b[at]), "at": at}
            yield broken(run, "samples", "suspect", "order", **values)


def _tpots(run: ServingRun) -> list[float]:
    """Of each request with a second token: the time after its first, over the tokens after it. None of
    guidellm and SGLang, whose requests end after their last token; they do not list all of this."""
    samples = run.samples
    ends, firsts, lens = samples.e2es_ms, samples.ttfts_ms, samples.output_lens
    if not samples.itls_ms or not len(ends) == len(firsts) == len(lens):
        return []
    times = zip(ends, firsts, lens, strict=True)
    return [(end - first) / (count - 1) for end, first, count in times if count > 1]


def _of_samples(values: np.ndarray, statistic: str) -> tuple[float, float, float]:
    """The statistic, between the least and largest that a definition of it gives: definitions of a quantile
    differ in which of two neighbours they take."""
    at = quantile(statistic)
    if at is None:
        return (float(values.std() if statistic == "std" else values.mean()),) * 3
    low, exact, high = (float(np.quantile(values, at, method=how)) for how in ("lower", "linear", "higher"))
    return low, exact, high


def _of_completed(run: ServingRun) -> bool:
    """Whether the lists are of those requests that the client counted."""
    counts = {len(values) for _, values in run.samples if values}
    if run.totals.completed is None and run.mode == "offline":
        return len(counts) == 1
    return counts == {run.totals.completed} and min(run.samples.output_lens, default=1) > 0


RULES = (lists, sums, means, single_requests)
