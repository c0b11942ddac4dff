"""Statistics of one latency among themselves, and of latencies beside each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from harness.serving.clients.fields import real
from harness.serving.integrity.common import (
    EXACT,
    MARGIN,
    WAITS,
    apart,
    broken,
    equal_lengths,
    found,
    hint,
    output_length,
    rounding,
    stated,
)
from harness.serving.schema import Finding, ServingRun, Severity

IDENTITY = 0.005  # of the mean E2E; dstack's 54 rows hold to 4e-10
TAIL = 0.05  # of the mean E2E, after the last token: guidellm's request ends with the response
ASKED = (1 / 20, 1.5)  # E2E over what follows from a length that was asked for: most stop early, none late
CORE = ("mean", "median", "std", "p99")
PER_REQUEST = ("ttft", "tpot", "e2e")
ONE_A_REQUEST = (*PER_REQUEST, "normalized_time_per_output_token", "input_len", "output_len")
UNIT = 100  # a factor that no distribution of latencies has between its mean and its median
BUNDLED = 1.5  # ITL / TPOT from which on chunks hold several tokens
BUNDLE = 64  # tokens a chunk, at most
HEAVY = 20  # % of all requests' time in one of them
FAR = 5  # times the mean of the others
LOOSER = 1 + MARGIN
FEW = 3  # requests
SKEWED = 3  # times the median
NEARLY = 0.85  # of the deviation that a single long request makes


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
    """Quantiles rise; the mean lies between min and max; p50 is the median: of all that was kept."""
    for name, known in [*distributions(run).items(), *_kept(run.extra, "")]:
        ranked = sorted((q, s) for s in known if (q := quantile(s)) is not None)
        pairs = [(low, high) for (_, low), (_, high) in pairwise(ranked)]
        pairs += [p for p in (("min", "mean"), ("mean", "max")) if known.keys() >= set(p)]
        for low, high in pairs:
            same = quantile(low) == quantile(high) and "mean" not in (low, high)
            above = known[low] > known[high] * (1 + 1e-9) + rounding(known[high])
            if above or (same and apart(known[high], known[low]) > EXACT):
                how = "not the same" if same else "the wrong way round"
                message = f"{name}: {low} {known[low]:g} and {high} {known[high]:g} are {how}"
                yield found("percentile_order", "wrong", message, **{low: known[low], high: known[high]})


STATISTICS = {"avg": "mean", "average": "mean", "minimum": "min", "maximum": "max"}


def _kept(extra: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Statistics of what has no place in a run, by where they stand."""
    numbers = {STATISTICS.get(key, key): real(value) for key, value in extra.items()}
    known = {key: number for key, number in numbers.items() if number is not None}
    if sum(1 for key in known if quantile(key) is not None) > 1:
        yield path, known
    for key, value in extra.items():
        if isinstance(value, Mapping):
            yield from _kept(value, f"{path} {key}".strip())


def quantile_limits(mean: float, std: float, at: float) -> tuple[float, float]:
    """Between what a quantile of any distribution of that mean and deviation lies (Cantelli's inequality)."""
    return mean - std * math.sqrt((1 - at) / at), mean + std * math.sqrt(at / (1 - at))


def moments(run: ServingRun) -> Iterator[Finding]:
    """Mean, deviation and quantiles of one sample."""
    count, every = run.totals.completed, statistics(run)
    longest = every.get("e2e", {}).get("p99") or 1e3 * (run.totals.duration_s or 0.0)
    for name, known in every.items():
        mean, std, median, p99 = (known.get(key) for key in ("mean", "std", "median", "p99"))
        if mean is None:
            continue
        # Tokens of one piece of a stream have no time between them, and with the median the lower quartile.
        pieces = name in WAITS or (name == "itl" and known.get("p25", mean) * UNIT < mean)
        if median is not None and mean and not pieces and not mean / UNIT < median < mean * UNIT:
            bursts = name == "itl" and median < mean
            why = ": tokens come in bursts (a proxy, or several in one piece)"
            why = why if bursts else f"{hint(run, median / mean)}; other units?"
            message = f"{name}: median {median:g} ms and mean {mean:g} ms are far apart{why}"
            yield found("moments", "suspect", message, median=median, mean=mean)
        if name in PER_REQUEST and p99 is not None and mean > p99 + rounding(mean, p99):
            message = (
                f"{name}: mean {mean:g} ms is above the p99 of {p99:g}: one request in a hundred cannot "
            )
            yield found("moments", "suspect", f"{message}weigh so much", mean=mean, p99=p99)
        slack = rounding(*known.values()) * 2 + mean * 1e-6
        if std is None:
            limits = {at: (-math.inf, mean * LOOSER / (1 - at)) for at in _inner(known)}  # Markov
        else:
            limits = {at: quantile_limits(mean, std * (1 + MARGIN), at) for at in _inner(known)}
            slack += std * 0.5 if (count or 0) < 10 else 0.0
        for at, (low, high) in limits.items():
            for statistic in (key for key in known if quantile(key) == at):
                value = known[statistic]
                if not low - slack <= value <= high + slack:
                    spread = "" if std is None else f", std {std:g}"
                    message = (
                        f"{name}: {statistic} {value:g} ms is impossible with mean {mean:g}{spread}: it lies "
                        f"in {max(low, 0):.4g}..{high:.4g}{hint(run, value / mean if mean else 0)}"
                    )
                    yield found("moments", "wrong", message, value=value, mean=mean)
        if std is not None and count and name in PER_REQUEST and std > mean * math.sqrt(count) * (1 + MARGIN):
            yield _too_wide(name, std, f"with mean {mean:g} ms of {count} requests", mean)
        # Bhatia and Davis, of times from 0 to p99, one in a hundred of which are up to four times as long.
        if std is not None and p99 is not None and name in PER_REQUEST and not _largest(run, name):
            widest = math.sqrt(max(p99 - mean, 0.0) * mean + 0.01 * (4 * p99 - mean) ** 2)
            if std > widest + slack:
                yield _too_wide(name, std, f"beside a p99 of {p99:g} ms", mean)
        if std is not None and name == "itl" and longest and std > math.sqrt(2 * mean * longest):
            yield _too_wide(name, std, f"with mean {mean:g} ms, in requests of at most {longest:g} ms", mean)


