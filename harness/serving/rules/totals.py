"""Counts, and throughputs as counts over time."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.reading import LARGEST
from harness.serving.rules.common import EXACT, MARGIN, apart, broken, hint, whole
from harness.serving.schema import Finding, ServingRun

RETOKENISED = (0.8, 1.25)  # of the server's count; dstack's 54 rows lie between 0.957 and 1
CLOCK = 0.02  # AIPerf divides by its whole time, and states the time between its requests
LENGTH = 1.5  # a factor: templates, special tokens and ranges of lengths stay within


def throughputs(run: ServingRun) -> Iterator[Finding]:
    """Tokens of each kind over the run's duration."""
    totals = run.totals
    both = None not in (totals.input_tokens, totals.output_tokens)
    counts = {
        "output": totals.output_tokens,
        "input": totals.input_tokens,
        "total": totals.input_tokens + totals.output_tokens if both else None,
    }
    for metric in run.metrics:
        count, value = counts.get(metric.tokens), whole(run, metric)
        if metric.name != "throughput" or metric.statistic != "total" or metric.derived:
            continue
        if count is None or not totals.duration_s or value is None:
            continue
        expected = count / totals.duration_s
        if (off := apart(value, expected, totals.duration_s)) > EXACT:
            others = [
                kind
                for kind, n in counts.items()
                if n and apart(value, n / totals.duration_s, totals.duration_s) <= EXACT
            ]
            meaning = f" (it is that of {others[0]} tokens)" if others else hint(run, _over(value, expected))
            yield broken(
                run,
                "throughput",
                f"{metric.tokens} throughput {value:g} tok/s, but {count} tokens in a duration of "
                f"{totals.duration_s:g} s are {expected:g}{meaning or _clock(off)}",
                {"throughput": value, "tokens": count, "duration": totals.duration_s, "expected": expected},
                "note" if off < CLOCK else "wrong",
            )


def requests(run: ServingRun) -> Iterator[Finding]:
    """Requests over the run's duration."""
    metric, totals = run.metric("request_throughput"), run.totals
    if metric is None or metric.derived or totals.completed is None or not totals.duration_s:
        return
    value, expected = whole(run, metric), totals.completed / totals.duration_s
    if value is not None and (off := apart(value, expected, totals.duration_s)) > EXACT:
        yield broken(
            run,
            "request_throughput",
            f"request_throughput {value:g} req/s, but {totals.completed} completed in a "
            f"duration of {totals.duration_s:g} s are {expected:g}"
            f"{hint(run, _over(value, expected)) or _clock(off)}",
            {
                "request_throughput": value,
                "completed": totals.completed,
                "duration": totals.duration_s,
                "expected": expected,
            },
            "note" if off < CLOCK else "wrong",
        )


def sum_of_kinds(run: ServingRun) -> Iterator[Finding]:
    """Input and output throughput of one scope make the total."""
    for total in run.metrics:
        if total.name != "throughput" or total.tokens != "total" or total.statistic != "total":
            continue
        parts = [run.metric("throughput", "total", kind, total.scope) for kind in ("input", "output")]
        if None in parts:
            continue
        into, out = (one.value for one in parts)
        if apart(total.value, into + out, into, out) > EXACT:
            yield broken(
                run,
                "total_throughput",
                f"total throughput {total.value:g} tok/s, but input {into:g} and output {out:g} "
                f"make {into + out:g}",
                {"total": total.value, "input": into, "output": out},
            )


def lengths(run: ServingRun) -> Iterator[Finding]:
    """Tokens of a request, as counted, beside what was asked for."""
    totals, asked = run.totals, run.workload
    for kind, count, wanted in (
        ("input", totals.input_tokens, asked.input_len),
        ("output", totals.output_tokens, asked.output_len),
    ):
        if count is None or not totals.completed or not wanted:
            continue
        each = count / totals.completed
        ratio = each / wanted
        if 1 / LENGTH <= ratio <= (1 + MARGIN if kind == "output" and asked.range_ratio is None else LENGTH):
            continue
        short = kind == "output" and 0.01 < ratio < 1
        yield broken(
            run,
            f"{kind}_length",
            f"{kind} tokens a request: {each:g} counted ({count} of {totals.completed}), {wanted:g} asked for"
            + ("; they stopped early" if short else ""),
            {"counted": each, "asked": wanted},
            "note" if short else "suspect",
        )


def completion(run: ServingRun) -> Iterator[Finding]:
    """All that was sent came back."""
    totals, sent = run.totals, run.workload.num_prompts
    if totals.failed:
        numbers = {"failed": totals.failed, **({"completed": totals.completed} if totals.completed else {})}
        yield Finding(
            rule="failed",
            severity="suspect",
            message=f"{totals.failed} requests failed: their load is in the numbers, their results are not",
            numbers=numbers,
        )
    if totals.completed is None:
        return
    if totals.completed == 0:
        yield Finding(rule="completed", severity="wrong", message="completed is 0: there is no result")
    elif sent is not None and totals.completed != sent and totals.failed != sent - totals.completed:
        more = totals.completed > sent
        yield broken(
            run,
            "completed",
            f"{totals.completed} completed of num_prompts {sent}"
            + ("" if more else f": {sent - totals.completed} are not in the numbers"),
            {"completed": totals.completed, "num_prompts": sent},
            "wrong" if more else "suspect",
        )


def zeros(run: ServingRun) -> Iterator[Finding]:
    """A time or count of nothing."""
    totals = run.totals
    named = [("duration_s", totals.duration_s)]
    if totals.completed:
        named += [("input_tokens", totals.input_tokens), ("output_tokens", totals.output_tokens)]
        named += [(m.name, m.value) for m in run.metrics if m.name.endswith("throughput")]
        named += [(m.name, m.value) for m in run.metrics if m.unit == "ms" and m.statistic in ("mean", "p99")]
    single = run.totals.output_tokens is not None and run.totals.output_tokens == run.totals.completed
    for name, value in named:
        if value == 0 and not (single and name in ("tpot", "itl")):
            yield Finding(
                rule="zero", severity="suspect", message=f"{name} is 0: not measured, whatever its name says"
            )


def retokenised(run: ServingRun) -> Iterator[Finding]:
    """The text, tokenised again, beside the server's own count."""
    again, count = run.extra.get("total_output_tokens_retokenized"), run.totals.output_tokens
    if not isinstance(again, (int, float)) or isinstance(again, bool) or abs(again) > LARGEST or not count:
        return
    if not RETOKENISED[0] <= again / count <= RETOKENISED[1]:
        yield Finding(
            rule="retokenised",
            severity="note",
            message=f"total_output_tokens_retokenized is {again:g}, the server counted {count}: "
            "random or special tokens, or one of the counts is off",
            numbers={"retokenised": again, "counted": count},
        )


def _clock(off: float) -> str:
    return ": the client divides by another time than it states" if off < CLOCK else ""


def _over(value: float, expected: float) -> float:
    return value / expected if expected else 0.0


RULES = (throughputs, requests, sum_of_kinds, lengths, completion, zeros, retokenised)
