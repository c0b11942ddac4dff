"""Little's law: requests in flight are the rate of requests times the time that each takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from harness.serving.integrity.common import (
    MARGIN,
    apart,
    broken,
    equal_lengths,
    found,
    hint,
    output_length,
    stated,
    whole,
)
from harness.serving.schema import Finding, ServingRun, Severity

LOOSE = 0.25  # of what follows from means of unequal lengths
A_TOKEN = 1.2  # the most of mean ITL over mean TPOT if a chunk is a token
AT_ONCE = 0.9  # the least share of requests in flight if all are sent at once
FILLED = 0.5  # the least share of the limit if nothing tells how long the end of the run is
SHORTEST = 0.5  # mean over longest length, if lengths are drawn from 0 on
DRAWN = 1.5  # a factor between two ratios of mean lengths that were drawn likewise


class InFlight(NamedTuple):
    """Mean requests in flight by the run's numbers: `rate` in 1/s times `time` in ms.

    equation: that product, and where its numbers come from
    severe:   the severity of a finding that rests on it: `wrong` if it is exact, else `suspect`
    margin:   relative
    """

    follows: float
    rate: float
    time: float
    equation: str
    severe: Severity
    margin: float


def in_flight(run: ServingRun) -> InFlight | None:
    """None if the rate of requests or the time of a mean request is not known."""
    rate, e2e = request_rate(run), stated(run, "e2e", "mean")
    ttft, tpot, length = stated(run, "ttft", "mean"), stated(run, "tpot", "mean"), output_length(run)
    time, exact, source = e2e, True, "mean E2E"
    if not e2e and ttft is not None and tpot is not None and length:
        time, exact = ttft + (length - 1) * tpot, equal_lengths(run)
        source = "mean TTFT + (n - 1) mean TPOT"
    if not rate or not time:
        return None
    totals, counted = run.totals, "as reported"
    if totals.completed and totals.duration_s:
        counted = f"{totals.completed} in a duration of {totals.duration_s:g} s"
    equation = f"{rate:.6g} req/s ({counted}) x {time:.6g} ms ({source})"
    severe: Severity = "wrong" if exact else "suspect"
    return InFlight(rate * time / 1e3, rate, time, equation, severe, MARGIN if exact else LOOSE)


def request_rate(run: ServingRun) -> float | None:
    """Requests per second: counted, else reported, else from output tokens."""
    totals, length = run.totals, output_length(run)
    if totals.completed and totals.duration_s:
        return totals.completed / totals.duration_s
    if value := whole(run, run.metric("request_throughput")):
        return value
    for metric in run.metrics:
        of_output = (metric.name, metric.tokens, metric.statistic) == ("throughput", "output", "total")
        if of_output and length and (value := whole(run, metric)):
            return value / length
    return None


def littles_law(run: ServingRun) -> Iterator[Finding]:
    """Compares the concurrency that the client reports, the one that follows, and the one that it allows."""
    mean, reported, limit = in_flight(run), run.metric("concurrency"), run.workload.concurrency
    value = reported.value if reported is not None and not reported.derived else None
    if mean:
        follows, about = mean.follows, {"follows": mean.follows, "equation": mean.equation}
        if value is not None and apart(value, follows, mean.rate, mean.time) > mean.margin:
            severity, likely = "suspect" if run.totals.failed else mean.severe, hint(run, value / follows)
            yield broken(run, "littles_law", severity, "reported", concurrency=value, hint=likely, **about)
        if limit and follows > limit * (1 + mean.margin):
            likely = hint(run, follows / limit)
            yield broken(run, "concurrency_limit", mean.severe, "follows", limit=limit, hint=likely, **about)
        if _at_once(run) and follows < AT_ONCE * (1 if mean.severe == "wrong" else 1 - LOOSE):
            yield broken(run, "concurrency_floor", "suspect", "below_one", **about)
    yield from _filled(run, mean)
    yield from _peaks(run, mean)
    most = run.value("concurrency", "max") if value is not None else None
    for statistic, number in (("mean", value), ("max", most)):
        if number is not None and limit and number > limit * (1 + MARGIN):
            yield broken(run, "concurrency_limit", "wrong", statistic, concurrency=number, limit=limit)
            return


def _at_once(run: ServingRun) -> bool:
    load = run.workload
    return not load.request_rate and bool(load.concurrency or load.request_rate == 0)


def _filled(run: ServingRun, mean: InFlight | None) -> Iterator[Finding]:
    """A client that always has a request to send keeps as many in flight as it may, except at the end of the
    run, which is no longer than the longest request (Graham's bound)."""
    limit, duration, totals = run.workload.concurrency, run.totals.duration_s, run.totals
    sent = run.workload.num_prompts or totals.completed
    if not limit or not _at_once(run) or run.mode == "offline":
        return
    if sent and sent <= limit and (run.value("ttft", "mean") or run.value("e2e", "mean")):
        lacks = found("one_wave", "suspect", "lacks", sent=sent, limit=limit)
        yield lacks if sent < limit else found("one_wave", "note", "full", sent=sent, limit=limit)
    server = run.option("max-running-requests", "max-num-seqs")
    if server.isdecimal() and int(server) < limit:
        yield found("server_limit", "note", "lower", server=int(server), limit=limit)
    if totals.failed:
        return
    most, peak = min(limit, sent or limit), _peak(run)
    if peak is not None and peak < most:
        average = f", {mean.follows:.4g} on average" if mean else ""
        yield broken(run, "concurrency_not_reached", "suspect", "peak", peak=peak, limit=limit, mean=average)
        return
    longest = _longest(run)
    if mean is None or (duration and not longest):
        return
    share = AT_ONCE * (1 - longest / 1e3 / duration) if duration and longest else FILLED
    if mean.follows < most * share:
        yield broken(run, "concurrency_not_reached", "suspect", "mean", follows=mean.follows, limit=limit)


def _longest(run: ServingRun) -> float | None:
    """The time in ms of a longest request: as stated, or by the slowest first token and the others."""
    if longest := run.value("e2e", "max") or run.value("e2e", "p99"):
        return longest
    ttft, tpot, length = run.value("ttft", "p99"), run.value("tpot", "p99"), output_length(run)
    return ttft + (length - 1) * tpot if ttft and tpot and length else None


def _peak(run: ServingRun) -> float | None:
    """The most requests that touched one second; no fewer were in flight at once."""
    return run.value("max_concurrent_requests") or run.value("peak_concurrency")


def _peaks(run: ServingRun, in_flight: InFlight | None) -> Iterator[Finding]:
    """The largest value of single seconds is at least the mean."""
    most, duration = _peak(run), run.totals.duration_s
    sent = run.workload.num_prompts or run.totals.completed
    if most and sent and most > 2 * (sent + (run.totals.failed or 0)):
        yield broken(run, "peak", "suspect", "more_than_sent", peak=most, sent=sent)
    if most is not None and in_flight and most < in_flight.follows * (1 - in_flight.margin):
        about = {"follows": in_flight.follows, "equation": in_flight.equation}
        yield broken(run, "peak", in_flight.severe, "below_mean", peak=most, **about)
    peak = run.value("max_output_tokens_per_s") or run.value("peak_throughput", "max", "output")
    mean = run.value("throughput", "total", "output", "instance")
    itl, tpot, every = stated(run, "itl", "mean"), stated(run, "tpot", "mean"), run.totals.output_tokens
    if peak and every and peak > 2 * every:  # some clients count those of warm-up requests, too
        yield broken(run, "peak", "suspect", "more_than_run", peak=peak, every=every)
    # It counts chunks in a second. They are tokens if the time between them is a token's.
    if not (peak and mean and itl and tpot and duration) or itl > tpot * A_TOKEN:
        return
    if peak < (1 - LOOSE) * mean * duration / (math.ceil(duration) + 1):
        yield broken(run, "peak", "suspect", "below_throughput", peak=peak, mean=mean)


def longest_lengths(run: ServingRun) -> Iterator[Finding]:
    """Used if only the longest lengths are known, and no E2E. A request has between half of those and all. So
    requests in flight are tokens a second times a request's time over its tokens, and input over output
    throughput is about the ratio of the two lengths."""
    load, tpot, ttft = run.workload, stated(run, "tpot", "mean"), stated(run, "ttft", "mean")
    isl, osl, limit = load.longest_input_len, load.longest_output_len, load.concurrency
    speed, prompts, both = (
        whole(run, run.metric("throughput", "total", kind)) for kind in ("output", "input", "total")
    )
    if isl and osl and both and not speed:
        speed = both * osl / (isl + osl)  # in proportion to the two lengths
    if isl and osl and speed and prompts and not isl / osl / DRAWN <= prompts / speed <= isl / osl * DRAWN:
        ratios = {"throughputs": prompts / speed, "lengths": isl / osl}
        yield found("lengths", "suspect", "unlike", isl=isl, osl=osl, **ratios)
    if not osl or load.output_len is not None or not speed or not tpot or ttft is None or not limit:
        return
    few, most = sorted(speed / n * (ttft + (n - 1) * tpot) / 1e3 for n in (osl, osl * SHORTEST))
    if few > limit * (1 + MARGIN) or most < limit * FILLED:
        values = {"speed": speed, "shortest": osl * SHORTEST, "longest": osl, "ttft": ttft, "tpot": tpot}
        values |= {"least": few, "most": most, "limit": limit}
        yield found("littles_law", "suspect", "longest_lengths", **values)


RULES = (littles_law, longest_lengths)
