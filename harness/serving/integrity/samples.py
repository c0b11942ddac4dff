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
from typing import Any

import numpy as np

from harness.serving.integrity.common import (
    FASTEST_STEP_MS,
    MARGIN,
    apart,
    broken,
    equal_lengths,
    found,
    output_length,
    stated,
)
from harness.serving.integrity.latencies import quantile, statistics
from harness.serving.schema import Finding, Metric, RequestSamples, ServingRun

STREAMED = {"ttft", "tpot", "itl"}
WHOLE = 0.95  # TTFT over E2E from which on nearly all came at once, if the rest is faster than any engine
FASTEST_FIRST_MS = 1.0  # a smaller time to first token is in another unit
FASTEST_TOKEN_MS = 0.5  # the fastest of any server over a network known to this project
ALIKE = 1e-3  # between E2E and TTFT of one request
SEVERAL = 8  # tokens that no single chunk holds, with or without speculation
Spoilt = tuple[set[str], Finding]
TAIL, TAIL_MS = 0.05, 20.0  # after the last token: as a share of the request, and in ms
SAME_MS = 2.0  # between two sums of one request's times
MOST = 0.9  # share of the requests


def left_out(run: ServingRun) -> ServingRun:
    """The run without those latencies, with a finding for each reason. If lists tell the mean TTFT of the
    requests that were measured, it replaces the mean that counts the others."""
    totals, samples = run.totals, run.samples
    if totals.completed == 0:
        return run
    spoilt, finding = _by_request(samples) or _by_statistics(run) or (set[str](), None)
    findings = [finding] if finding else []
    single = totals.output_tokens is not None and totals.output_tokens == totals.completed
    for name in [name for name in ("tpot", "itl") if name not in spoilt]:
        mean, median = stated(run, name, "mean"), stated(run, name, "median")
        # The median of ITL may be 0 in a stream of bursts.
        if mean == 0 or (median == 0 and (mean is None or name == "tpot")):
            spoilt |= {name}
            not_measured = found("zero", "suspect", "not_measured", name=name)
            findings.append(found("zero", "note", "one_token", name=name) if single else not_measured)
    kept = [metric for metric in run.metrics if metric.name not in spoilt or metric.unit != "ms"]
    if "ttft" in spoilt:
        if rest := _measured(samples):
            how = f"mean of the {len(rest)} requests that were measured"
            one = {"name": "ttft", "value": fmean(rest), "unit": "ms", "scope": "request", "derived": how}
            kept.append(Metric.model_validate(one | {"statistic": "mean"}))
        samples = samples.model_copy(update={"ttfts_ms": (), "itls_ms": ()})
    update = {"metrics": tuple(kept), "samples": samples, "findings": (*run.findings, *findings)}
    return run.model_copy(update=update)


def _by_request(samples: RequestSamples) -> Spoilt | None:
    """Findings from lists of single requests; None if they show nothing."""
    rest, every = _measured(samples), len(samples.ttfts_ms)
    mean = f"; of the other {len(rest)} its mean is {fmean(rest):.4g} ms" if rest else ""
    if zero := samples.ttfts_ms.count(0.0):
        finding = found("zero", "suspect", "single_requests", zero=zero, every=every, mean=mean)
        return {"ttft", "tpot"}, finding
    if pieces := sum(map(_in_one_piece, _times_per_token(samples))):
        finding = found("not_streamed", "suspect", "single_requests", pieces=pieces, every=every, mean=mean)
        return STREAMED, finding
    return None


def _by_statistics(run: ServingRun) -> Spoilt | None:
    times = [one for one in run.metrics if one.name in ("ttft", "e2e") and one.unit == "ms"]
    zeros = [one for one in times if one.value == 0 and one.statistic != "std"]
    if zeros:
        names, are = ", ".join(f"{one.name} {one.statistic}" for one in zeros), "are" if zeros[1:] else "is"
        finding = found("zero", "suspect", "statistics", names=names, are=are)
        return {"tpot", *(one.name for one in zeros)}, finding
    ttft, e2e, tpot = (stated(run, name, "mean") for name in ("ttft", "e2e", "tpot"))
    length = output_length(run) or 0.0
    if tpot is None and e2e is not None and ttft is not None and length > 1:
        tpot = max(e2e - ttft, 0.0) / (length - 1)
    if ttft is None or ttft < FASTEST_FIRST_MS or not tpot or 0 < length < SEVERAL:
        return None
    whole = ttft >= WHOLE * (e2e if e2e is not None else ttft + (length - 1) * tpot)
    if tpot >= (FASTEST_TOKEN_MS if whole and length else FASTEST_STEP_MS) or not (whole or e2e is None):
        return None
    share = f"{100 * ttft / e2e:.4g} % of " if e2e else ""
    return STREAMED, found("not_streamed", "suspect", "statistics", ttft=ttft, tpot=tpot, share=share)


