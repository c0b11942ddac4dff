"""Little's law: requests in flight are the rate of requests times the time that each takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
A_TOKEN = 1.2  # mean ITL over mean TPOT, at most, where a piece of a stream is a token
AT_ONCE = 0.9  # requests in flight, at least, where all are sent at once
FILLED = 0.5  # of the limit, at least, where nothing tells how long the end of the run is
SHORTEST = 0.5  # mean over longest length, where those are drawn from 0 on
DRAWN = 1.5  # a factor between two ratios of mean lengths, drawn alike


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
        of_output = (metric.name, metric.tokens, metric.statistic) == ("throughput", "output", "total")
        if of_output and length and (value := whole(run, metric)):
            return value / length
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
        equation = (
            f"{rate:.6g} req/s ({_source(run)}) x {milliseconds:.6g} ms ({source}) = {follows:.5g} in flight"
        )
        if value is not None and apart(value, follows, rate, milliseconds) > (MARGIN if exact else LOOSE):
            message = f"concurrency is {value:g}, but {equation}{hint(run, value / follows)}"
            severity: Severity = "suspect" if run.totals.failed or not exact else "wrong"
            yield broken(run, "littles_law", severity, message, concurrency=value, follows=follows)
        if limit and follows > limit * (1 + (MARGIN if exact else LOOSE)):
            message = f"{equation}, above the client's limit of {limit:g}{hint(run, follows / limit)}"
            severity = "wrong" if exact else "suspect"
            yield broken(run, "concurrency_limit", severity, message, follows=follows, limit=limit)
        if _at_once(run) and follows < AT_ONCE * (1 if exact else 1 - LOOSE):
            message = f"{equation}: less than one at a time, though all were sent at once; in s for ms?"
            yield broken(run, "concurrency_floor", "suspect", message, follows=follows)
    yield from _filled(run, rate, time)
    yield from _peaks(run, rate, time)
    most = run.value("concurrency", "max")
    for what, number in (("", value), ("at most ", most if value is not None else None)):
        if number is not None and limit and number > limit * (1 + MARGIN):
            message = f"concurrency is {what}{number:g}, above the client's limit of {limit:g}"
            yield broken(run, "concurrency_limit", "wrong", message, concurrency=number, limit=limit)
            return


def _at_once(run: ServingRun) -> bool:
    load = run.workload
    return not load.request_rate and bool(load.concurrency or load.request_rate == 0)


def _filled(run: ServingRun, rate: float | None, time: tuple[float, bool, str] | None) -> Iterator[Finding]:
    """A client that always has one more to send keeps as many in flight as it may, but for the end of the
    run, which is no longer than the longest request (Graham's bound)."""
    limit, duration, totals = run.workload.concurrency, run.totals.duration_s, run.totals
    sent = run.workload.num_prompts or totals.completed
    if not limit or not _at_once(run) or run.mode == "offline":
        return
    if sent and sent <= limit and (run.value("ttft", "mean") or run.value("e2e", "mean")):
        lacks = sent < limit
        message = f"{sent} requests were sent and {limit:g} allowed in flight: the run is one wave of {sent}"
        message += f", never {limit:g} at once" if lacks else ", which has no steady state"
        yield found("one_wave", "suspect" if lacks else "note", message, sent=sent, limit=limit)
    server = run.option("max-running-requests", "max-num-seqs")
    if server.isdecimal() and int(server) < limit:
        message = f"the server runs {server} at once of the client's {limit:g} in flight: TTFT has their wait"
        yield found("server_limit", "note", message, server=int(server), limit=limit)
    if totals.failed:
        return
    most, peak = min(limit, sent or limit), _peak(run)
    follows = rate * time[0] / 1e3 if rate and time else None
    in_flight = f", {follows:.4g} on average" if follows else ""
    if peak is not None and peak < most:
        message = (
            f"{limit:g} were allowed in flight, but at most {peak:g} were in any second{in_flight}: the "
            "client's connections (aiohttp has 100 unless told) or the server's own limit"
        )
        yield broken(run, "concurrency_not_reached", "suspect", message, peak=peak, limit=limit)
        return
    longest = _longest(run)
    if follows is None or (duration and not longest):
        return
    share = AT_ONCE * (1 - longest / 1e3 / duration) if duration and longest else FILLED
    if follows < most * share:
        message = f"{follows:.5g} were in flight on average (Little's law), though all were sent at once and "
        message += f"the client allows {limit:g}"
        yield broken(run, "concurrency_not_reached", "suspect", message, follows=follows, limit=limit)


def _longest(run: ServingRun) -> float | None:
    """ms of a longest request: as stated, or of the slowest first token and the slowest others."""
    if longest := run.value("e2e", "max") or run.value("e2e", "p99"):
        return longest
    ttft, tpot, length = run.value("ttft", "p99"), run.value("tpot", "p99"), output_length(run)
    return ttft + (length - 1) * tpot if ttft and tpot and length else None


def _peak(run: ServingRun) -> float | None:
    """Most requests that touched one second, so no fewer than were in flight at once."""
    return run.value("max_concurrent_requests") or run.value("peak_concurrency")


def _peaks(run: ServingRun, rate: float | None, time: tuple[float, bool, str] | None) -> Iterator[Finding]:
    """The largest of single seconds is no less than the mean."""
    most, duration = _peak(run), run.totals.duration_s
    sent = run.workload.num_prompts or run.totals.completed
    if most and sent and most > 2 * (sent + (run.totals.failed or 0)):
        message = f"{most:g} requests were in flight in one second, but {sent} were sent in all"
        yield broken(run, "peak", "suspect", message, peak=most, sent=sent)
    if most is not None and rate and time:
        milliseconds, exact, source = time
        follows = rate * milliseconds / 1e3
        if most < follows * (1 - (MARGIN if exact else LOOSE)):
            message = (
                f"at most {most:g} were so in any second, but {rate:.6g} req/s ({_source(run)}) x "
                f"{milliseconds:.6g} ms ({source}) are {follows:.5g} in flight on average"
            )
            yield broken(run, "peak", "wrong" if exact else "suspect", message, peak=most, follows=follows)
    peak = run.value("max_output_tokens_per_s") or run.value("peak_throughput", "max", "output")
    mean = run.value("throughput", "total", "output", "instance")
    itl, tpot, every = stated(run, "itl", "mean"), stated(run, "tpot", "mean"), run.totals.output_tokens
    if peak and every and peak > 2 * every:  # some clients count those of warm-up requests too
        message = f"most output tokens of a second are {peak:g}, beyond the {every} of the whole run"
        yield broken(run, "peak", "suspect", message, peak=peak, every=every)
    # It counts pieces of streams in a second, which are tokens where the time between them is a token's.
    if not (peak and mean and itl and tpot and duration) or itl > tpot * A_TOKEN:
        return
    if peak < (1 - LOOSE) * mean * duration / (math.ceil(duration) + 1):
        message = f"most output tokens of a second are {peak:g}, below the mean of {mean:g} tok/s"
        yield broken(run, "peak", "suspect", message, peak=peak, mean=mean)


def longest_lengths(run: ServingRun) -> Iterator[Finding]:
    """Where the longest lengths alone are known, and no E2E: requests have no more tokens than those, and
    half of them at least, so that tokens a second times a request's time over its tokens are no more than
    those in flight; and input to output is as the two lengths."""
    load, tpot, ttft = run.workload, stated(run, "tpot", "mean"), stated(run, "ttft", "mean")
    isl, osl = load.longest_input_len, load.longest_output_len
    metrics = [run.metric("throughput", "total", kind) for kind in ("output", "input", "total")]
    speed, prompts, both = (whole(run, metric) if metric is not None else None for metric in metrics)
    if isl and osl and both and not speed:
        speed = both * osl / (isl + osl)  # as the two lengths
    if isl and osl and speed and prompts and not isl / osl / DRAWN <= prompts / speed <= isl / osl * DRAWN:
        message = (
            f"input and output throughput are as {prompts / speed:.4g} to 1, but the lengths asked for, "
        )
        message += f"{isl:g} and {osl:g}, as {isl / osl:.4g}"
        yield found("lengths", "suspect", message, throughputs=prompts / speed, lengths=isl / osl)
    limit = load.concurrency
    if not osl or load.output_len is not None or not speed or not tpot or ttft is None or not limit:
        return
    few, most = sorted(speed / n * (ttft + (n - 1) * tpot) / 1e3 for n in (osl, osl * SHORTEST))
    if few > limit * (1 + MARGIN) or most < limit * FILLED:
        message = (
            f"{speed:.5g} tok/s of requests of {osl * SHORTEST:g} to {osl:g} tokens, each of mean TTFT "
            f"{ttft:.4g} + (n - 1) x mean TPOT {tpot:.4g} ms, are {few:.4g} to {most:.4g} in flight; "
            f"{limit:g} were asked for"
        )
        yield found("littles_law", "suspect", message, least=few, most=most, limit=limit)


def _source(run: ServingRun) -> str:
    if run.totals.completed and run.totals.duration_s:
        return f"{run.totals.completed} in a duration of {run.totals.duration_s:g} s"
    return "as reported"


RULES = (littles_law, longest_lengths)
