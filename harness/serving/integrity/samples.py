"""Lists of single requests beside the totals and statistics that were made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.serving.integrity.common import MARGIN, apart, broken, stated
from harness.serving.integrity.latencies import quantile
from harness.serving.schema import Finding, ServingRun

TAIL, TAIL_MS = 0.05, 20.0
"""After the last token: a share of the request, and ms."""

STATISTICS = ("mean", "median", "p90", "p95", "p99")


def lists(run: ServingRun) -> Iterator[Finding]:
    """As many entries as requests."""
    totals, samples = run.totals, run.samples
    named = {
        "input_lens": samples.input_lens,
        "output_lens": samples.output_lens,
        "ttfts": samples.ttfts_ms,
        "e2es": samples.e2es_ms,
        "itls": samples.itls_ms,
    }
    counts = {name: len(values) for name, values in named.items() if values}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{n} {name}" for name, n in counts.items())
        yield Finding(
            rule="samples", severity="wrong", message=f"lists of requests differ in length: {sizes}"
        )
        return
    if not counts or totals.completed is None:
        return
    name, count = next(iter(counts.items()))
    possible = {totals.completed, totals.completed + (totals.failed or 0), run.workload.num_prompts}
    if count not in possible:
        yield broken(
            run,
            "samples",
            f"{', '.join(counts)}: {count} entries, but {totals.completed} completed",
            {name: count, "completed": totals.completed},
        )


def sums(run: ServingRun) -> Iterator[Finding]:
    """Lengths add up to the totals."""
    if not _of_completed(run):
        return
    for name, values, total in (
        ("input", run.samples.input_lens, run.totals.input_tokens),
        ("output", run.samples.output_lens, run.totals.output_tokens),
    ):
        if values and total is not None and sum(values) != total:
            yield broken(
                run,
                "samples",
                f"{name}_lens add up to {sum(values)}, but total {name} tokens are {total}",
                {"sum": sum(values), "total": total},
            )


def means(run: ServingRun) -> Iterator[Finding]:
    """Statistics of the lists are those reported."""
    if not _of_completed(run):
        return
    samples = run.samples
    named = {
        "ttft": np.array(samples.ttfts_ms),
        "e2e": np.array(samples.e2es_ms),
        "batch_latency": np.array(samples.e2es_ms),
        "itl": np.concatenate(
            [np.array(values_, dtype=float) for values_ in samples.itls_ms] or [np.array([])]
        ),
    }
    for name, values in named.items():
        for statistic in STATISTICS if values.size else ():
            value = stated(run, name, statistic)
            if value is None:
                continue
            low, exact, high = _of_samples(values, statistic)
            if apart(value, low) > MARGIN and apart(value, high) > MARGIN and not low <= value <= high:
                yield broken(
                    run,
                    "samples",
                    f"{name} {statistic} is {value:g} ms, but that of the {values.size} {name}s is {exact:g}",
                    {statistic: value, "of_samples": exact},
                )


def parts(run: ServingRun) -> Iterator[Finding]:
    """A request takes what its first token takes and all others after it, and little more."""
    samples = run.samples
    if not len(samples.e2es_ms) == len(samples.ttfts_ms) == len(samples.itls_ms) > 0:
        return
    ends = np.array(samples.e2es_ms)
    follows = np.array(samples.ttfts_ms) + np.array([sum(gaps) for gaps in samples.itls_ms])
    off = np.abs(ends - follows) > TAIL * ends + TAIL_MS
    if off.any():
        first = int(np.argmax(off))
        yield broken(
            run,
            "samples",
            f"{off.sum()} of {len(ends)} requests do not take what their tokens take: request {first} "
            f"{ends[first]:g} ms, its first token and those after it {follows[first]:g} ms",
            {"e2e": float(ends[first]), "follows": float(follows[first])},
            "suspect",
        )


def _of_samples(values: np.ndarray, statistic: str) -> tuple[float, float, float]:
    """The statistic, between the least and largest that a definition of it gives: there are several of a
    quantile, which differ by which of two neighbours they take."""
    at = quantile(statistic)
    if at is None:
        return (float(values.mean()),) * 3
    low, exact, high = (float(np.quantile(values, at, method=how)) for how in ("lower", "linear", "higher"))
    return low, exact, high


def _of_completed(run: ServingRun) -> bool:
    """Whether the lists are of those requests that the client counted."""
    samples = run.samples
    lengths = samples.output_lens
    columns = (samples.input_lens, lengths, samples.ttfts_ms, samples.e2es_ms, samples.itls_ms)
    counts = {len(column) for column in columns if column}
    if run.totals.completed is None and run.mode == "offline":
        return len(counts) == 1
    return counts == {run.totals.completed} and not (lengths and min(lengths) <= 0)


RULES = (lists, sums, means, parts)
