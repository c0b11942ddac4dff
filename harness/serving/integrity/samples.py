"""Rules for single requests: latencies that were not measured, and lists beside the statistics made of them.

A client writes 0 for a time to first token that it never saw: a stream without token counts, a chunk that its
parser swallowed. It takes the end of a response for its first token if a proxy, a tool-call parser or the
server itself delivers the response in one piece. Then TTFT is E2E, and TPOT, which is what E2E leaves after
TTFT, is E2E over the tokens or almost nothing. Such numbers are left out of a run, so that nothing is
compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from harness.serving.integrity.common import FASTEST_STEP_MS, MARGIN, apart, found, misfit
from harness.serving.integrity.latencies import quantile, statistics
from harness.serving.schema import Finding, Metric, RequestSamples, ServingRun, Severity

STREAMED = {"ttft", "tpot", "itl"}
WHOLE = 0.95  # of E2E: a larger TTFT says that all tokens came in one piece, if no engine is so fast
FASTEST_FIRST_MS = 1.0  # a smaller time to first token is in another unit
FASTEST_TOKEN_MS = 0.5  # the fastest of any server over a network known to this project
CLOCKS = 1e-3  # relative: by which E2E and TTFT of one request may be in the wrong order
SEVERAL = 8  # tokens that no single chunk holds, with or without speculation
TAIL, TAIL_MS = 0.05, 20.0  # after the last token: as a share of the request, and in ms
SAME_MS = 2.0  # by which two sums of one request's times may differ
MOST = 0.9  # a share of the requests


class NotMeasured(NamedTuple):
    """The names of latencies that the client did not measure, and the finding that says why."""

    names: set[str]
    finding: Finding


def left_out(run: ServingRun) -> ServingRun:
    """The run without the latencies that were not measured, with a finding for each reason. If lists tell the
    mean TTFT of the requests that were measured, it replaces the mean that counts the others."""
    samples = run.samples
    if run.totals.completed == 0:
        return run
    names: set[str] = set()
    findings = []
    if not_measured := _by_request(samples) or _by_statistics(run):
        names |= not_measured.names
        findings.append(not_measured.finding)
    one_token = run.totals.output_tokens is not None and run.totals.output_tokens == run.totals.completed
    for name in ("tpot", "itl"):
        mean, median = run.reported_ms(name), run.reported_ms(name, "median")
        # The median of ITL may be 0 in a stream of bursts.
        is_zero = mean == 0 or (median == 0 and (mean is None or name == "tpot"))
        if is_zero and name not in names:
            names.add(name)
            why: tuple[Severity, str] = ("note", "one_token") if one_token else ("suspect", "not_measured")
            findings.append(found("zero", *why, name=name))
    metrics = [metric for metric in run.metrics if metric.name not in names or metric.unit != "ms"]
    if "ttft" in names:
        if ttfts_ms := _measured(samples):
            how = f"mean of the {len(ttfts_ms)} requests that were measured"
            mean = fmean(ttfts_ms)
            metrics.append(
                Metric(name="ttft", statistic="mean", value=mean, unit="ms", scope="request", derived=how)
            )
        samples = samples.model_copy(update={"ttfts_ms": (), "itls_ms": ()})
    update = {"metrics": tuple(metrics), "samples": samples, "findings": (*run.findings, *findings)}
    return run.model_copy(update=update)


def _by_request(samples: RequestSamples) -> NotMeasured | None:
    """What lists of single requests show; None if they show nothing."""
    others = _measured(samples)
    of_others = f"; of the other {len(others)} its mean is {fmean(others):.4g} ms" if others else ""
    values: dict[str, Any] = {"every": len(samples.ttfts_ms), "mean": of_others}
    if zero := samples.ttfts_ms.count(0.0):
        finding = found("zero", "suspect", "single_requests", zero=zero, **values)
        return NotMeasured({"ttft", "tpot"}, finding)
    if pieces := sum(_in_one_piece(samples)):
        finding = found("not_streamed", "suspect", "single_requests", pieces=pieces, **values)
        return NotMeasured(STREAMED, finding)
    return None


def _by_statistics(run: ServingRun) -> NotMeasured | None:
    """What the statistics show: a time of 0, or a response in one piece; None if they show nothing."""
    times = [metric for metric in run.metrics if metric.name in ("ttft", "e2e") and metric.unit == "ms"]
    zeros = [metric for metric in times if metric.value == 0 and metric.statistic != "std"]
    if zeros:
        names = ", ".join(f"{metric.name} {metric.statistic}" for metric in zeros)
        are = "are" if len(zeros) > 1 else "is"
        finding = found("zero", "suspect", "statistics", names=names, are=are)
        return NotMeasured({"tpot", *(metric.name for metric in zeros)}, finding)
    ttft, e2e, tpot = (run.reported_ms(name) for name in ("ttft", "e2e", "tpot"))
    length = run.mean_output_length or 0.0  # 0: not known
    if tpot is None and e2e is not None and ttft is not None and length > 1:
        tpot = max(e2e - ttft, 0.0) / (length - 1)
    if ttft is None or ttft < FASTEST_FIRST_MS or not tpot or 0 < length < SEVERAL:
        return None
    end_ms = e2e if e2e is not None else ttft + (length - 1) * tpot
    is_nearly_all = ttft >= WHOLE * end_ms
    if e2e is not None and not is_nearly_all:
        return None
    # If TTFT alone says that nothing was streamed, a TPOT that is fast is enough; else it must be impossible.
    is_told_by_ttft = is_nearly_all and length > 0
    if tpot >= (FASTEST_TOKEN_MS if is_told_by_ttft else FASTEST_STEP_MS):
        return None
    share = f"{100 * ttft / e2e:.4g} % of " if e2e else ""
    finding = found("not_streamed", "suspect", "statistics", ttft=ttft, tpot=tpot, share=share)
    return NotMeasured(STREAMED, finding)


def _in_one_piece(samples: RequestSamples) -> list[bool]:
    """For each request whether its tokens came in one piece, by the time of a token after the first; False if
    the lists do not tell this time, or if the tokens are few."""
    lens = samples.output_lens
    after_first = [end - ttft for end, ttft in zip(samples.e2es_ms, samples.ttfts_ms, strict=False)]
    if not after_first:
        after_first = [sum(gaps) for gaps in samples.itls_ms]
    pieces = []
    for i, ttft in enumerate(samples.ttfts_ms):
        is_told = i < len(after_first) and i < len(lens) and lens[i] >= SEVERAL
        is_plausible = is_told and after_first[i] > -CLOCKS * ttft
        pieces.append(is_plausible and after_first[i] / (lens[i] - 1) < FASTEST_STEP_MS)
    return pieces


def _measured(samples: RequestSamples) -> list[float]:
    """The TTFT of each request that was measured, in ms; empty if all were, or none was."""
    times = zip(samples.ttfts_ms, _in_one_piece(samples), strict=True)
    measured = [ttft for ttft, is_one_piece in times if ttft > 0 and not is_one_piece]
    return measured if len(measured) < len(samples.ttfts_ms) else []


def lists(run: ServingRun) -> Iterator[Finding]:
    """Lists have as many entries as there are requests."""
    totals = run.totals
    counts = {name.removesuffix("_ms"): len(values) for name, values in run.samples if values}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{n} {name}" for name, n in counts.items())
        yield found("samples", "wrong", "unlike", sizes=sizes)
    elif counts and totals.completed is not None:
        count = next(iter(counts.values()))
        if count not in (totals.completed, totals.completed + (totals.failed or 0), run.workload.num_prompts):
            values = {"names": ", ".join(counts), "entries": count, "completed": totals.completed}
            yield misfit(run, "samples", "wrong", "entries", **values)


def sums(run: ServingRun) -> Iterator[Finding]:
    """Lengths add up to the totals."""
    if not _of_completed(run):
        return
    for name in ("input", "output"):
        values, total = getattr(run.samples, f"{name}_lens"), getattr(run.totals, f"{name}_tokens")
        if values and total is not None and sum(values) != total:
            yield misfit(run, "samples", "wrong", "sum", name=name, sum=sum(values), total=total)


def means(run: ServingRun) -> Iterator[Finding]:
    """The reported statistics are those of the lists."""
    if not _of_completed(run):
        return
    samples, reported = run.samples, statistics(run)
    lists = {
        "ttft": samples.ttfts_ms,
        "e2e": samples.e2es_ms,
        "batch_latency": samples.e2es_ms,
        "tpot": _tpots(run),
        "itl": [gap for gaps in samples.itls_ms for gap in gaps],
    }
    if samples.itls_ms and not lists["itl"] and (itl := run.reported_ms("itl")):
        yield misfit(run, "samples", "wrong", "empty", itl=itl)
    for name, values in lists.items():
        for statistic, value in reported.get(name, {}).items():
            if not values or (statistic not in ("mean", "std") and quantile(statistic) is None):
                continue
            low, exact, high = _of_samples(np.array(values), statistic)
            if apart(value, low) > MARGIN and apart(value, high) > MARGIN and not low <= value <= high:
                about: dict[str, Any] = {"name": name, "statistic": statistic, "count": len(values)}
                yield misfit(run, "samples", "wrong", "statistic", value=value, of_samples=exact, **about)


def throughput_per_user(run: ServingRun) -> Iterator[Finding]:
    """The throughput of a user is that of a request: its tokens over its time. If all requests have equally
    many, the mean is at least these tokens over the mean time (Jensen's inequality), and here at most half
    more. If not, it is taken to lie within a factor of two of that."""
    value, samples = run.value("throughput_per_user", "mean"), run.samples
    e2e, length = run.reported_ms("e2e"), run.mean_output_length
    if len(samples.output_lens) == len(samples.e2es_ms) > 0 and min(samples.e2es_ms) > 0:
        expected = float(np.mean(np.array(samples.output_lens) / np.array(samples.e2es_ms))) * 1e3
        least, most = 1 - MARGIN, 1 + MARGIN
    elif e2e and length and run.has_equal_lengths:
        expected, least = length / e2e * 1e3, 1 - MARGIN
        most = 1 + MARGIN if run.totals.completed == 1 else 1.5
    elif e2e and length:
        expected, least, most = length / e2e * 1e3, 0.5, 2.0
    else:
        return
    if value and expected and not least < value / expected < most:
        yield misfit(run, "throughput_per_user", "suspect", "apart", value=value, expected=expected)


def single_requests(run: ServingRun) -> Iterator[Finding]:
    """A request's time is that of its first token and of all others after it, and little more. The lists are
    of the same requests in the same order, so what adds up over all requests does so in each."""
    samples = run.samples
    if not samples.ttfts_ms or len(samples.ttfts_ms) != len(samples.itls_ms):
        return
    e2es, lens = np.array(samples.e2es_ms), np.array(samples.output_lens)
    last_tokens = np.array(samples.ttfts_ms) + np.array([sum(gaps) for gaps in samples.itls_ms])
    if len(e2es) == len(last_tokens):
        is_off = np.abs(e2es - last_tokens) > TAIL * e2es + TAIL_MS
        if is_off.any():
            at = int(np.argmax(is_off))
            values: dict[str, Any] = {"off": is_off.sum(), "every": len(e2es), "at": at}
            values |= {"e2e": float(e2es[at]), "follows": float(last_tokens[at])}
            yield misfit(run, "samples", "suspect", "time", **values)
    chunks = np.array([len(gaps) + 1 for gaps in samples.itls_ms])
    yield from _in_another_order(run, ("output_lens", lens), ("itls and the first token", chunks), 0.0)
    yield from _in_another_order(run, ("e2es", e2es), ("ttfts and itls", last_tokens), SAME_MS)


def _in_another_order(
    run: ServingRun, first: tuple[str, np.ndarray], second: tuple[str, np.ndarray], same: float
) -> Iterator[Finding]:
    """Finds two lists of one quantity, each with its name, whose entries differ by more than `same` though
    their sums, or nine tenths of the entries, do not."""
    (name, values), (other_name, others) = first, second
    if len(values) != len(others):
        return
    is_off = np.abs(values - others) > same
    if is_off.any() and (abs((values - others).sum()) <= same or is_off.mean() < 1 - MOST):
        at = int(np.argmax(is_off))
        texts: dict[str, Any] = {"first": name, "second": other_name, "at": at}
        texts |= {"a": float(values[at]), "b": float(others[at])}
        yield misfit(run, "samples", "suspect", "order", **texts)


def _tpots(run: ServingRun) -> list[float]:
    """For each request with a second token, the time after its first token over the tokens after it. Empty if
    the lists do not tell it: guidellm's and SGLang's do not, and their requests end after the last token."""
    samples = run.samples
    ends, firsts, lens = samples.e2es_ms, samples.ttfts_ms, samples.output_lens
    if not samples.itls_ms or not len(ends) == len(firsts) == len(lens):
        return []
    times = zip(ends, firsts, lens, strict=True)
    return [(end - first) / (count - 1) for end, first, count in times if count > 1]


def _of_samples(values: np.ndarray, statistic: str) -> tuple[float, float, float]:
    """The least, interpolated and largest value of the statistic: a quantile may take either neighbour."""
    at = quantile(statistic)
    if at is None:
        exact = float(values.std() if statistic == "std" else values.mean())
        return exact, exact, exact
    low, exact, high = (float(np.quantile(values, at, method=how)) for how in ("lower", "linear", "higher"))
    return low, exact, high


def _of_completed(run: ServingRun) -> bool:
    """Whether the lists are of the requests that the client counted."""
    counts = {len(values) for _, values in run.samples if values}
    if run.totals.completed is None and run.mode == "offline":
        return len(counts) == 1
    return counts == {run.totals.completed} and min(run.samples.output_lens, default=1) > 0


RULES = (lists, sums, means, throughput_per_user, single_requests)
