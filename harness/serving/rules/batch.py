"""One batch in lockstep: all prompts prefilled together, then all decoded together."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.rules.common import MARGIN, apart, broken, hint, stated, whole
from harness.serving.schema import Finding, ServingRun

ALIKE = 4.0  # a factor that decoding at its start and its end stay within


def steps(run: ServingRun) -> Iterator[Finding]:
    """Tokens of the batch over the time of its prefill, of its decoding, of a decode step.

    What SGLang's bench_one_batch and bench_one_batch_server compute from the same times; only for runs that
    state a `prefill_throughput` or `decode_throughput`.
    """
    asked, duration = run.workload, run.totals.duration_s
    size, into, out = asked.num_prompts, asked.input_len, asked.output_len
    prefill, step = stated(run, "prefill", "total"), stated(run, "decode_step", "median")
    first, how = prefill or stated(run, "ttft", "max"), ""
    prefill_rate = run.value("prefill_throughput")
    expected = {("prefill_throughput", "total"): (size and into and size * into, first and first / 1e3)}
    if not first and size and into and prefill_rate:
        first, how = 1e3 * size * into / prefill_rate, ", what prefill_throughput leaves of all,"
    expected["decode_throughput", "total"] = (
        size and out and size * out,
        duration - first / 1e3 if duration and first else None,
    )
    expected["decode_throughput", "median"] = (size, step and step / 1e3)
    for (name, statistic), (tokens, seconds) in expected.items():
        metric = run.metric(name, statistic)
        value = whole(run, metric) if metric and not metric.derived else None
        if value is None or not tokens or not seconds or seconds <= 0:
            continue
        if apart(value, tokens / seconds, seconds) > MARGIN:
            yield broken(
                run,
                name,
                f"{name} is {value:g} tok/s, but {tokens:g} tokens in {seconds:g} s{how} are "
                f"{tokens / seconds:g}{hint(run, value * seconds / tokens)}",
                {name: value, "tokens": tokens, "seconds": seconds},
            )


def overall(run: ServingRun) -> Iterator[Finding]:
    """Where nobody counted tokens: those asked for, over the whole time."""
    totals, asked = run.totals, run.workload
    size, into, out = asked.num_prompts, asked.input_len, asked.output_len
    if totals.completed is not None or totals.output_tokens is not None or not totals.duration_s or not size:
        return
    counts = {"output": out and size * out, "total": into and out and size * (into + out)}
    for metric in run.metrics:
        count, value = counts.get(metric.tokens), whole(run, metric)
        if metric.name != "throughput" or metric.derived or not count or value is None:
            continue
        expected = count / totals.duration_s
        if apart(value, expected, totals.duration_s) > MARGIN:
            yield broken(
                run,
                "throughput",
                f"{metric.tokens} throughput {value:g} tok/s, but {size} requests of {into or 0:g} / {out:g} "
                f"tokens in a duration of {totals.duration_s:g} s are {expected:g}"
                f"{hint(run, value / expected)}",
                {"throughput": value, "tokens": count, "duration": totals.duration_s, "expected": expected},
                "suspect",
            )


def last_step(run: ServingRun) -> Iterator[Finding]:
    """The server's own count of its last decode steps, beside the client's of all of them."""
    last, all_steps = run.value("last_gen_throughput"), run.value("decode_throughput")
    if last and all_steps and not 1 / ALIKE < last / all_steps < ALIKE:
        yield Finding(
            rule="decode_throughput",
            severity="suspect",
            message=f"last_gen_throughput is {last:g} tok/s, decode_throughput (output_throughput) "
            f"{all_steps:g}{hint(run, last / all_steps)}",
            numbers={"last_gen_throughput": last, "decode_throughput": all_steps},
        )


RULES = (steps, overall, last_step)