def _inner(known: Mapping[str, float]) -> set[float]:
    """The quantiles between the ends."""
    return {at for key in known if (at := quantile(key)) is not None and 0 < at < 1}


def one_request(run: ServingRun) -> Iterator[Finding]:
    """A mean that one request makes, or few: the first, which wait for compilations, or one that hangs."""
    count = run.totals.completed
    for name in PER_REQUEST:
        largest, mean, median = _largest(run, name), stated(run, name, "mean"), stated(run, name, "median")
        if not mean or not count or count < FEW:
            continue
        rest = (mean * count - largest) / (count - 1) if largest else mean
        share = 100 * (largest or 0.0) / count / mean
        if largest and share >= HEAVY and largest >= FAR * rest:
            message = (
                f"{name}: one of {count} requests took {largest:.4g} ms, {share:.3g} % of all "
                f"together (a compilation, or it hung): without it the mean {mean:.4g} is {rest:.4g} ms; the "
                "duration and all rates count it too"
            )
            yield found("one_request", "suspect", message, largest=largest, mean=mean, without=rest)
        elif median and mean >= SKEWED * median:
            message = (
                f"{name}: mean {mean:.4g} ms is {mean / median:.3g} x the median of {median:.4g}: few long "
            )
            message += "requests make it (a first wave that compiles, or a queue)"
            yield found("few_requests", "suspect", message, mean=mean, median=median)


def _largest(run: ServingRun, name: str) -> float | None:
    """The longest time of a request: of the list of them, as stated, or as mean, median and deviation (or
    p99) have it where they are those of one long request among like ones. None where nothing tells it."""
    samples, known, count = run.samples, statistics(run).get(name, {}), run.totals.completed or 0
    listed = {"ttft": samples.ttfts_ms, "e2e": samples.e2es_ms}.get(name, ())
    mean, median, std, p99 = (known.get(key) for key in ("mean", "median", "std", "p99"))
    if count < FEW or len(listed) == count:
        return max(listed, default=None)
    if "max" in known or mean is None or median is None or mean < 1.5 * median:
        return known.get("max")
    alone = median + count * (mean - median)
    if std is not None:
        return alone if std >= NEARLY * (mean - median) * math.sqrt(count - 1) else None
    last = (count - 1) * 0.99 - (count - 2)  # where numpy's p99 lies between the two longest
    interpolated = median + last * (alone - median)
    same = p99 is not None and last > 0 and math.isclose(p99, interpolated, rel_tol=1 - NEARLY)
    return alone if same else None


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
        if std == 0 and least is not None and most is not None and most - least > slack:
            yield _not_with(name, "std", std, f"a min of {least:g} and a max of {most:g}", mean or 0.0)
        if not mean or name.split()[-1] not in ONE_A_REQUEST:
            continue
        if count and most and most > count * mean * (1 + MARGIN) + count * slack:
            yield _not_with(name, "max", most, f"a mean of {mean:g} over {count}", mean)
        elif (
            count
            and most
            and std is not None
            and most - mean > std * math.sqrt(count) * LOOSER + slack * count
        ):
            yield _not_with(name, "max", most, f"mean {mean:g} and std {std:g} of {count}", mean)
        if std and least is not None and most is not None and least <= mean <= most:
            ends = math.sqrt((most - mean) * (mean - least) * (1 + 1 / max((count or 2) - 1, 1)))
            if std > ends * (1 + MARGIN) + slack * 2:
                yield _not_with(name, "std", std, f"mean {mean:g} between {least:g} and {most:g}", mean)