def _times_per_token(samples: RequestSamples) -> list[float | None]:
    """The ms of a token after the first, for each request; None if it is not told, or the tokens are few."""
    ttfts, lens, times = samples.ttfts_ms, samples.output_lens, list[float | None]()
    rests = [end - ttft for end, ttft in zip(samples.e2es_ms, ttfts, strict=False)]
    rests = rests or [*map(sum, samples.itls_ms)]
    for i, ttft in enumerate(ttfts):
        told = i < len(rests) and i < len(lens) and lens[i] >= SEVERAL and rests[i] > -ALIKE * ttft
        times.append(max(rests[i], 0.0) / (lens[i] - 1) if told else None)
    return times


def _in_one_piece(time: float | None) -> bool:
    return time is not None and time < FASTEST_STEP_MS


def _measured(samples: RequestSamples) -> list[float]:
    """The TTFT of each request that was measured; empty if all were, or none was."""
    pairs = list(zip(samples.ttfts_ms, _times_per_token(samples), strict=True))
    rest = [ttft for ttft, time in pairs if ttft > 0 and not _in_one_piece(time)]
    return rest if len(rest) < len(pairs) else []


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
            yield broken(run, "samples", "wrong", "entries", **values)


def sums(run: ServingRun) -> Iterator[Finding]:
    """Lengths add up to the totals."""
    for name in ("input", "output") if _of_completed(run) else ():
        values, total = getattr(run.samples, f"{name}_lens"), getattr(run.totals, f"{name}_tokens")
        if values and total is not None and sum(values) != total:
            yield broken(run, "samples", "wrong", "sum", name=name, sum=sum(values), total=total)


def means(run: ServingRun) -> Iterator[Finding]:
    """The statistics of the lists are those that were reported."""
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


def users(run: ServingRun) -> Iterator[Finding]:
    """A user sees tokens of a request over its time. If all requests are equally long, the mean of this is at
    least the tokens over the mean time (Jensen's inequality)."""
    value, samples = run.value("throughput_per_user", "mean"), run.samples
    e2e, length = stated(run, "e2e", "mean"), output_length(run)
    expected, least, most = (length / e2e * 1e3 if e2e and length else 0.0), 0.5, 2.0
    if equal_lengths(run):
        least, most = 1 - MARGIN, 1 + MARGIN if run.totals.completed == 1 else 1.5
    if len(samples.output_lens) == len(samples.e2es_ms) > 0 and min(samples.e2es_ms) > 0:
        expected = float(np.mean(np.array(samples.output_lens) / np.array(samples.e2es_ms))) * 1e3
        least, most = 1 - MARGIN, 1 + MARGIN
    if value and expected and not least < value / expected < most:
        yield broken(run, "throughput_per_user", "suspect", "apart", value=value, expected=expected)


def single_requests(run: ServingRun) -> Iterator[Finding]:
    """A request's time is that of its first token and of all others after it, and little more. The lists are
    of the same requests in the same order, so what adds up over all requests does so in each."""
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
    """For each request with a second token, the time after its first token over the tokens after it. None for
    guidellm and SGLang, whose requests end after their last token; they do not list all of this."""
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
        return (float(values.std() if statistic == "std" else values.mean()),) * 3
    low, exact, high = (float(np.quantile(values, at, method=how)) for how in ("lower", "linear", "higher"))
    return low, exact, high


def _of_completed(run: ServingRun) -> bool:
    """Whether the lists are of the requests that the client counted."""
    counts = {len(values) for _, values in run.samples if values}
    if run.totals.completed is None and run.mode == "offline":
        return len(counts) == 1
    return counts == {run.totals.completed} and min(run.samples.output_lens, default=1) > 0


RULES = (lists, sums, means, users, single_requests)
