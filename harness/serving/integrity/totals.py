"""Counts, and rates as counts over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.serving.clients.fields import real
from harness.serving.integrity.common import EXACT, MARGIN, WAITS, apart, broken, found, hint, rounding, whole
from harness.serving.schema import Finding, OfferedLoad, ServingRun, Severity

LOST = 0.5  # of the server's count, below which text went missing
RETOKENISED = (0.8, 1.25)  # of the server's count; dstack's 54 rows lie between 0.957 and 1
NEVER_ZERO = ("total", "mean", "median", "p99", "max")  # of a time; ITL's median may be
CLOCK = 0.02  # AIPerf divides by its whole time, and states the time between its requests
SENT = 0.9  # of the rate asked for, at least, and of what chance leaves of so many random gaps
EARLY = 0.8  # of the output length asked for, below which answers stopped before it
LENGTH = 1.5  # a factor: templates, special tokens and ranges of lengths stay within


@dataclass(frozen=True)
class Rate:
    """A rate that the client reported, and what the run's own count and duration make it.

    value: of the whole engine; off: relative, beyond rounding
    """

    name: str
    unit: str
    of: str
    value: float
    count: int
    expected: float
    off: float


def rates(run: ServingRun) -> Iterator[Finding]:
    """Requests, and tokens of each kind, over the run's duration.

    A client may divide by another time than it states (AIPerf does), but then all of its rates by the same.
    """
    duration, stated_rates = run.totals.duration_s, list(_rates(run))
    if not duration:
        return
    shared_clock = [rate for rate in stated_rates if rate.off < CLOCK]
    time = shared_clock[0].count / shared_clock[0].value if shared_clock and shared_clock[0].value else 0.0
    others_agree = (
        apart(rate.value, rate.count / time, shared_clock[0].value) for rate in shared_clock if time
    )
    if time and max(others_agree) <= EXACT:
        if any(rate.off > EXACT for rate in shared_clock):
            message = (
                f"{', '.join(rate.name for rate in shared_clock)}: over {time:g} s, though the duration is "
                f"{duration:g} s: the client divides by another time than it states"
            )
            yield broken(run, "clock", "note", message, time=time, duration=duration)
        stated_rates = [rate for rate in stated_rates if rate not in shared_clock]
    for rate in stated_rates:
        if rate.off <= EXACT:
            continue
        others = [(kind, n) for kind, n in _counted(run, rate.unit) if n != rate.count]
        kinds = [kind for kind, n in others if n and apart(rate.value, n / duration, duration) <= EXACT]
        meaning = f" (it is that of {kinds[0]} tokens)" if kinds else ""
        meaning = meaning or hint(run, rate.value / rate.expected if rate.expected else 0.0)
        message = f"{rate.name} {rate.value:g} {rate.unit}, but {rate.count} {rate.of} in a duration of "
        message += f"{duration:g} s are {rate.expected:g}{meaning}"
        severity: Severity = "suspect" if rate.off < CLOCK else "wrong"
        rule = rate.name.split()[-1]
        yield broken(run, rule, severity, message, value=rate.value, expected=rate.expected)


def _rates(run: ServingRun) -> Iterator[Rate]:
    tokens, duration = dict(_counted(run, "tok/s")), run.totals.duration_s
    for metric in run.metrics:
        if metric.derived or not duration:
            continue
        if metric.name == "request_throughput":
            name, of, count = metric.name, "completed", run.totals.completed
        elif metric.name == "throughput" and metric.statistic == "total":
            name, of, count = f"{metric.tokens} throughput", "tokens", tokens.get(metric.tokens)
            if metric.tokens == "unknown":  # it is of one of the kinds at least
                name, count = "unsaid throughput", _nearest(tokens.values(), metric.value * duration)
        else:
            continue
        value = whole(run, metric)
        if value is not None and count is not None:
            expected = count / duration
            yield Rate(name, metric.unit, of, value, count, expected, apart(value, expected, duration))


def _nearest(counts: Iterable[int | None], expected: float) -> int | None:
    return min((n for n in counts if n), key=lambda n: abs(n - expected), default=None)


def _counted(run: ServingRun, unit: str) -> list[tuple[str, int | None]]:
    """Tokens of each kind over the run; none for a rate of requests."""
    into, out = run.totals.input_tokens, run.totals.output_tokens
    both = into + out if into is not None and out is not None else None
    if both is None and (counted := run.metric("tokens", "total", "total")) is not None:
        both = round(counted.value)  # by clients that count them together alone
    return [("output", out), ("input", into), ("total", both)] if unit == "tok/s" else []


def sum_of_kinds(run: ServingRun) -> Iterator[Finding]:
    """Input and output throughput of one scope make the total."""
    for total in run.metrics:
        if total.name != "throughput" or total.tokens != "total" or total.statistic != "total":
            continue
        into, out = (run.value("throughput", "total", kind, total.scope) for kind in ("input", "output"))
        if into is None or out is None:
            continue
        if apart(total.value, into + out, into, out) > EXACT:
            message = f"total throughput {total.value:g} tok/s, but input {into:g} and output {out:g} "
            message += f"make {into + out:g}"
            yield broken(run, "total_throughput", "wrong", message, total=total.value, input=into, output=out)


def lengths(run: ServingRun) -> Iterator[Finding]:
    """Tokens of a request, as counted, beside what was asked for."""
    totals, load = run.totals, run.workload
    for kind, count, wanted in (
        ("input", totals.input_tokens, load.input_len),
        ("output", totals.output_tokens, load.output_len),
    ):
        if count is None or not totals.completed or not wanted:
            continue
        each = count / totals.completed
        least, most = 1 / LENGTH, LENGTH
        if kind == "output":
            least, most = EARLY, _longest_output(load, totals.completed)
        if least <= each / wanted <= most:
            continue
        short = kind == "output" and 0.01 < each / wanted < 1
        message = (
            f"{kind} tokens a request: {each:.5g} counted ({count} of {totals.completed}), {wanted:g} asked "
        )
        message += "for; they stopped early (no ignore-eos, or a limit of the server's)" if short else "for"
        severity: Severity = "note" if short else "suspect"
        yield broken(run, f"{kind}_length", severity, message, counted=each, asked=wanted)


def _longest_output(load: OfferedLoad, count: int) -> float:
    """Mean length over that asked for, at most: no answer is longer, but of a range chance draws some so."""
    if load.range_ratio is None or load.range_ratio > 1:
        return 1 + MARGIN
    deviation = (1 - load.range_ratio) / (1 + load.range_ratio) / (3 * count) ** 0.5
    return 1 + MARGIN + 3 * deviation


def between_rates(run: ServingRun) -> Iterator[Finding]:
    """Where no duration is said: tokens a second over requests a second are tokens of a request."""
    requests, length = run.metric("request_throughput"), run.value("output_len", "mean")
    if run.totals.duration_s or requests is None or requests.derived or not length or not requests.value:
        return
    tokens = run.value("throughput", "total", "output", requests.scope)
    if tokens and apart(tokens / requests.value, length, tokens, requests.value) > MARGIN:
        message = (
            f"output throughput {tokens:g} tok/s and {requests.value:g} requests a second make "
            f"{tokens / requests.value:.5g} tokens a request, but output_len is {length:g}"
        )
        yield broken(run, "throughput", "wrong", message, tokens=tokens, requests=requests.value)


def completion(run: ServingRun) -> Iterator[Finding]:
    """All that was sent came back."""
    totals, sent = run.totals, run.workload.num_prompts
    if totals.failed:
        message = f"failed requests: {totals.failed}; their load is in the numbers, their results are not"
        yield found("failed", "suspect", message, failed=totals.failed)
    if totals.completed == 0:
        yield found("completed", "wrong", "completed is 0: there is no result")
    elif totals.completed is not None and sent is not None and totals.completed != sent:
        if totals.failed == sent - totals.completed:
            return
        more = totals.completed > sent
        message = f"{totals.completed} completed of num_prompts {sent}"
        message += "" if more else f": {sent - totals.completed} of them not in the numbers"
        severity: Severity = "wrong" if more else "suspect"
        yield broken(run, "completed", severity, message, completed=totals.completed, num_prompts=sent)


def sent(run: ServingRun) -> Iterator[Finding]:
    """A client kept to the rate that it was asked for; where it does not say at which it sent, no more came
    back than that."""
    asked, rate, count = run.workload.request_rate, run.value("sent_rate"), run.workload.num_prompts
    totals = run.totals
    if asked and totals.completed and totals.duration_s and not run.workload.ramp_up:
        back = totals.completed / totals.duration_s
        gaps = totals.completed * min(run.workload.burstiness or 1.0, 1.0)
        if back > asked * (1 + MARGIN + 3 / gaps**0.5):
            message = (
                f"{back:.6g} requests a second came back ({totals.completed} in a duration of "
                f"{totals.duration_s:g} s), though a rate of {asked:g} was asked for"
            )
            yield broken(run, "rate_not_sent", "suspect", message, came_back=back, asked=asked)
    if asked and rate is not None and count and rate < asked * min(SENT, 1 - 3 / count**0.5):
        message = (
            f"{rate:g} requests a second were sent, {asked:g} asked for: the client did not keep up, and the "
            "numbers are those of the lower rate"
        )
        yield found("rate_not_sent", "suspect", message, sent=rate, asked=asked)


def zeros(run: ServingRun) -> Iterator[Finding]:
    """A time or count of nothing; latencies of requests that are 0 are left out before (unmeasured.py)."""
    totals, load = run.totals, run.workload
    named = [("duration_s", totals.duration_s), ("concurrency allowed", load.concurrency)]
    named += [("input length asked for", load.input_len or load.longest_input_len)]
    named += [("output length asked for", load.output_len or load.longest_output_len)]
    if totals.completed:
        named += [("input_tokens", totals.input_tokens), ("output_tokens", totals.output_tokens)]
    for m in run.metrics if totals.completed != 0 else ():
        rate = "throughput" in m.name or m.name.startswith("max_")
        time = m.unit == "ms" and m.statistic in NEVER_ZERO and (m.name, m.statistic) != ("itl", "median")
        named += [(m.name, m.value)] if rate or time else []
    for name, value in named:
        if value == 0 and name not in WAITS:
            yield found("zero", "suspect", f"{name} is 0: not measured, whatever its name says")


def goodput(run: ServingRun) -> Iterator[Finding]:
    """Requests that met their goals are some of all."""
    good, every = run.value("goodput"), run.value("request_throughput")
    if good is not None and every is not None and good > every * (1 + EXACT) + rounding(good, every):
        message = f"goodput {good:g} req/s is above the request throughput of {every:g}"
        yield broken(run, "goodput", "wrong", message, goodput=good, request_throughput=every)


def retokenised(run: ServingRun) -> Iterator[Finding]:
    """The text, tokenised again, beside the server's own count."""
    again, count = real(run.extra.get("total_output_tokens_retokenized")), run.totals.output_tokens
    if again is None or not count or RETOKENISED[0] <= again / count <= RETOKENISED[1]:
        return
    message = f"total_output_tokens_retokenized is {again:g}, the server counted {count}: "
    lost = again < LOST * count
    if lost:
        message += (
            "most of the answers' text did not reach the client; throughput and TPOT rest on the server's"
        )
    message += " count alone" if lost else "random or special tokens, or one of the counts is off"
    yield found("retokenised", "suspect" if lost else "note", message, retokenised=again, counted=count)


RULES = (rates, sum_of_kinds, between_rates, lengths, completion, sent, zeros, goodput, retokenised)
