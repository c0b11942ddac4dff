"""Lists of single requests beside the totals and statistics that were made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.serving.integrity.common import (
    MARGIN,
    apart,
    broken,
    equal_lengths,
    found,
    output_length,
    stated,
)
from harness.serving.integrity.latencies import quantile, statistics
from harness.serving.schema import Finding, ServingRun

TAIL, TAIL_MS = 0.05, 20.0
"""After the last token: a share of the request, and ms."""

SAME_MS = 2.0  # between two sums of one request's times
MOST = 0.9  # of the requests


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
        yield found("samples", "wrong", f"lists of requests differ in length: {sizes}")
        return
    if not counts or totals.completed is None:
        return
    count = next(iter(counts.values()))
    possible = {totals.completed, totals.completed + (totals.failed or 0), run.workload.num_prompts}
    if count not in possible:
        message = f"{', '.join(counts)}: {count} entries, but {totals.completed} completed"
        yield broken(run, "samples", "wrong", message, entries=count, completed=totals.completed)


def sums(run: ServingRun) -> Iterator[Finding]:
    """Lengths add up to the totals."""
    if not _of_completed(run):
        return
    for name, values, total in (
        ("input", run.samples.input_lens, run.totals.input_tokens),
        ("output", run.samples.output_lens, run.totals.output_tokens),
    ):
        if values and total is not None and sum(values) != total:
            message = f"{name}_lens add up to {sum(values)}, but total {name} tokens are {total}"
            yield broken(run, "samples", "wrong", message, sum=sum(values), total=total)


def means(run: ServingRun) -> Iterator[Finding]:
    """Statistics of the lists are those reported."""
    if not _of_completed(run):
        return
    samples = run.samples
    named = {
        "ttft": np.array(samples.ttfts_ms),
        "e2e": np.array(samples.e2es_ms),
        "batch_latency": np.array(samples.e2es_ms),
        "tpot": _tpots(run),
        "itl": np.concatenate(
            [np.array(values_, dtype=float) for values_ in samples.itls_ms] or [np.array([])]
        ),
    }
    known = statistics(run)
    if samples.itls_ms and not named["itl"].size and (itl := stated(run, "itl", "mean")):
        message = f"itl mean is {itl:g} ms, but the lists of itls are empty"
        yield broken(run, "samples", "wrong", message, itl=itl)
    for name, values in named.items():
        for statistic, value in known.get(name, {}).items() if values.size else ():
            if statistic not in ("mean", "std") and quantile(statistic) is None:
                continue
            low, exact, high = _of_samples(values, statistic)
            if apart(value, low) > MARGIN and apart(value, high) > MARGIN and not low <= value <= high:
                message = (
                    f"{name} {statistic} is {value:g} ms, but that of the {values.size} {name}s is {exact:g}"
                )
                yield broken(run, "samples", "wrong", message, value=value, of_samples=exact)


def users(run: ServingRun) -> Iterator[Finding]:
    """What a user sees is tokens of a request over its time: where all are equally long, no less than tokens
    over the mean time (Jensen's inequality)."""
    value, samples = run.value("throughput_per_user", "mean"), run.samples
    e2e, length = stated(run, "e2e", "mean"), output_length(run)
    expected, least, most = (length / e2e * 1e3 if e2e and length else 0.0), 0.5, 2.0
    if equal_lengths(run):
        least, most = 1 - MARGIN, 1 + MARGIN if run.totals.completed == 1 else 1.5
    if len(samples.output_lens) == len(samples.e2es_ms) > 0 and min(samples.e2es_ms) > 0:
        expected = float(np.mean(np.array(samples.output_lens) / np.array(samples.e2es_ms))) * 1e3
        least, most = 1 - MARGIN, 1 + MARGIN
    if value and expected and not least < value / expected < most:
        message = (
            f"throughput_per_user is {value:g} tok/s, but tokens of a request over its time {expected:.5g}"
        )
        yield broken(run, "throughput_per_user", "suspect", message, value=value, expected=expected)


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
        message = (
            f"{off.sum()} of {len(ends)} requests do not take what their tokens take: request {first} "
            f"{ends[first]:g} ms, its first token and those after it {follows[first]:g} ms"
        )
        yield broken(
            run, "samples", "suspect", message, e2e=float(ends[first]), follows=float(follows[first])
        )


def same_order(run: ServingRun) -> Iterator[Finding]:
    """The lists are of the same requests in the same order: what adds up over all does so in each."""
    samples = run.samples
    columns = (samples.ttfts_ms, samples.itls_ms)
    if not columns[0] or len(columns[0]) != len(columns[1]):
        return
    gaps = np.array([len(values) + 1 for values in samples.itls_ms])
    lens, ends = np.array(samples.output_lens), np.array(samples.e2es_ms)
    if len(lens) == len(gaps):
        apart_ = lens != gaps
        if apart_.any() and (lens.sum() == gaps.sum() or apart_.mean() < 1 - MOST):
            yield _mixed(run, int(np.argmax(apart_)), "output_lens", lens, "itls and the first token", gaps)
    follows = np.array(samples.ttfts_ms) + np.array([sum(values) for values in samples.itls_ms])
    if len(ends) == len(follows):
        apart_ = np.abs(ends - follows) > SAME_MS
        if apart_.any() and (abs((ends - follows).sum()) < SAME_MS or apart_.mean() < 1 - MOST):
            yield _mixed(run, int(np.argmax(apart_)), "e2es", ends, "ttfts and itls", follows)


def _mixed(run: ServingRun, at: int, a: str, of_a: np.ndarray, b: str, of_b: np.ndarray) -> Finding:
    message = (
        f"{a} and {b} do not belong together: they are {of_a[at]:g} and {of_b[at]:g} of request {at}, though "
        "they agree over all or in most; is a list in another order, or cut?"
    )
    return broken(run, "samples", "suspect", message, a=float(of_a[at]), b=float(of_b[at]))


def _tpots(run: ServingRun) -> np.ndarray:
    """Of each request with a second token: the time after its first, over the tokens after it. None of
    guidellm and SGLang, whose requests end after their last token; they do not list all of this."""
    samples = run.samples
    ends, firsts, lens = samples.e2es_ms, samples.ttfts_ms, samples.output_lens
    if not samples.itls_ms or not len(ends) == len(firsts) == len(lens):
        return np.array([])
    times = zip(ends, firsts, lens, strict=True)
    return np.array([(end - first) / (count - 1) for end, first, count in times if count > 1])


def _of_samples(values: np.ndarray, statistic: str) -> tuple[float, float, float]:
    """The statistic, between the least and largest that a definition of it gives: there are several of a
    quantile, which differ by which of two neighbours they take."""
    at = quantile(statistic)
    if at is None:
        return (float(values.std() if statistic == "std" else values.mean()),) * 3
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


RULES = (lists, sums, means, users, parts, same_order)