def _not_with(name: str, statistic: str, value: float, beside: str, mean: float) -> Finding:
    message = f"{name}: {statistic} {value:g} is impossible with {beside}"
    return found("moments", "wrong", message, value=value, mean=mean)


def _too_wide(name: str, std: float, beside: str, mean: float) -> Finding:
    message = f"{name}: std {std:g} ms is hardly possible {beside}; other units?"
    return found("moments", "suspect", message, std=std, mean=mean)


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
        tail = equal and 0 < e2e - follows < TAIL * e2e
        message = (
            f"mean e2e is {e2e:g} ms, but mean ttft {ttft:g} + ({length:g} - 1) x mean tpot {tpot:g} is "
            f"{follows:g} ms{_unit_at_fault(e2e, ttft, tpot, length)}"
        )
        message += ", the rest after the last token" if tail else ""
        severity: Severity = "note" if tail else "wrong" if equal else "suspect"
        yield broken(run, "e2e_identity", severity, message, e2e=e2e, ttft=ttft, tpot=tpot, follows=follows)


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
        for name in ("e2e", "ttft", "tpot"):
            times = {"e2e": e2e, "ttft": ttft, "tpot": tpot}
            times[name] *= factor
            if abs(times["e2e"] / (times["ttft"] + (length - 1) * times["tpot"]) - 1) < IDENTITY:
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
            if statistic == "std" or ends is None:
                continue
            if value * times > ends * (1 + EXACT) + rounding(ends, value) * times:
                what = f"{name} {statistic} {value:g} ms" + (f" x {times:g}" if name == "tpot" else "")
                message = f"{what} is longer than e2e {statistic} {ends:g} ms"
                yield found("parts_of_e2e", "wrong", message, value=value, e2e=ends)
    itl, longest = known.get("itl", {}).get("max"), e2e.get("max")
    if itl and longest and itl > longest * (1 + EXACT) + rounding(itl, longest):
        message = f"itl max {itl:g} ms is longer than e2e max {longest:g} ms"
        yield found("parts_of_e2e", "wrong", message, itl=itl, e2e=longest)
    duration = run.totals.duration_s
    for name in (*PER_REQUEST, "itl", "client_queue_time"):
        for statistic, value in known.get(name, {}).items():
            if duration and value / 1e3 > (duration + rounding(duration)) * (1 + MARGIN):
                message = f"{name} {statistic} {value:g} ms is longer than the run of {duration:g} s"
                yield broken(run, "longer_than_run", "wrong", message, value=value, duration=duration)


def itl_beside_tpot(run: ServingRun) -> Iterator[Finding]:
    """ITL is the time between chunks, TPOT that of a token: the same where a chunk is a token."""
    itl, tpot, accepted = stated(run, "itl", "mean"), stated(run, "tpot", "mean"), run.value("accept_length")
    if not itl or not tpot:
        return
    ratio = itl / tpot
    message = f"mean itl {itl:g} ms is {ratio:.3g} x mean tpot {tpot:g} ms"
    severity: Severity = "note"
    if not 1 / BUNDLE < ratio < BUNDLE:
        message, severity = f"{message}{hint(run, ratio)}; other units?", "suspect"
    elif ratio > BUNDLED:
        message += (
            f": about {ratio:.3g} tokens a chunk (stream interval, or speculation), so it is not a token's "
        )
        message += "time"
    elif ratio < 1 / BUNDLED and equal_lengths(run):
        severity = "suspect"
        message += ": more pieces than tokens, though all outputs are equally long; one of the counts is off"
    elif ratio < 1 / BUNDLED:
        message += ": several chunks a token, or few long requests weigh most in it"
    elif accepted and accepted > BUNDLED:
        message += f", though a step gives {accepted:.3g} tokens: the client divides a step's time by them"
    else:
        return
    yield found("itl_beside_tpot", severity, message, itl=itl, tpot=tpot)


def ragged(run: ServingRun) -> Iterator[Finding]:
    """A statistic that one latency lacks and all others have."""
    known = {n: s for n, s in statistics(run).items() if n in (*PER_REQUEST, "itl")}
    for statistic in CORE:
        lacking = [name for name, has in known.items() if statistic not in has]
        if len(lacking) == 1 and len(known) >= 3:
            message = f"{lacking[0]} has no {statistic}, though all other latencies have"
            yield found("incomplete", "note", message)


RULES = (order, moments, extremes, one_request, identity, parts_of_e2e, itl_beside_tpot, ragged)
