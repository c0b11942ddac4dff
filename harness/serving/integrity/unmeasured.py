"""Latencies that stand in a file though nobody measured them.

A client writes 0 for a time to first token that it never saw (a stream without token counts, a chunk that its
parser swallowed), and takes the end of a response for its first token where a proxy, a tool-call parser or
the server itself delivers it in one piece. Then TTFT is E2E, and TPOT, which is what E2E leaves after TTFT,
is E2E over the tokens or next to nothing. Such numbers are left out of a run, so that nothing is compared
with them."""

from __future__ import annotations

from statistics import fmean

from harness.serving.integrity.common import FASTEST_STEP_MS, found, output_length, stated
from harness.serving.schema import Finding, Metric, RequestSamples, ServingRun

STREAMED = ("ttft", "tpot", "itl")
WHOLE = (
    0.95  # of E2E: TTFT from which on nearly all came at once, if the rest is faster than any known engine
)
FASTEST_TOKEN_MS = 0.5  # of any server over a network known to this project
SAME = 1e-3  # between E2E and TTFT of one request
SEVERAL = 8  # tokens that no single piece of a stream holds, speculation or not


def left_out(run: ServingRun) -> ServingRun:
    """The run without those latencies, with a finding for each reason; the mean TTFT of the requests that
    were measured, where lists tell it, takes the place of the one that counts the others."""
    if run.totals.completed == 0:
        return run
    spoilt, findings = _by_request(run) or _by_statistics(run)
    single = run.totals.output_tokens is not None and run.totals.output_tokens == run.totals.completed
    for name in ("tpot", "itl"):
        if name not in spoilt and _zero(run, name):
            spoilt |= {name}
            message = f"{name} is 0: not measured, and left out"
            if single:
                message = f"{name}: requests of one output token have none; left out"
            findings.append(found("zero", "note" if single else "suspect", message))
    kept = [metric for metric in run.metrics if metric.name not in spoilt or metric.unit != "ms"]
    samples = run.samples
    if "ttft" in spoilt and (rest := _measured(samples)):
        derived = f"mean of the {len(rest)} requests that were measured"
        mean = Metric(
            name="ttft", value=fmean(rest), unit="ms", scope="request", statistic="mean", derived=derived
        )
        kept.append(mean)
    if "ttft" in spoilt:
        samples = samples.model_copy(update={"ttfts_ms": (), "itls_ms": ()})
    return run.model_copy(
        update={"metrics": tuple(kept), "samples": samples, "findings": (*run.findings, *findings)}
    )


def _by_request(run: ServingRun) -> tuple[set[str], list[Finding]] | None:
    """Of lists of single requests; None where they show nothing."""
    ttfts, times = run.samples.ttfts_ms, _times_per_token(run.samples)
    zero = sum(1 for ttft in ttfts if ttft == 0)
    pieces = sum(1 for time in times if time is not None and time < FASTEST_STEP_MS)
    count, rest = len(ttfts), _measured(run.samples)
    mean = f"; of the other {len(rest)} its mean is {fmean(rest):.4g} ms" if rest else ""
    if zero:
        message = f"ttft is 0 in {zero} of {count} requests: not measured, and TPOT of these is E2E over all tokens{mean}"
        return {"ttft", "tpot"}, [found("zero", "suspect", f"{message}; left out", zero=zero, requests=count)]
    if pieces:
        message = (
            f"{pieces} of {count} requests came in one piece after {_share(run)}their whole time: not streamed, "
            f"so their TTFT is E2E and their TPOT none{mean}; left out"
        )
        return {*STREAMED}, [found("not_streamed", "suspect", message, pieces=pieces, requests=count)]
    return None


def _by_statistics(run: ServingRun) -> tuple[set[str], list[Finding]]:
    zeros = [
        f"{metric.name} {metric.statistic}"
        for metric in run.metrics
        if metric.name in ("ttft", "e2e")
        and metric.unit == "ms"
        and metric.statistic != "std"
        and metric.value == 0
    ]
    if zeros:
        message = (
            f"{', '.join(zeros)} {'is' if len(zeros) == 1 else 'are'} 0: not measured in some or all requests, and "
            "TPOT of these is E2E over all tokens, none that was measured; left out"
        )
        names = {zero.split()[0] for zero in zeros}
        return {*names, "tpot"}, [found("zero", "suspect", message)]
    ttft, e2e, tpot = (stated(run, name, "mean") for name in ("ttft", "e2e", "tpot"))
    length = output_length(run) or 0.0
    if tpot is None and e2e is not None and ttft is not None and length > 1:
        tpot = max(e2e - ttft, 0.0) / (length - 1)
    if ttft is None or tpot is None or 1 < length < SEVERAL:
        return set(), []
    whole = ttft >= WHOLE * (e2e if e2e is not None else ttft + (length - 1) * tpot)
    fastest = FASTEST_TOKEN_MS if whole and length >= SEVERAL else FASTEST_STEP_MS
    if length == 1 or not 0 < tpot < fastest or not (whole or e2e is None):
        return set(), []
    message = (
        f"mean ttft {ttft:g} ms is {_share(run)}E2E, and a token after the first takes {tpot:.3g} ms: not streamed "
        "(the client did not ask for it, or a proxy buffers), so TTFT is E2E, and TPOT and ITL say nothing; left out"
    )
    return {*STREAMED}, [found("not_streamed", "suspect", message, ttft=ttft, tpot=tpot)]


def _zero(run: ServingRun, name: str) -> bool:
    """Whether its mean, or where there is none its median, is 0; ITL's median may be, in a stream of
    bursts."""
    mean, median = stated(run, name, "mean"), stated(run, name, "median")
    return mean == 0 or (median == 0 and (mean is None or name == "tpot"))


def _share(run: ServingRun) -> str:
    ttft, e2e = stated(run, "ttft", "mean"), stated(run, "e2e", "mean")
    return f"{100 * ttft / e2e:.4g} % of " if ttft and e2e else ""


def _times_per_token(samples: RequestSamples) -> list[float | None]:
    """Of each request the ms of a token after its first; None where that is not told, or its tokens are
    few."""
    lens, ends = samples.output_lens, samples.e2es_ms
    times: list[float | None] = []
    for i, ttft in enumerate(samples.ttfts_ms):
        tokens = lens[i] if i < len(lens) else 0
        rest = (
            ends[i] - ttft if i < len(ends) else sum(samples.itls_ms[i]) if i < len(samples.itls_ms) else None
        )
        told = rest is not None and rest > -SAME * ttft and tokens >= SEVERAL
        times.append(max(rest, 0.0) / (tokens - 1) if told and rest is not None else None)
    return times


def _measured(samples: RequestSamples) -> list[float]:
    """The TTFT of each request that was measured; none where all were, or none was."""
    pairs = list(zip(samples.ttfts_ms, _times_per_token(samples), strict=True))
    rest = [ttft for ttft, time in pairs if ttft > 0 and not (time is not None and time < FASTEST_STEP_MS)]
    return rest if len(rest) < len(pairs) else []
