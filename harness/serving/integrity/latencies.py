"""Statistics of one latency among themselves, and of latencies beside each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from harness.serving.integrity.common import (
    EXACT,
    MARGIN,
    WAITS,
    apart,
    broken,
    equal_lengths,
    hint,
    output_length,
    rounding,
    stated,
)
from harness.serving.schema import Finding, ServingRun

IDENTITY = 0.005  # of the mean E2E; dstack's 54 rows hold to 4e-10
TAIL = (
    0.05  # of the mean E2E, after the last token: guidellm's ends with the response, not with its last token
)
ASKED = (1 / 20, 1.5)  # E2E over what follows from a length that was asked for: most stop early, none late
CORE = ("mean", "median", "std", "p99")
PER_REQUEST = ("ttft", "tpot", "e2e")
ONE_A_REQUEST = (*PER_REQUEST, "normalized_time_per_output_token", "input_len", "output_len")
UNIT = 100  # a factor that no distribution of latencies has between its mean and its median
TAILS = 4  # times p99: the longest hundredth of requests
BUNDLED = 1.5  # ITL / TPOT from which on chunks hold several tokens
BUNDLE = 64  # tokens a chunk, at most


def statistics(run: ServingRun) -> dict[str, dict[str, float]]:
    """Of each latency, its statistics in ms, as the client reported them."""
    values: dict[str, dict[str, float]] = {}
    for metric in run.metrics:
        if metric.unit == "ms" and metric.scope in ("request", "unknown", "instance") and not metric.derived:
            values.setdefault(metric.name, {}).setdefault(metric.statistic, metric.value)
    return values


def quantile(statistic: str) -> float | None:
    """0.99 for `p99`, 0.5 for `median`, 0 and 1 for `min` and `max`; None for what is none."""
    named = {"min": 0.0, "median": 0.5, "max": 1.0}
    if statistic in named:
        return named[statistic]
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", statistic)
    return float(match[1]) / 100 if match and float(match[1]) <= 100 else None


def distributions(run: ServingRun) -> dict[str, dict[str, float]]:
    """Of each metric that has several, its statistics, in its unit, as the client reported them."""
    values: dict[tuple[str, str, str], dict[str, float]] = {}
    for metric in run.metrics:
        if not metric.derived and metric.statistic != "total":
            key = (metric.name, metric.tokens, metric.scope)
            values.setdefault(key, {}).setdefault(metric.statistic, metric.value)
    names = {key: " ".join(word for word in key[1::-1] if word != "none") for key in values}
    return {names[key]: known for key, known in values.items() if len(known) > 1}


def order(run: ServingRun) -> Iterator[Finding]:
    """Quantiles rise; the mean lies between min and max; p50 is the median."""
    for name, known in distributions(run).items():
        ranked = sorted((q, s) for s in known if (q := quantile(s)) is not None)
        pairs = [(low, high) for (_, low), (_, high) in pairwise(ranked)]
        pairs += [p for p in (("min", "mean"), ("mean", "max")) if known.keys() >= set(p)]
        for low, high in pairs:
            same = quantile(low) == quantile(high) and "mean" not in (low, high)
            above = known[low] > known[high] * (1 + 1e-9) + rounding(known[high])
            if above or (same and apart(known[high], known[low]) > EXACT):
                yield Finding(
                    rule="percentile_order",
                    severity="wrong",
                    message=f"{name}: {low} {known[low]:g} and {high} {known[high]:g} are "
                    + ("not the same" if same else "the wrong way round"),
                    numbers={low: known[low], high: known[high]},
                )


def quantile_limits(mean: float, std: float, at: float) -> tuple[float, float]:
    """Between what a quantile of any distribution of that mean and deviation lies (Cantelli's inequality)."""
    return mean - std * math.sqrt((1 - at) / at), mean + std * math.sqrt(at / (1 - at))


def moments(run: ServingRun) -> Iterator[Finding]:
    """Mean, deviation and quantiles of one sample."""
    count, every = run.totals.completed, statistics(run)
    longest = every.get("e2e", {}).get("p99")
    for name, known in every.items():
        mean, std = known.get("mean"), known.get("std")
        if mean is None:
            continue
        median = known.get("median")
        # Tokens of one piece of a stream have no time between them, and with the median the lower quartile.
        pieces = name == "itl" and known.get("p25", mean) * UNIT < mean
        if median and mean and name not in WAITS and not pieces and not 1 / UNIT < median / mean < UNIT:
            yield _unlikely(run, name, "median", median, "mean", mean)
        p99 = known.get("p99")
        if name in PER_REQUEST and p99 is not None and mean > p99 + rounding(mean, p99):
            yield Finding(
                rule="moments",
                severity="suspect",
                message=f"{name}: mean {mean:g} ms is above the p99 of {p99:g}: one request in a hundred "
                "cannot weigh so much",
                numbers={"mean": mean, "p99": p99},
            )
        if std is None:
            continue
        for statistic, value in known.items():
            at = quantile(statistic)
            if at is None or not 0 < at < 1:
                continue
            low, high = quantile_limits(mean, std * (1 + MARGIN), at)
            slack = rounding(*known.values()) * 2 + mean * 1e-6 + (std * 0.5 if (count or 0) < 10 else 0)
            if not low - slack <= value <= high + slack:
                yield Finding(
                    rule="moments",
                    severity="wrong",
                    message=f"{name}: {statistic} {value:g} ms is impossible with mean {mean:g}, std {std:g}"
                    f": it lies in {max(low, 0):.4g}..{high:.4g}{hint(run, value / mean if mean else 0)}",
                    numbers={statistic: value, "mean": mean, "std": std},
                )
        if count and std > mean * math.sqrt(count) * (1 + MARGIN) and name in PER_REQUEST:
            yield _too_wide(
                name, std, f"with mean {mean:g} ms of {count} requests", {"std": std, "mean": mean}
            )
        elif p99 is not None and std > _widest(mean, p99) + rounding(std, p99) and name in PER_REQUEST:
            yield _too_wide(name, std, f"beside a p99 of {p99:g} ms", {"std": std, "p99": p99})
        if name == "itl" and longest and std > math.sqrt(2 * mean * longest):
            yield _too_wide(
                name, std, f"with mean {mean:g} ms, in requests of {longest:g} ms (p99)",
                {"std": std, "mean": mean, "p99_e2e": longest},
            )  # fmt: skip


def extremes(run: ServingRun) -> Iterator[Finding]:
    """Of values that are at least 0: the largest is no more than all together, and no farther from the mean
    than their deviation lets it (Samuelson's inequality); the deviation is no more than both ends let it
    (Bhatia and Davis)."""
    count = run.totals.completed
    for name, known in distributions(run).items():
        mean, std, least, most = (known.get(key) for key in ("mean", "std", "min", "max"))
        slack = rounding(*known.values()) * 2
        if mean and std and most and std > most + slack:
            yield _not_with(name, "std", std, f"a max of {most:g}", mean)
        if not mean or name.split()[-1] not in ONE_A_REQUEST:
            continue
        if count and most and most > count * mean * (1 + MARGIN) + count * slack:
            yield _not_with(name, "max", most, f"a mean of {mean:g} over {count}", mean)
        elif count and most and std is not None and most - mean > _farthest(std, count) + slack * count:
            yield _not_with(name, "max", most, f"mean {mean:g} and std {std:g} of {count}", mean)
        if std and least is not None and most is not None and least <= mean <= most:
            ends = math.sqrt((most - mean) * (mean - least) * (1 + 1 / max((count or 2) - 1, 1)))
            if std > ends * (1 + MARGIN) + slack * 2:
                yield _not_with(name, "std", std, f"mean {mean:g} between {least:g} and {most:g}", mean)


def _farthest(std: float, count: int) -> float:
    return std * math.sqrt(count) * (1 + MARGIN)


def _not_with(name: str, statistic: str, value: float, beside: str, mean: float) -> Finding:
    message = f"{name}: {statistic} {value:g} is impossible with {beside}"
    return Finding(
        rule="moments", severity="wrong", message=message, numbers={statistic: value, "mean": mean}
    )


def _widest(mean: float, p99: float) -> float:
    """The largest deviation of times from 0 to p99 with that mean (Bhatia and Davis), one in a hundred of
    which are up to TAILS times as long."""
    return math.sqrt(max(p99 - mean, 0.0) * mean + 0.01 * max(TAILS * p99 - mean, 0.0) ** 2)


def _too_wide(name: str, std: float, beside: str, numbers: dict[str, float]) -> Finding:
    message = f"{name}: std {std:g} ms is hardly possible {beside}; other units?"
    return Finding(rule="moments", severity="suspect", message=message, numbers=numbers)


def _unlikely(run: ServingRun, name: str, a: str, va: float, b: str, vb: float) -> Finding:
    message = f"{name}: {a} {va:g} ms and {b} {vb:g} ms are far apart{hint(run, va / vb)}; other units?"
    return Finding(rule="moments", severity="suspect", message=message, numbers={a: va, b: vb})


def identity(run: ServingRun) -> Iterator[Finding]:
    """mean E2E = mean TTFT + (n - 1) mean TPOT, n output tokens a request.

    Exact where all requests have the same n, and E2E ends with the last token. With other n it lacks the
    covariance of n and TPOT, which is at most the product of their deviations (Cauchy-Schwarz).
    """
    e2e, ttft, tpot = (stated(run, name, "mean") for name in ("e2e", "ttft", "tpot"))
    length = output_length(run)
    if e2e is None or ttft is None or tpot is None or length is None or length < 1:
        return
    follows = ttft + (length - 1) * tpot
    equal = equal_lengths(run)
    allowed = IDENTITY * max(e2e, follows) + rounding(e2e, ttft, tpot) * (length + 1)
    if not equal:
        allowed += _deviation_of_length(run, length) * (stated(run, "tpot", "std") or tpot)
    counted = bool(run.totals.output_tokens and run.totals.completed)
    if not counted and follows and ASKED[0] <= e2e / follows <= ASKED[1]:
        return
    if abs(e2e - follows) > allowed:
        ratio = _unit_at_fault(e2e, ttft, tpot, length)
        tail = equal and 0 < e2e - follows < TAIL * e2e
        yield broken(
            run,
            "e2e_identity",
            f"mean e2e is {e2e:g} ms, but mean ttft {ttft:g} + ({length:g} - 1) x mean tpot {tpot:g} is "
            f"{follows:g} ms{ratio}" + (", the rest after the last token" if tail else ""),
            {"e2e": e2e, "ttft": ttft, "tpot": tpot, "output_length": length, "follows": follows},
            "note" if tail else "wrong" if equal else "suspect",
        )


def _deviation_of_length(run: ServingRun, mean: float) -> float:
    lengths, load = run.samples.output_lens, run.workload
    if lengths:
        return math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths))
    if stated_std := run.value("output_len", "std"):
        return stated_std
    if load.range_ratio is not None and load.range_ratio <= 1 and load.output_len:
        # Where all came as drawn; those that stop early are of any length.
        shortest = 2 * load.output_len * load.range_ratio / (1 + load.range_ratio)
        if mean > load.output_len * (1 - MARGIN):
            return load.output_len - shortest
    return mean  # of an exponential distribution


