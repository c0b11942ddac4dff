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

STREAMED = {"ttft", "tpot", "itl"}
WHOLE = 0.95  # of E2E: TTFT from which on nearly all came at once, if the rest is faster than any engine
FASTEST_TOKEN_MS = 0.5  # of any server over a network known to this project
SAME = 1e-3  # between E2E and TTFT of one request
SEVERAL = 8  # tokens that no single piece of a stream holds, speculation or not


def left_out(run: ServingRun) -> ServingRun:
    """The run without those latencies, with a finding for each reason; the mean TTFT of the requests that
    were measured, where lists tell it, takes the place of the one that counts the others."""
    if run.totals.completed == 0:
        return run
    spoilt, finding = _by_request(run) or _by_statistics(run) or (set[str](), None)
    findings = [finding] if finding else []
    single = run.totals.output_tokens is not None and run.totals.output_tokens == run.totals.completed
    for name in ("tpot", "itl"):
        # ITL's median may be 0 in a stream of bursts.
        mean, median = stated(run, name, "mean"), stated(run, name, "median")
        if name not in spoilt and (mean == 0 or (median == 0 and (mean is None or name == "tpot"))):
            spoilt |= {name}
            why = "a request of one output token has none" if single else "not measured"
            findings.append(found("zero", "note" if single else "suspect", f"{name} is 0: {why}; left out"))
    kept = [metric for metric in run.metrics if metric.name not in spoilt or metric.unit != "ms"]
    samples = run.samples
    if "ttft" in spoilt and (rest := _measured(samples)):
        kept.append(
            Metric(name="ttft", value=fmean(rest), unit="ms", scope="request", statistic="mean",
                   derived=f"mean of the {len(rest)} requests that were measured")
        )  # fmt: skip
    if "ttft" in spoilt:
        samples = samples.model_copy(update={"ttfts_ms": (), "itls_ms": ()})
    update = {"metrics": tuple(kept), "samples": samples, "findings": (*run.findings, *findings)}
    return run.model_copy(update=update)


Spoilt = tuple[set[str], Finding]


def _by_request(run: ServingRun) -> Spoilt | None:
    """Of lists of single requests; None where they show nothing."""
    ttfts, rest = run.samples.ttfts_ms, _measured(run.samples)
    zero = sum(1 for ttft in ttfts if ttft == 0)
    mean = f"; of the other {len(rest)} its mean is {fmean(rest):.4g} ms" if rest else ""
    if zero:
        message = (
            f"ttft is 0 in {zero} of {len(ttfts)} requests: not measured, and their TPOT is E2E over all "
        )
        return {"ttft", "tpot"}, found("zero", "suspect", f"{message}tokens{mean}; left out", zero=zero)
    if pieces := sum(map(_in_one_piece, _times_per_token(run.samples))):
        message = (
            f"{pieces} of {len(ttfts)} requests came in one piece: not streamed, so their TTFT is E2E and "
        )
        message += f"they have no TPOT{mean}; left out"
        return STREAMED, found("not_streamed", "suspect", message, pieces=pieces)
    return None


def _by_statistics(run: ServingRun) -> Spoilt | None:
    times = [one for one in run.metrics if one.name in ("ttft", "e2e") and one.unit == "ms"]
    zeros = [one for one in times if one.value == 0 and one.statistic != "std"]
    if zeros:
        message = ", ".join(f"{one.name} {one.statistic}" for one in zeros)
        message += (
            f" {'is' if len(zeros) == 1 else 'are'} 0: not measured in some or all requests, whose TPOT is "
        )
        message += "E2E over all tokens; left out"
        return {"tpot", *(one.name for one in zeros)}, found("zero", "suspect", message)
    ttft, e2e, tpot = (stated(run, name, "mean") for name in ("ttft", "e2e", "tpot"))
    length = output_length(run) or 0.0
    if tpot is None and e2e is not None and ttft is not None and length > 1:
        tpot = max(e2e - ttft, 0.0) / (length - 1)
    if ttft is None or not tpot or 0 < length < SEVERAL:
        return None
    whole = ttft >= WHOLE * (e2e if e2e is not None else ttft + (length - 1) * tpot)
    if tpot >= (FASTEST_TOKEN_MS if whole and length else FASTEST_STEP_MS) or not (whole or e2e is None):
        return None
    share = f"{100 * ttft / e2e:.4g} % of " if e2e else ""
    message = (
        f"mean ttft {ttft:g} ms is {share}E2E, and a token after the first takes {tpot:.3g} ms: not streamed "
        "(not asked for, or a proxy buffers), so TTFT is E2E, and TPOT and ITL say nothing; left out"
    )
    return STREAMED, found("not_streamed", "suspect", message, ttft=ttft, tpot=tpot)


def _times_per_token(samples: RequestSamples) -> list[float | None]:
    """Of each request the ms of a token after its first; None where it is not told, or its tokens are few."""
    ttfts, lens, times = samples.ttfts_ms, samples.output_lens, list[float | None]()
    rests = [end - ttft for end, ttft in zip(samples.e2es_ms, ttfts, strict=False)] or [
        *map(sum, samples.itls_ms)
    ]
    for i, ttft in enumerate(ttfts):
        told = i < len(rests) and i < len(lens) and lens[i] >= SEVERAL and rests[i] > -SAME * ttft
        times.append(max(rests[i], 0.0) / (lens[i] - 1) if told else None)
    return times


def _in_one_piece(time: float | None) -> bool:
    return time is not None and time < FASTEST_STEP_MS


def _measured(samples: RequestSamples) -> list[float]:
    """The TTFT of each request that was measured; none where all were, or none was."""
    pairs = list(zip(samples.ttfts_ms, _times_per_token(samples), strict=True))
    rest = [ttft for ttft, time in pairs if ttft > 0 and not _in_one_piece(time)]
    return rest if len(rest) < len(pairs) else []
