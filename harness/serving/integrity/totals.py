"""Rules for counts, for rates as counts over time, and for values that cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.integrity.common import (
    EXACT,
    FASTEST_STEP_MS,
    MARGIN,
    WAITS,
    apart,
    found,
    hint,
    misfit,
    rounding,
)
from harness.serving.schema import Finding, OfferedLoad, ServingRun, Severity

LOGGED_STEPS = 40  # decode steps between two of the server's own rates (SGLang's --decode-log-interval)
MOST_ABOVE = 10.0  # the most of the server's own rate, which is of its last decode steps, over the mean rate
MOST_APART = 2.0  # a factor between the decode rate and the server's own, whose steps are the slowest
LOST = 0.5  # of the server's count; below it text went missing
RETOKENISED = (0.8, 1.25)  # of the server's count; dstack's 54 rows lie between 0.957 and 1
NEVER_ZERO = ("total", "mean", "median", "p99", "max")  # of a time; the median of ITL may be 0
CLOCK = 0.02  # AIPerf divides by its whole time, but reports the time between its requests
SENT = 0.9  # the least share of the requested rate, unless chance explains a smaller one (see `sent`)
EARLY = 0.8  # of the requested output length; below it answers stopped early
LENGTH = 1.5  # a factor; templates, special tokens and ranges of lengths stay below it


def rates(run: ServingRun) -> Iterator[Finding]:
    """Requests, and tokens of each kind, over the run's duration."""
    duration = run.totals.duration_s
    if not duration:
        return
    reported = list(_rates(run, duration))
    same_clock, own_s = _of_one_clock(reported)
    if any(rate["off"] > EXACT for rate in same_clock):
        names = ", ".join(rate["name"] for rate in same_clock)
        yield misfit(run, "clock", "note", "other", names=names, time=own_s, duration=duration)
    for rate in reported:
        if rate["off"] <= EXACT or rate in same_clock:
            continue
        rate["meaning"] = hint(run, rate["value"] / rate["expected"] if rate["expected"] else 0.0)
        if rate["unit"] == "tok/s":
            other_kinds = {kind: n for kind, n in _counted(run).items() if n and n != rate["count"]}
            for kind, count in other_kinds.items():
                if apart(rate["value"], count / duration, duration) <= EXACT:
                    rate["meaning"] = f" (it is that of {kind} tokens)"
                    break
        severity: Severity = "suspect" if rate["off"] < CLOCK else "wrong"
        yield misfit(run, severity=severity, text="apart", **rate)