def _unit_at_fault(e2e: float, ttft: float, tpot: float, length: float) -> str:
    for factor in (1e3, 1e-3):
        repaired = {
            "e2e": (e2e * factor, ttft, tpot),
            "ttft": (e2e, ttft * factor, tpot),
            "tpot": (e2e, ttft, tpot * factor),
        }
        for name, (e, first, step) in repaired.items():
            if abs(e / (first + (length - 1) * step) - 1) < IDENTITY:
                return f" ({name} is off by a thousand: s for ms?)"
    return ""


def parts_of_e2e(run: ServingRun) -> Iterator[Finding]:
    """A request is no shorter than its first token or all others, and no longer than the run."""
    known = statistics(run)
    e2e, length = known.get("e2e", {}), output_length(run)
    steps = (length - 1) if length and equal_lengths(run) else 0.0
    for name, times in (("ttft", 1.0), ("tpot", steps)):
        for statistic, value in known.get(name, {}).items():
            ends = e2e.get(statistic)
            if (
                statistic == "std"
                or ends is None
                or value * times <= ends * (1 + EXACT) + rounding(ends, value) * times
            ):
                continue
            what = f"{name} {statistic} {value:g} ms" + (f" x {times:g}" if name == "tpot" else "")
            yield Finding(
                rule="parts_of_e2e",
                severity="wrong",
                message=f"{what} is longer than e2e {statistic} {ends:g} ms",
                numbers={name: value, "e2e": ends},
            )
    itl, longest = known.get("itl", {}).get("max"), e2e.get("max")
    if itl and longest and itl > longest * (1 + EXACT) + rounding(itl, longest):
        yield Finding(
            rule="parts_of_e2e",
            severity="wrong",
            message=f"itl max {itl:g} ms is longer than e2e max {longest:g} ms",
            numbers={"itl": itl, "e2e": longest},
        )
    duration = run.totals.duration_s
    for name in ("ttft", "e2e", "itl", "tpot"):
        for statistic, value in known.get(name, {}).items():
            if duration and value / 1e3 > (duration + rounding(duration)) * (1 + MARGIN):
                yield broken(
                    run,
                    "longer_than_run",
                    f"{name} {statistic} {value:g} ms is longer than the run of {duration:g} s",
                    {name: value, "duration": duration},
                )


