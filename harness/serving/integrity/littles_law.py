"""Little's law: requests in flight are the rate of requests times the time that each takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.serving.integrity.common import (
    MARGIN,
    apart,
    broken,
    equal_lengths,
    hint,
    output_length,
    stated,
    whole,
)
from harness.serving.schema import Finding, ServingRun

LOOSE = 0.25  # of what follows from means of unequal lengths
A_TOKEN = 1.2  # mean ITL over mean TPOT, at most, where a piece of a stream is a token
AT_ONCE = 0.9  # requests in flight, at least, where all are sent at once
FILLED = 0.5  # of the limit, at least, where nothing tells how long the end of the run is


def request_rate(run: ServingRun) -> float | None:
    """Requests per second: counted, else reported, else from output tokens."""
    totals = run.totals
    if totals.completed and totals.duration_s:
        return totals.completed / totals.duration_s
    reported = run.metric("request_throughput")
    if reported is not None and (value := whole(run, reported)):
        return value
    length = output_length(run)
    for metric in run.metrics:
        if (
            metric.name == "throughput"
            and metric.tokens == "output"
            and metric.statistic == "total"
            and length
        ):
            value = whole(run, metric)
            return value / length if value else None
    return None


def time_of_one(run: ServingRun) -> tuple[float, bool, str] | None:
    """(ms, whether exact, from what) of a mean request."""
    if e2e := stated(run, "e2e", "mean"):
        return e2e, True, "mean E2E"
    ttft, tpot, length = stated(run, "ttft", "mean"), stated(run, "tpot", "mean"), output_length(run)
    if ttft is not None and tpot is not None and length:
        return ttft + (length - 1) * tpot, equal_lengths(run), "mean TTFT + (n - 1) mean TPOT"
    return None


def littles_law(run: ServingRun) -> Iterator[Finding]:
    """The concurrency that the client reports, the one that follows, and the one it allows."""
    rate, time = request_rate(run), time_of_one(run)
    reported, limit = run.metric("concurrency"), run.workload.concurrency
    value = reported.value if reported is not None and not reported.derived else None
    if rate and time:
        milliseconds, exact, source = time
        follows = rate * milliseconds / 1e3
        numbers = {"request_rate": rate, "time_ms": milliseconds, "follows": follows}
        equation = (
            f"{rate:.6g} req/s ({_source(run)}) x {milliseconds:.6g} ms ({source}) = {follows:.5g} in flight"
        )
        if value is not None and apart(value, follows, rate, milliseconds) > (MARGIN if exact else LOOSE):
            yield broken(
                run,
                "littles_law",
                f"concurrency is {value:g}, but {equation}{hint(run, value / follows)}",
                {**numbers, "concurrency": value},
                "suspect" if run.totals.failed or not exact else "wrong",
            )
        if limit and follows > limit * (1 + (MARGIN if exact else LOOSE)):
            yield broken(
                run,
                "concurrency_limit",
                f"{equation}, above the client's limit of {limit:g}{hint(run, follows / limit)}",
                {**numbers, "limit": limit},
                "wrong" if exact else "suspect",
            )
        at_once = not run.workload.request_rate and (limit or run.workload.request_rate == 0)
        if at_once and follows < AT_ONCE * (1 if exact else 1 - LOOSE):
            yield broken(
                run,
                "concurrency_floor",
                f"{equation}: less than one at a time, though all were sent at once; latencies in s for ms?",
                numbers,
                "suspect",
            )
        if at_once and limit and not run.totals.failed:
            yield from _filled(run, limit, follows, equation)
    yield from _peaks(run, rate, time)
    most = run.value("concurrency", "max")
    for what, number in (("", value), ("at most ", most if value is not None else None)):
        if number is not None and limit and number > limit * (1 + MARGIN):
            yield broken(
                run,
                "concurrency_limit",
                f"concurrency is {what}{number:g}, above the client's limit of {limit:g}",
                {"concurrency": number, "limit": limit},
            )
            return


def _filled(run: ServingRun, limit: float, follows: float, equation: str) -> Iterator[Finding]:
    """A client that always has one more to send keeps as many in flight as it may, but for the end of the
    run, which is no longer than the longest request (Graham's bound)."""
    duration, sent = run.totals.duration_s, run.workload.num_prompts or run.totals.completed
    longest = run.value("e2e", "max") or run.value("e2e", "p99")
    if duration and not longest:
        return
    share = AT_ONCE * (1 - longest / 1e3 / duration) if duration and longest else FILLED
    most = min(limit, sent or limit)
    if follows < most * share:
        yield broken(
            run,
            "concurrency_not_reached",
            f"{equation}, though all were sent at once and the client allows {limit:g}",
            {"follows": follows, "limit": limit},
            "suspect",
        )


def _peaks(run: ServingRun, rate: float | None, time: tuple[float, bool, str] | None) -> Iterator[Finding]:
    """The largest of single seconds is no less than the mean."""
    most = run.value("max_concurrent_requests")
    if most is not None and rate and time:
        milliseconds, exact, source = time
        follows = rate * milliseconds / 1e3
        if most < follows * (1 - (MARGIN if exact else LOOSE)):
            yield broken(
                run,
                "peak",
                f"max_concurrent_requests is {most:g}, but {rate:.6g} req/s ({_source(run)}) x "
                f"{milliseconds:.6g} ms ({source}) are {follows:.5g} in flight on average",
                {"peak": most, "follows": follows},
                "wrong" if exact else "suspect",
            )
    peak, mean = run.value("max_output_tokens_per_s"), run.value("throughput", "total", "output", "instance")
    itl, tpot = stated(run, "itl", "mean"), stated(run, "tpot", "mean")
    duration = run.totals.duration_s
    # It counts pieces of streams in a second, which are tokens where the time between them is a token's.
    if not (peak and mean and itl and tpot and duration) or itl > tpot * A_TOKEN:
        return
    if peak < (1 - LOOSE) * mean * duration / (math.ceil(duration) + 1):
        yield broken(
            run,
            "peak",
            f"max_output_tokens_per_s is {peak:g}, below the mean of {mean:g} tok/s",
            {"peak": peak, "mean": mean},
            "suspect",
        )


def _source(run: ServingRun) -> str:
    if run.totals.completed and run.totals.duration_s:
        return f"{run.totals.completed} in a duration of {run.totals.duration_s:g} s"
    return "as reported"


RULES = (littles_law,)
