"""Little's law: requests in flight are the rate of requests times the time that each takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from harness.serving.integrity.common import MARGIN, apart, found, hint, misfit
from harness.serving.schema import Finding, ServingRun, Severity

LOOSE = 0.25  # of what follows from means of unequal lengths
A_TOKEN = 1.2  # the most of mean ITL over mean TPOT if a chunk is a token
KEPT = 0.9  # the least share of the allowed requests that are in flight before the end of the run
FILLED = 0.5  # the same over the whole run, if nothing tells how long its end is
SHORTEST = 0.5  # mean over longest length, if lengths are drawn from 0 on
DRAWN = 1.5  # a factor between two ratios of mean lengths that were drawn likewise


class InFlight(NamedTuple):
    """Mean requests in flight by the run's numbers."""

    follows: float  # the rate times the time
    rate: float  # requests per second
    time_ms: float  # of a mean request
    equation: str  # that product as text, and where its numbers come from
    severity: Severity  # of a finding that rests on it: `wrong` if it is exact, else `suspect`
    margin: float  # relative, by which another number may differ from it


def in_flight(run: ServingRun) -> InFlight | None:
    """None if the rate of requests or the time of a mean request is not known."""
    rate, totals = request_rate(run), run.totals
    ttft, tpot, length = run.reported_ms("ttft"), run.reported_ms("tpot"), run.mean_output_length
    time_ms, is_exact, source = run.reported_ms("e2e"), True, "mean E2E"
    if not time_ms and ttft is not None and tpot is not None and length:
        time_ms, is_exact = ttft + (length - 1) * tpot, run.has_equal_lengths
        source = "mean TTFT + (n - 1) mean TPOT"
    if not rate or not time_ms:
        return None
    counted = "as reported"
    if totals.completed and totals.duration_s:
        counted = f"{totals.completed} in a duration of {totals.duration_s:g} s"
    equation = f"{rate:.6g} req/s ({counted}) x {time_ms:.6g} ms ({source})"
    severity: Severity = "wrong" if is_exact else "suspect"
    return InFlight(rate * time_ms / 1e3, rate, time_ms, equation, severity, MARGIN if is_exact else LOOSE)


def request_rate(run: ServingRun) -> float | None:
    """Requests per second: counted, else reported, else from output tokens."""
    totals, length = run.totals, run.mean_output_length
    if totals.completed and totals.duration_s:
        return totals.completed / totals.duration_s
    if value := run.whole_throughput(run.metric("request_throughput")):
        return value
    for metric in run.metrics:
        of_output = (metric.name, metric.tokens, metric.statistic) == ("throughput", "output", "total")
        if of_output and length and (value := run.whole_throughput(metric)):
            return value / length
    return None


def littles_law(run: ServingRun) -> Iterator[Finding]:
    """Compares the concurrency that the client reports, the one that follows, and the one that it allows."""
    mean, metric, limit = in_flight(run), run.metric("concurrency"), run.workload.concurrency
    reported = metric.value if metric is not None and not metric.derived else None
    if mean:
        follows, about = mean.follows, {"follows": mean.follows, "equation": mean.equation}
        if reported is not None and apart(reported, follows, mean.rate, mean.time_ms) > mean.margin:
            severity = "suspect" if run.totals.failed else mean.severity
            values = {"concurrency": reported, "hint": hint(run, reported / follows)}
            yield misfit(run, "littles_law", severity, "reported", **values, **about)
        if limit and follows > limit * (1 + mean.margin):
            values = {"limit": limit, "hint": hint(run, follows / limit)}
            yield misfit(run, "concurrency_limit", mean.severity, "follows", **values, **about)
        least = KEPT if mean.severity == "wrong" else KEPT * (1 - LOOSE)  # one request is always in flight
        if _at_once(run) and follows < least:
            yield misfit(run, "concurrency_floor", "suspect", "below_one", **about)
    if limit and _at_once(run) and run.mode != "offline":
        yield from _one_wave(run, limit)
        yield from _limit_not_reached(run, limit, mean)
    yield from _peaks(run, mean)
    if reported is None or not limit:
        return
    for statistic, concurrency in (("mean", reported), ("max", run.value("concurrency", "max") or 0.0)):
        if concurrency > limit * (1 + MARGIN):
            yield misfit(run, "concurrency_limit", "wrong", statistic, concurrency=concurrency, limit=limit)
            return


def _at_once(run: ServingRun) -> bool:
    """Whether requests are sent as soon as there is a place for them, and not at a rate."""
    load = run.workload
    return not load.request_rate and bool(load.concurrency or load.request_rate == 0)


def _one_wave(run: ServingRun, limit: float) -> Iterator[Finding]:
    """Requests that are too few for a steady state, and a server that runs fewer than the client allows."""
    sent = run.workload.num_prompts or run.totals.completed
    if sent and sent <= limit and (run.value("ttft", "mean") or run.value("e2e", "mean")):
        how: tuple[Severity, str] = ("suspect", "lacks") if sent < limit else ("note", "full")
        yield found("one_wave", *how, sent=sent, limit=limit)
    server = run.option("max-running-requests", "max-num-seqs")
    if server.isdecimal() and int(server) < limit:
        yield found("server_limit", "note", "lower", server=int(server), limit=limit)