def itl_beside_tpot(run: ServingRun) -> Iterator[Finding]:
    """ITL is the time between chunks, TPOT that of a token: the same where a chunk is a token."""
    itl, tpot = stated(run, "itl", "mean"), stated(run, "tpot", "mean")
    if not itl or not tpot:
        return
    ratio, numbers = itl / tpot, {"itl": itl, "tpot": tpot}
    if 1 / BUNDLED <= ratio <= BUNDLED:
        return
    if not 1 / BUNDLE < ratio < BUNDLE:
        message = (
            f"mean itl {itl:g} ms is {ratio:.3g} x mean tpot {tpot:g} ms{hint(run, ratio)}; other units?"
        )
        yield Finding(rule="itl_beside_tpot", severity="suspect", message=message, numbers=numbers)
        return
    why = (
        f"about {ratio:.3g} tokens a chunk (stream interval, or speculation), so it is not a token's time"
        if ratio > 1
        else "several chunks a token, or few long requests weigh most in it"
    )
    message = f"mean itl {itl:g} ms is {ratio:.3g} x mean tpot {tpot:g} ms: {why}"
    yield Finding(rule="itl_beside_tpot", severity="note", message=message, numbers=numbers)


def ragged(run: ServingRun) -> Iterator[Finding]:
    """A statistic that one latency lacks and all others have."""
    known = {n: s for n, s in statistics(run).items() if n in (*PER_REQUEST, "itl")}
    for statistic in CORE:
        lacking = [name for name, has in known.items() if statistic not in has]
        if len(lacking) == 1 and len(known) >= 3:
            yield Finding(
                rule="incomplete",
                severity="note",
                message=f"{lacking[0]} has no {statistic}, though all other latencies have",
            )


RULES = (order, moments, extremes, identity, parts_of_e2e, itl_beside_tpot, ragged)