def _of_one_clock(reported: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """The rates that are near the counted ones, and the seconds by which the client divided their counts. It
    may divide by another time than it reports (AIPerf does). ([], 0) if they are not all of one time."""
    near = [rate for rate in reported if rate["off"] < CLOCK]
    if near and (value := near[0]["value"]):
        own_s = near[0]["count"] / value
        if all(apart(rate["value"], rate["count"] / own_s, value) <= EXACT for rate in near):
            return near, own_s
    return [], 0.0


def _rates(run: ServingRun, duration: float) -> Iterator[dict[str, Any]]:
    """Each reported rate of the whole engine with the count that it is of: the name of its rule, and the
    values of the text `apart`; and `off`: how far it and the counted rate are apart, beyond rounding."""
    tokens = _counted(run)
    for metric in run.metrics:
        if metric.name == "request_throughput":
            name, of, count = metric.name, "completed", run.totals.completed
        elif metric.name == "throughput" and metric.statistic == "total" and metric.tokens == "unknown":
            implied = metric.value * duration  # tokens of one of the kinds: the nearest is taken
            name, of = "unsaid throughput", "tokens"
            count = min((n for n in tokens.values() if n), key=lambda n: abs(n - implied), default=None)
        elif metric.name == "throughput" and metric.statistic == "total":
            name, of, count = f"{metric.tokens} throughput", "tokens", tokens.get(metric.tokens)
        else:
            continue
        value = run.whole_throughput(metric)
        if not metric.derived and value is not None and count is not None:
            expected = count / duration
            values = {"name": name, "unit": metric.unit, "of": of, "value": value, "count": count}
            off = apart(value, expected, duration)
            yield {"rule": metric.name, **values, "duration": duration, "expected": expected, "off": off}


def _counted(run: ServingRun) -> dict[str, int | None]:
    """Tokens of each kind over the run; None where they are not known."""
    input_tokens, output_tokens = run.totals.input_tokens, run.totals.output_tokens
    both = run.value("tokens", "total", "total")  # of clients that count both together
    if input_tokens is not None and output_tokens is not None:
        both = input_tokens + output_tokens
    total = None if both is None else round(both)
    return {"output": output_tokens, "input": input_tokens, "total": total}


def sum_of_kinds(run: ServingRun) -> Iterator[Finding]:
    """Input and output throughput of one scope make the total."""
    for metric in run.metrics:
        if (metric.name, metric.tokens, metric.statistic) != ("throughput", "total", "total"):
            continue
        into = run.value("throughput", "total", "input", metric.scope)
        out = run.value("throughput", "total", "output", metric.scope)
        if into is not None and out is not None and apart(metric.value, into + out, into, out) > EXACT:
            values = {"total": metric.value, "input": into, "output": out, "sum": into + out}
            yield misfit(run, "total_throughput", "wrong", "apart", **values)


def lengths(run: ServingRun) -> Iterator[Finding]:
    """Tokens of a request, as counted, beside the requested length."""
    load, completed = run.workload, run.totals.completed
    for kind in ("input", "output"):
        count, wanted = getattr(run.totals, f"{kind}_tokens"), getattr(load, f"{kind}_len")
        if count is None or not completed or not wanted:
            continue
        mean = count / completed
        least, most = 1 / LENGTH, LENGTH
        if kind == "output":
            least, most = EARLY, _longest_output(load, completed)
        if least <= mean / wanted <= most:
            continue
        values = {"counted": mean, "count": count, "completed": completed, "asked": wanted}
        if kind == "output" and 0.01 < mean / wanted < 1:
            yield misfit(run, "output_length", "note", "early", **values)
        else:
            yield misfit(run, f"{kind}_length", "suspect", "unlike", **values)


def _longest_output(load: OfferedLoad, count: int) -> float:
    """By what factor the mean length may exceed the requested one, as lengths of a range differ by chance."""
    if load.range_ratio is None or load.range_ratio > 1:
        return 1 + MARGIN
    # Of an even distribution the deviation is half its width over the root of 3, here relative to its mean.
    deviation = (1 - load.range_ratio) / (1 + load.range_ratio) / 3**0.5
    return 1 + MARGIN + 3 * deviation / count**0.5


def between_rates(run: ServingRun) -> Iterator[Finding]:
    """Used if no duration is given: tokens a second over requests a second are tokens of a request."""
    requests, length = run.metric("request_throughput"), run.value("output_len", "mean")
    if run.totals.duration_s or requests is None or requests.derived or not length or not requests.value:
        return
    tokens = run.value("throughput", "total", "output", requests.scope)
    if tokens and apart(tokens / requests.value, length, tokens, requests.value) > MARGIN:
        values = {"tokens": tokens, "requests": requests.value, "each": tokens / requests.value}
        yield misfit(run, "throughput", "wrong", "between_rates", length=length, **values)


def completion(run: ServingRun) -> Iterator[Finding]:
    """All that was sent came back."""
    completed, failed, sent = run.totals.completed, run.totals.failed, run.workload.num_prompts
    if failed:
        yield found("failed", "suspect", "some", failed=failed)
    if completed == 0:
        yield found("completed", "wrong", "none")
    elif completed is not None and sent is not None and sent - completed not in (0, failed):
        how: tuple[Severity, str] = ("wrong", "more") if completed > sent else ("suspect", "fewer")
        yield misfit(run, "completed", *how, completed=completed, num_prompts=sent, lost=sent - completed)


def sent(run: ServingRun) -> Iterator[Finding]:
    """A client kept to the requested rate. If it does not report its rate, no more came back than that."""
    asked, sent_rate, prompts = run.workload.request_rate, run.value("sent_rate"), run.workload.num_prompts
    completed, duration = run.totals.completed, run.totals.duration_s
    if not asked:
        return
    if completed and duration and not run.workload.ramp_up:
        came_back = completed / duration
        # The mean of n random gaps deviates by 1/sqrt(n), more where the client sends in bursts.
        gaps = completed * min(run.workload.burstiness or 1.0, 1.0)
        if came_back > asked * (1 + MARGIN + 3 / gaps**0.5):
            values = {"came_back": came_back, "completed": completed, "duration": duration, "asked": asked}
            yield misfit(run, "rate_not_sent", "suspect", "came_back", **values)
    if sent_rate is not None and prompts and sent_rate < asked * min(SENT, 1 - 3 / prompts**0.5):
        yield found("rate_not_sent", "suspect", "sent", sent=sent_rate, asked=asked)


def zeros(run: ServingRun) -> Iterator[Finding]:
    """No time or count is 0. Latencies of 0 of single requests are left out before (samples.py)."""
    totals, load = run.totals, run.workload
    named = {
        "duration_s": totals.duration_s, "concurrency allowed": load.concurrency,
        "input length asked for": load.input_len or load.longest_input_len,
        "output length asked for": load.output_len or load.longest_output_len,
    }  # fmt: skip
    if totals.completed:
        named |= {"input_tokens": totals.input_tokens, "output_tokens": totals.output_tokens}
    zero = [name for name, value in named.items() if value == 0]
    for metric in run.metrics:
        name, statistic = metric.name, metric.statistic
        is_rate = "throughput" in name or name.startswith("max_")
        is_bursts = (name, statistic) == ("itl", "median")
        is_time = metric.unit == "ms" and statistic in NEVER_ZERO and not is_bursts and name not in WAITS
        if metric.value == 0 and (is_rate or is_time) and totals.completed != 0:
            zero.append(name)
    for name in zero:
        yield found("zero", "suspect", "of_run", name=name)


def goodput(run: ServingRun) -> Iterator[Finding]:
    """Requests that met their goals are a part of all."""
    good, every = run.value("goodput"), run.value("request_throughput")
    if good is not None and every is not None and good > every * (1 + EXACT) + rounding(good, every):
        yield misfit(run, "goodput", "wrong", "above", goodput=good, request_throughput=every)


def retokenised(run: ServingRun) -> Iterator[Finding]:
    """The tokens of the text, counted again, beside the server's own count."""
    extra, count = Fields(run.id, run.extra), run.totals.output_tokens
    again = extra.number("total_output_tokens_retokenized")
    if again is not None and count and again < LOST * count:
        yield found("retokenised", "suspect", "lost", retokenised=again, counted=count)
    elif again is not None and count and not RETOKENISED[0] <= again / count <= RETOKENISED[1]:
        yield found("retokenised", "note", "apart", retokenised=again, counted=count)


def batch_in_lockstep(run: ServingRun) -> Iterator[Finding]:
    """The rates of SGLang's bench_one_batch and bench_one_batch_server. Their batch is prefilled together and
    then decoded together: rates are its tokens over the time of its prefill, decoding, or a decode step."""
    load, duration = run.workload, run.totals.duration_s
    size = load.num_prompts
    prompt_tokens = size * load.input_len if size and load.input_len else None
    output_tokens = size * load.output_len if size and load.output_len else None
    step_ms = run.reported_ms("decode_step", "median")
    prefill_ms = run.reported_ms("prefill", "total") or run.reported_ms("ttft", "max")
    prefill_s = prefill_ms / 1e3 if prefill_ms else None
    # Of each rate: the metric, its statistic, the tokens, their time, and how that follows, for the message.
    rates = [("prefill_throughput", "total", prompt_tokens, prefill_s, "")]
    from_rate = ""
    if not prefill_s and prompt_tokens and (prefill_rate := run.value("prefill_throughput")):
        prefill_s, from_rate = prompt_tokens / prefill_rate, " (the duration less that of prefill)"
    decoding_s = duration - prefill_s if duration and prefill_s else None
    rates.append(("decode_throughput", "total", output_tokens, decoding_s, from_rate))
    rates.append(("decode_throughput", "median", size, step_ms / 1e3 if step_ms else None, ""))
    for name, statistic, tokens, seconds, how in rates:
        metric = run.metric(name, statistic)
        value = run.whole_throughput(metric) if metric and not metric.derived else None
        if value is None or not tokens:
            continue
        if not seconds and duration and value < tokens / duration * (1 - MARGIN):
            seconds, how = duration, " (the whole duration)"
        if seconds and seconds > 0 and apart(value, tokens / seconds, seconds) > MARGIN:
            values = {"value": value, "tokens": tokens, "seconds": seconds, "expected": tokens / seconds}
            likely = hint(run, value * seconds / tokens)
            yield misfit(run, name, "wrong", "apart", how=how, hint=likely, **values)


def last_interval(run: ServingRun) -> Iterator[Finding]:
    """The decode rate beside the server's own, which is of its last LOGGED_STEPS steps. If the batch takes no
    more steps than these, they may be those of an earlier batch."""
    length, decode = run.workload.output_len or 0, run.value("decode_throughput", "total")
    mean = run.value("throughput", "total", "output")
    for name in ("last_gen_throughput", "steady_state_output_throughput"):
        own = run.value(name)
        values = {"name": name, "own": own}
        if own and mean and own > MOST_ABOVE * mean:
            values |= {"mean": mean, "hint": hint(run, own / mean)}
            yield misfit(run, "decode_throughput", "suspect", "above_mean", **values)
        elif own and decode and length > LOGGED_STEPS and not 1 / MOST_APART < decode / own < MOST_APART:
            values |= {"decode": decode, "hint": hint(run, decode / own)}
            yield misfit(run, "decode_throughput", "suspect", "unlike_server", **values)


def batch_as_asked(run: ServingRun) -> Iterator[Finding]:
    """Used if the client counted no tokens: the requested ones over the whole time."""
    totals, load = run.totals, run.workload
    size, into, out, duration = load.num_prompts, load.input_len, load.output_len, totals.duration_s
    if not duration or not size or not out or (totals.completed, totals.output_tokens) != (None, None):
        return
    counts = {"output": size * out, "total": size * (into + out) if into else None}
    for metric in run.metrics:
        count, value = counts.get(metric.tokens), run.whole_throughput(metric)
        if metric.name != "throughput" or not count or value is None:
            continue
        expected = count / duration
        if apart(value, expected, duration) > MARGIN:
            asked = {"size": size, "into": into or 0, "out": out, "duration": duration}
            values: dict[str, object] = {"kind": metric.tokens, "throughput": value, "expected": expected}
            values["hint"] = hint(run, value / expected)
            yield misfit(run, "throughput", "suspect", "asked", **values, **asked)


# Values that no engine reaches, and impossible ones

# These are bounds, not estimates: any measurement known to this project is smaller by a factor of ten.
LONGEST_MS = 86_400_000.0  # a day
PER_GPU = 1e6  # tok/s, of any kind, with or without a prefix cache
ALL = 1e8  # tok/s, of any cluster
# tok/s: 5e15 FP8 operations a second, more than any GPU has, over those of a token in DeepSeek-V3.
PREFILL_PER_GPU = 5e15 / (2 * 37e9)
PREFILL = 5e5  # tok/s of one request of another model: about that of eight such GPUs
GPUS = 8  # if their number is not known
LONG = 256  # tokens of a prompt from which on its prefill is no shorter than a decode step
OF_A_STEP = 0.95  # of a decode step: no prefill is shorter, since it reads the same weights
MOST_ACCEPTED = 64  # most tokens of a step of speculative decoding
LARGEST_NODE = 72  # GPUs, of GB200 NVL72


def possible_latencies(run: ServingRun) -> Iterator[Finding]:
    """Latencies in ms that are too short or too long for their name."""
    for metric in run.metrics:
        if metric.unit != "ms" or metric.statistic == "std" or metric.name in WAITS:
            continue
        least = FASTEST_STEP_MS if metric.statistic in ("mean", "p99", "max") else 0.0
        if 0 < metric.value < least or metric.value > LONGEST_MS:
            what = "too short to be one" if metric.value < least else "longer than a day"
            values = {"name": metric.name, "statistic": metric.statistic, "value": metric.value, "what": what}
            yield found("plausible", "suspect", "latency", **values)


def possible_rates(run: ServingRun) -> Iterator[Finding]:
    """Throughputs beyond any hardware."""
    for metric in run.metrics:
        if metric.unit != "tok/s":
            continue
        gpus = 1 if metric.scope == "gpu" else run.gpus
        if metric.value > (PER_GPU * gpus if gpus else ALL):
            values = {"kind": metric.tokens, "throughput": metric.value, "gpus": gpus or "all"}
            yield found("plausible", "suspect", "of_gpus", **values)
        if metric.scope == "request" and metric.value > 1e3 / FASTEST_STEP_MS:
            values = {"name": metric.name, "statistic": metric.statistic, "value": metric.value}
            yield found("plausible", "suspect", "of_request", **values)


def prefill(run: ServingRun) -> Iterator[Finding]:
    """A prompt is computed before its first token comes, unless it is in the prefix cache."""
    totals, tokens, tpot = run.totals, run.workload.input_len, run.reported_ms("tpot")
    if totals.input_tokens and totals.completed:
        tokens = totals.input_tokens / totals.completed
    ttfts = (run.reported_ms("ttft"), run.reported_ms("ttft", "median"))
    ttft = min((time for time in ttfts if time), default=0.0)
    if not tokens or not ttft or run.mode == "offline":
        return
    deepseek = re.search(r"deepseek|kimi-k2", run.model, re.IGNORECASE)
    limit = (run.gpus or GPUS) * PREFILL_PER_GPU if deepseek else PREFILL
    values = {"tokens": tokens, "ttft": ttft, "rate": tokens / ttft * 1e3}
    if values["rate"] > limit:
        yield misfit(run, "prefix_cache", "suspect", "compute", **values)
    elif tpot and tokens >= LONG and ttft < OF_A_STEP * tpot and not run.parallelism.disaggregated:
        yield misfit(run, "prefix_cache", "suspect", "step", steps=ttft / tpot, tpot=tpot, **values)


def layout(run: ServingRun) -> Iterator[Finding]:
    """Impossible parallelism, and ranges of lengths whose shortest is above the longest."""
    degrees = run.parallelism.model_dump(include={"tp", "pp", "dp", "ep"}, exclude_none=True)
    for name, degree in degrees.items():
        if degree < 1 or (run.gpus and degree > run.gpus):
            yield _impossible(name, degree, f"over {run.gpus} GPUs" if degree else "of anything")
    if run.gpus and run.nodes and run.gpus > LARGEST_NODE * run.nodes:
        yield _impossible("gpus", run.gpus, f"of {run.nodes} nodes")
    tp, ratio = run.parallelism.tp, run.workload.range_ratio
    if run.gpus and tp and tp < run.gpus and run.gpus % tp and not run.parallelism.disaggregated:
        yield _impossible("tp", tp, f"of {run.gpus} GPUs, which are no multiple of it")
    if ratio and ratio > 1:
        yield _impossible("range_ratio", ratio, "as the shortest length over the longest")


def accepted(run: ServingRun) -> Iterator[Finding]:
    """Tokens of a step: at least one, and exactly one without speculation."""
    length, flags = run.value("accept_length", "mean"), " ".join(run.flags)
    if length is not None and not 1 <= length <= MOST_ACCEPTED:
        yield _impossible("accept_length", length, "tokens a step")
    elif length is not None and length > 1 and flags and "speculative" not in flags:
        yield found("accept_length", "suspect", "no_speculation", accept_length=length)


def _impossible(name: str, value: float, what: str) -> Finding:
    """what: completes the message `NAME is VALUE, which cannot be`"""
    return found("plausible", "wrong", "impossible", name=name, value=value, what=what)


RULES = (
    rates, sum_of_kinds, lengths, between_rates, completion, sent, zeros, goodput, retokenised,
    batch_in_lockstep, last_interval, batch_as_asked,
)  # fmt: skip
POSSIBLE = (possible_latencies, possible_rates, prefill, layout, accepted)