def _limit_not_reached(run: ServingRun, limit: float, mean: InFlight | None) -> Iterator[Finding]:
    """A client that always has a request to send keeps as many in flight as it may, except at the end of the
    run, which is no longer than the longest request (Graham's bound)."""
    duration, totals = run.totals.duration_s, run.totals
    if totals.failed:
        return
    most, peak = min(limit, run.workload.num_prompts or totals.completed or limit), _peak(run)
    if peak is not None and peak < most:
        average = f", {mean.follows:.4g} on average" if mean else ""
        yield misfit(run, "concurrency_not_reached", "suspect", "peak", peak=peak, limit=limit, mean=average)
        return
    longest = _longest(run)
    if mean is None or (duration and not longest):
        return
    share = KEPT * (1 - longest / 1e3 / duration) if duration and longest else FILLED
    if mean.follows < most * share:
        yield misfit(run, "concurrency_not_reached", "suspect", "mean", follows=mean.follows, limit=limit)


def _longest(run: ServingRun) -> float | None:
    """The time in ms of a longest request: as stated, or by the slowest first token and the others."""
    if longest := run.value("e2e", "max") or run.value("e2e", "p99"):
        return longest
    ttft, tpot, length = run.value("ttft", "p99"), run.value("tpot", "p99"), run.mean_output_length
    return ttft + (length - 1) * tpot if ttft and tpot and length else None


def _peak(run: ServingRun) -> float | None:
    """The most requests that were in flight in some part of one second; no more were in flight at once."""
    return run.value("max_concurrent_requests") or run.value("peak_concurrency")


def _peaks(run: ServingRun, in_flight: InFlight | None) -> Iterator[Finding]:
    """The most requests, and the most tokens, of a single second are at least the mean."""
    most, totals = _peak(run), run.totals
    sent = run.workload.num_prompts or totals.completed
    if most and sent and most > 2 * (sent + (totals.failed or 0)):
        yield misfit(run, "peak", "suspect", "more_than_sent", peak=most, sent=sent)
    if most is not None and in_flight and most < in_flight.follows * (1 - in_flight.margin):
        about = {"follows": in_flight.follows, "equation": in_flight.equation}
        yield misfit(run, "peak", in_flight.severity, "below_mean", peak=most, **about)
    peak = run.value("max_output_tokens_per_s") or run.value("peak_throughput", "max", "output")
    tokens = totals.output_tokens
    if peak and tokens and peak > 2 * tokens:  # some clients count those of warm-up requests, too
        yield misfit(run, "peak", "suspect", "more_than_run", peak=peak, every=tokens)
    mean, duration = run.value("throughput", "total", "output", "instance"), totals.duration_s
    itl, tpot = run.reported_ms("itl"), run.reported_ms("tpot")
    # The peak counts chunks in a second. They are tokens if the time between them is a token's.
    if not (peak and mean and itl and tpot and duration) or itl > tpot * A_TOKEN:
        return
    seconds = math.ceil(duration) + 1  # of the clock, that the run touches at most
    if peak < (1 - LOOSE) * mean * duration / seconds:
        yield misfit(run, "peak", "suspect", "below_throughput", peak=peak, mean=mean)


def longest_lengths(run: ServingRun) -> Iterator[Finding]:
    """Used if only the longest lengths are known, and no E2E. The mean output length is then between half of
    the longest and all of it, so that requests a second (tokens a second over this length) and requests in
    flight lie between two values. Input over output throughput is about the ratio of the two lengths."""
    load, tpot, ttft = run.workload, run.reported_ms("tpot"), run.reported_ms("ttft")
    isl, osl, limit = load.longest_input_len, load.longest_output_len, load.concurrency
    if not osl:
        return
    prompts = run.whole_throughput(run.metric("throughput", "total", "input"))
    speed = run.whole_throughput(run.metric("throughput", "total", "output"))
    both = run.whole_throughput(run.metric("throughput", "total", "total"))
    if isl and both and not speed:
        speed = both * osl / (isl + osl)  # in proportion to the two lengths
    if isl and speed and prompts and not 1 / DRAWN <= (prompts / speed) / (isl / osl) <= DRAWN:
        ratios = {"throughputs": prompts / speed, "lengths": isl / osl}
        yield found("lengths", "suspect", "unlike", isl=isl, osl=osl, **ratios)
    if load.output_len is not None or not speed or not tpot or ttft is None or not limit:
        return
    lengths = (osl, osl * SHORTEST)
    least, most = sorted(speed / length * (ttft + (length - 1) * tpot) / 1e3 for length in lengths)
    if least > limit * (1 + MARGIN) or most < limit * FILLED:
        values = {"speed": speed, "shortest": osl * SHORTEST, "longest": osl, "ttft": ttft, "tpot": tpot}
        values |= {"least": least, "most": most, "limit": limit}
        yield found("littles_law", "suspect", "longest_lengths", **values)


RULES = (littles_law, longest_lengths)
