"""One batch in lockstep: all prompts prefilled together, then all decoded together."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.integrity.common import MARGIN, apart, broken, hint, stated, whole
from harness.serving.schema import Finding, ServingRun

LOGGED_STEPS = 40  # of decode between two of the server's own rates (SGLang's --decode-log-interval)
TAIL = 10.0  # times the mean rate: what no step of decode exceeds
AGREE = 2.0  # a factor: the mean over all steps and the rate of the last, slower ones


def steps(run: ServingRun) -> Iterator[Finding]:
    """Tokens of the batch over the time of its prefill, of its decoding, of a decode step.

    SGLang's bench_one_batch and bench_one_batch_server compute them from the same times; only for runs that
    state a `prefill_throughput` or `decode_throughput`.
    """
    load, duration = run.workload, run.totals.duration_s
    size, into, out = load.num_prompts, load.input_len, load.output_len
    prefill, step = stated(run, "prefill", "total"), stated(run, "decode_step", "median")
    first, how = prefill or stated(run, "ttft", "max"), ""
    prefill_rate = run.value("prefill_throughput")
    expected = {("prefill_throughput", "total"): (size and into and size * into, first and first / 1e3)}
    if not first and size and into and prefill_rate:
        first, how = 1e3 * size * into / prefill_rate, " (the duration less that of prefill)"
    decoding = duration - first / 1e3 if duration and first else None
    expected["decode_throughput", "total"] = (size and out and size * out, decoding)
    expected["decode_throughput", "median"] = (size, step and step / 1e3)
    for (name, statistic), (tokens, seconds) in expected.items():
        metric = run.metric(name, statistic)
        value = whole(run, metric) if metric and not metric.derived else None
        if value is None or not tokens:
            continue
        if not seconds and duration and value < tokens / duration * (1 - MARGIN):
            seconds, how = duration, " (the whole duration)"
        if seconds and seconds > 0 and apart(value, tokens / seconds, seconds) > MARGIN:
            values = {"value": value, "tokens": tokens, "seconds": seconds, "expected": tokens / seconds}
            likely = hint(run, value * seconds / tokens)
            yield broken(run, name, "wrong", "apart", how=how, hint=likely, **values)


def last_interval(run: ServingRun) -> Iterator[Finding]:
    """Decoding beside the server's own rate of its last or steady steps, if there were enough of them for
    that rate to be of this batch."""
    length, decode = run.workload.output_len or 0, run.value("decode_throughput", "total")
    mean = run.value("throughput", "total", "output")
    for name in ("last_gen_throughput", "steady_state_output_throughput"):
        own = run.value(name)
        values = {"name": name, "own": own}
        if own and mean and own > TAIL * mean:
            values |= {"mean": mean, "hint": hint(run, own / mean)}
            yield broken(run, "decode_throughput", "suspect", "above_mean", **values)
        elif own and decode and length > LOGGED_STEPS and not 1 / AGREE < decode / own < AGREE:
            values |= {"decode": decode, "hint": hint(run, decode / own)}
            yield broken(run, "decode_throughput", "suspect", "unlike_server", **values)


def overall(run: ServingRun) -> Iterator[Finding]:
    """If nobody counted tokens: those asked for, over the whole time."""
    totals, load = run.totals, run.workload
    size, into, out, duration = load.num_prompts, load.input_len, load.output_len, totals.duration_s
    if (
        totals.completed is not None
        or totals.output_tokens is not None
        or not duration
        or not size
        or not out
    ):
        return
    counts = {"output": size * out, "total": into and size * (into + out)}
    for metric in run.metrics:
        count, value = counts.get(metric.tokens), whole(run, metric)
        if metric.name != "throughput" or not count or value is None:
            continue
        expected = count / duration
        if apart(value, expected, duration) > MARGIN:
            asked = {"size": size, "into": into or 0, "out": out, "duration": duration}
            values = {"kind": metric.tokens, "throughput": value, "expected": expected}
            yield broken(
                run, "throughput", "suspect", "asked", hint=hint(run, value / expected), **values, **asked
            )


RULES = (steps, last_interval, overall)
