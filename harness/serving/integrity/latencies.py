"""Rules for the statistics of a latency, and for latencies beside each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from harness.serving.clients.fields import real
from harness.serving.integrity.common import EXACT, MARGIN, WAITS, apart, found, hint, misfit, rounding
from harness.serving.schema import Finding, ServingRun, Severity

IDENTITY = 0.005  # of the mean E2E; dstack's 54 rows hold to 4e-10
TAIL = 0.05  # of the mean E2E, after the last token: guidellm's request ends with the response
# E2E over what follows from a length that was asked for: many requests stop early, none late.
LEAST_ASKED, MOST_ASKED = 1 / 20, 1.5
PER_REQUEST = ("ttft", "tpot", "e2e")
ONE_A_REQUEST = (*PER_REQUEST, "normalized_time_per_output_token", "input_len", "output_len")
MOST_APART = 100  # no distribution of latencies has this factor between its mean and its median
BUNDLED = 1.5  # ITL / TPOT from which on a chunk holds several tokens
BUNDLE = 64  # most tokens of a chunk
HEAVY = 20  # per cent of the time of all requests, from which on one of them makes the mean
FAR = 5  # times the mean of the others, from which on such a request is far from them
LOOSER = 1 + MARGIN  # a factor for limits of numbers that are measured
FEW_REQUESTS = 10  # of fewer the deviation may be computed with n or with n - 1
FEW = 3  # the least number of requests among which one may stand out
SKEWED = 3  # mean / median, from which on a few requests make the mean
NEAR = 0.15  # relative: how near a deviation or p99 must be to that which a single long request makes
SPELLINGS = {"avg": "mean", "average": "mean", "minimum": "min", "maximum": "max"}


def statistics(run: ServingRun) -> dict[str, dict[str, float]]:
    """The statistics of each latency in ms, as the client reported them."""
    values: dict[str, dict[str, float]] = {}
    for metric in run.metrics:
        if metric.unit == "ms" and metric.scope in ("request", "unknown", "instance") and not metric.derived:
            values.setdefault(metric.name, {}).setdefault(metric.statistic, metric.value)
    return values


def quantile(statistic: str) -> float | None:
    """0.99 for `p99`, 0.5 for `median`, 0 and 1 for `min` and `max`; None for anything else."""
    named = {"min": 0.0, "median": 0.5, "max": 1.0}
    if statistic in named:
        return named[statistic]
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", statistic)
    return float(match[1]) / 100 if match and float(match[1]) <= 100 else None


def distributions(run: ServingRun) -> dict[str, dict[str, float]]:
    """The statistics of each metric that has several, in its unit, as the client reported them. They are by
    name, with the kind of tokens in front: `e2e`, `output throughput`."""
    values: dict[tuple[str, str], dict[str, float]] = {}  # by name and scope
    for metric in run.metrics:
        if not metric.derived and metric.statistic != "total":
            name = metric.name if metric.tokens == "none" else f"{metric.tokens} {metric.name}"
            values.setdefault((name, metric.scope), {}).setdefault(metric.statistic, metric.value)
    return {name: known for (name, _), known in values.items() if len(known) > 1}


def order(run: ServingRun) -> Iterator[Finding]:
    """Quantiles rise, the mean lies between min and max, and p50 is the median, in all that was kept."""
    for name, known in [*distributions(run).items(), *_kept(run.extra, "")]:
        quantiles = {statistic: at for statistic in known if (at := quantile(statistic)) is not None}
        ranked = sorted(quantiles, key=lambda statistic: (quantiles[statistic], statistic))
        around_mean = [pair for pair in (("min", "mean"), ("mean", "max")) if known.keys() >= {*pair}]
        for low, high in [*pairwise(ranked), *around_mean]:
            are_same = quantiles.get(low) == quantiles.get(high)  # p50 and median
            is_above = known[low] > known[high] * (1 + 1e-9) + rounding(known[high])
            if is_above or (are_same and apart(known[high], known[low]) > EXACT):
                values = {"low": low, "a": known[low], "high": high, "b": known[high]}
                how = "not_same" if are_same else "wrong_way"
                yield found("percentile_order", "wrong", how, name=name, **values)


def _kept(extra: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Statistics of numbers that have no place in a run, by where they are: objects with two quantiles."""
    numbers = {SPELLINGS.get(key, key): real(value) for key, value in extra.items()}
    known = {key: number for key, number in numbers.items() if number is not None}
    if len([key for key in known if quantile(key) is not None]) > 1:
        yield path, known
    for key, value in extra.items():
        if isinstance(value, Mapping):
            yield from _kept(value, f"{path} {key}".strip())


def quantile_limits(mean: float, std: float, at: float) -> tuple[float, float]:
    """The limits of a quantile of any distribution with that mean and deviation (Cantelli's inequality)."""
    return mean - std * math.sqrt((1 - at) / at), mean + std * math.sqrt(at / (1 - at))


def moments(run: ServingRun) -> Iterator[Finding]:
    """Mean, deviation and quantiles must be those of one sample of values of at least 0."""
    latencies = statistics(run)
    for name, known in distributions(run).items():
        mean, median, p99 = known.get("mean"), known.get("median"), known.get("p99")
        std = known.get("std", 0.0)
        if mean is None:
            continue
        # Tokens of one chunk have no time between them, so that a median of 0 says nothing if p25 is 0, too.
        in_bursts = name in WAITS or (name == "itl" and known.get("p25", mean) * MOST_APART < mean)
        is_examined = name in latencies and not in_bursts and mean > 0
        if is_examined and median is not None and not mean / MOST_APART < median < mean * MOST_APART:
            text = "bursts" if name == "itl" and median < mean else "far_apart"
            values = {"median": median, "mean": mean, "hint": hint(run, median / mean)}
            yield found("moments", "suspect", text, name=name, **values)
        if name in PER_REQUEST and p99 is not None and mean > p99 + rounding(mean, p99):
            yield found("moments", "suspect", "above_p99", name=name, mean=mean, p99=p99)
        yield from _outside(run, name, known, mean)
        for severity, widest, beside in _widest(run, name, known, mean):
            # The limit of `wrong` is that with n - 1 already.
            may_grow = severity == "suspect" and 0 < (run.totals.completed or 0) < FEW_REQUESTS
            least_std = std / 2 if may_grow else std
            if least_std > widest * LOOSER + 4 * rounding(*known.values()):
                yield found("moments", severity, "too_wide", name=name, std=std, beside=beside)


def _outside(run: ServingRun, name: str, known: Mapping[str, float], mean: float) -> Iterator[Finding]:
    """Quantiles that no distribution of that mean (Markov), or of that mean and deviation (Cantelli), has.
    The largest of n values is such a quantile at 1 - 1/n (Samuelson), the smallest at 1/n."""
    std, count = known.get("std"), run.totals.completed or 0
    error = 2 * rounding(*known.values())
    slack = error + mean * 1e-6
    if std and count < FEW_REQUESTS:
        slack += std / 2
    for statistic, value in known.items():
        at = quantile(statistic)
        if at in (0.0, 1.0) and count > 1 and name.split()[-1] in ONE_A_REQUEST:
            at = 1 / count if at == 0 else 1 - 1 / count
        if at is None or not 0 < at < 1:
            continue
        if std is None:
            low, high = -math.inf, (mean + error) * LOOSER / (1 - at)
        else:
            low, high = quantile_limits(mean, std * LOOSER + error, at)
        if not low - slack <= value <= high + slack:
            spread = "" if std is None else f", std {std:g}"
            values = {"statistic": statistic, "value": value, "mean": mean, "low": max(low, 0), "high": high}
            likely = hint(run, value / mean if mean else 0)
            yield found("moments", "wrong", "outside", name=name, spread=spread, hint=likely, **values)
            return  # a wrong mean or deviation makes all of them impossible


def _widest(
    run: ServingRun, name: str, known: Mapping[str, float], mean: float
) -> Iterator[tuple[Severity, float, str]]:
    """The largest deviations that other numbers allow, and which numbers those are."""
    count, p99 = run.totals.completed, known.get("p99")
    least, most = known.get("min", 0.0), known.get("max")
    if most is not None and least <= mean <= most:  # Bhatia and Davis
        ends = math.sqrt((most - mean) * (mean - least) * (1 + 1 / max((count or 2) - 1, 1)))
        yield "wrong", ends, f"with mean {mean:g} between {least:g} and {most:g}"
    if count and name in PER_REQUEST:
        yield "suspect", mean * math.sqrt(count), f"with mean {mean:g} ms of {count} requests"
    if p99 is not None and name in PER_REQUEST and not _largest(run, name):
        # As with Bhatia and Davis for times from 0 to p99, of which one in a hundred may be four times p99.
        widest = math.sqrt(max(p99 - mean, 0.0) * mean + 0.01 * (4 * p99 - mean) ** 2)
        yield "suspect", widest, f"beside a p99 of {p99:g} ms"
    longest = run.value("e2e", "p99") or 1e3 * (run.totals.duration_s or 0.0)
    if name == "itl" and longest:
        # A mean square is at most the mean times the largest. It is doubled, because p99 is not the largest.
        widest = math.sqrt(2 * mean * longest)
        yield "suspect", widest, f"with mean {mean:g} ms, in requests of at most {longest:g} ms"


def one_request(run: ServingRun) -> Iterator[Finding]:
    """Finds a mean that one or a few requests make: they wait for compilations, or one hangs."""
    count = run.totals.completed
    for name in PER_REQUEST:
        largest = _largest(run, name)
        mean, median = run.reported_ms(name), run.reported_ms(name, "median")
        if not mean or not count or count < FEW:
            continue
        without = (mean * count - largest) / (count - 1) if largest else mean  # the mean of the others
        share = 100 * (largest or 0.0) / count / mean
        if largest and share >= HEAVY and largest >= FAR * without:
            values = {"count": count, "largest": largest, "share": share, "mean": mean, "without": without}
            yield found("one_request", "suspect", "heavy", name=name, **values)
        elif median and mean >= SKEWED * median:
            values = {"mean": mean, "median": median, "ratio": mean / median}
            yield found("few_requests", "suspect", "skewed", name=name, **values)


def _largest(run: ServingRun, name: str) -> float | None:
    """The longest time of a request: listed, or stated, or as mean and median tell it if the deviation or p99
    is also that of one long request beside others that all take the median. None if nothing tells it."""
    known, count = statistics(run).get(name, {}), run.totals.completed or 0
    listed = {"ttft": run.samples.ttfts_ms, "e2e": run.samples.e2es_ms}.get(name, ())
    mean, median, std, p99 = known.get("mean"), known.get("median"), known.get("std"), known.get("p99")
    if count < FEW or len(listed) == count:
        return max(listed, default=None)
    if "max" in known or mean is None or median is None or mean < 1.5 * median:
        return known.get("max")
    alone = median + count * (mean - median)  # the time of that request
    if std is not None:
        return alone if std >= (1 - NEAR) * (mean - median) * math.sqrt(count - 1) else None
    place = (count - 1) * 0.99 - (count - 2)  # of numpy's p99 between the two longest, from 0 to 1
    expected_p99 = median + place * (alone - median)
    is_near = p99 is not None and place > 0 and math.isclose(p99, expected_p99, rel_tol=NEAR)
    return alone if is_near else None


def identity(run: ServingRun) -> Iterator[Finding]:
    """mean E2E = mean TTFT + (n - 1) mean TPOT, with n output tokens a request. It is exact if all requests
    have the same n, and E2E ends with the last token. With other n it lacks the covariance of n and TPOT,
    which is at most the product of their deviations (Cauchy-Schwarz)."""
    e2e, ttft, tpot = run.reported_ms("e2e"), run.reported_ms("ttft"), run.reported_ms("tpot")
    length = run.mean_output_length
    if e2e is None or ttft is None or tpot is None or length is None or length < 1:
        return
    follows = ttft + (length - 1) * tpot
    are_equal = run.has_equal_lengths
    allowed = IDENTITY * max(e2e, follows) + rounding(e2e, ttft, tpot) * (length + 1)
    if not are_equal:
        allowed += _deviation_of_length(run, length) * (run.reported_ms("tpot", "std") or tpot)
    is_counted = run.totals.output_tokens and run.totals.completed
    if not is_counted and follows and LEAST_ASKED <= e2e / follows <= MOST_ASKED:
        return
    if abs(e2e - follows) > allowed:
        times = {"e2e": e2e, "ttft": ttft, "tpot": tpot, "length": length}
        severity: Severity = "wrong" if are_equal else "suspect"
        tail = ""
        if are_equal and 0 < e2e - follows < TAIL * e2e:
            severity, tail = "note", ", the rest after the last token"
        values = {"follows": follows, "unit": _unit_at_fault(**times), "tail": tail}
        yield misfit(run, "e2e_identity", severity, "apart", **values, **times)


def _deviation_of_length(run: ServingRun, mean: float) -> float:
    """The deviation of the output lengths, in tokens: of their list, as stated, or as much as it may be."""
    lengths, load = run.samples.output_lens, run.workload
    if lengths:
        return math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths))
    if stated_std := run.value("output_len", "std"):
        return stated_std
    if load.range_ratio is not None and load.range_ratio <= 1 and load.output_len:
        shortest = 2 * load.output_len * load.range_ratio / (1 + load.range_ratio)
        if mean > load.output_len * (1 - MARGIN):  # so that requests did not stop early
            return load.output_len - shortest
    return mean  # of an exponential distribution


def _unit_at_fault(e2e: float, ttft: float, tpot: float, length: float) -> str:
    """Which of the times satisfies the identity in another unit; empty if none does."""
    for factor in (1e3, 1e-3):
        for name in ("e2e", "ttft", "tpot"):
            times = {"e2e": e2e, "ttft": ttft, "tpot": tpot}
            times[name] *= factor
            if abs(times["e2e"] / (times["ttft"] + (length - 1) * times["tpot"]) - 1) < IDENTITY:
                return f" ({name} is off by a thousand: s for ms?)"
    return ""


def parts_of_e2e(run: ServingRun) -> Iterator[Finding]:
    """A request takes no less than its first token, no less than all others, and no longer than the run."""
    known, duration, length = statistics(run), run.totals.duration_s, run.mean_output_length
    steps = (length - 1) if length and run.has_equal_lengths else 0.0
    for name, count in (("ttft", 1.0), ("tpot", steps), ("itl", 1.0)):  # at least so many in a request
        for statistic, value in known.get(name, {}).items():
            e2e = known.get("e2e", {}).get(statistic)
            if e2e is None or statistic == "std" or (name == "itl" and statistic != "max"):
                continue
            if value * count > e2e * (1 + EXACT) + rounding(e2e, value) * count:
                values = {"value": value, "times": f" x {count:g}" if name == "tpot" else "", "e2e": e2e}
                yield found("parts_of_e2e", "wrong", "longer", name=name, statistic=statistic, **values)
    for name in (*PER_REQUEST, "itl", "client_queue_time"):
        for statistic, value in known.get(name, {}).items():
            if duration and value / 1e3 > (duration + rounding(duration)) * LOOSER:
                values = {"statistic": statistic, "value": value, "duration": duration}
                yield misfit(run, "longer_than_run", "wrong", "longer", name=name, **values)


def itl_beside_tpot(run: ServingRun) -> Iterator[Finding]:
    """ITL is the time between chunks, TPOT that of a token. They are equal if a chunk is a token."""
    itl, tpot = run.reported_ms("itl"), run.reported_ms("tpot")
    accepted = run.value("accept_length")
    if not itl or not tpot:
        return
    ratio = itl / tpot
    severity: Severity = "note"
    if not 1 / BUNDLE < ratio < BUNDLE:
        text, severity = "units", "suspect"
    elif ratio > BUNDLED:
        text = "bundled"
    elif ratio < 1 / BUNDLED and run.has_equal_lengths:
        text, severity = "more_pieces", "suspect"
    elif ratio < 1 / BUNDLED:
        text = "weighted"
    elif accepted and accepted > BUNDLED:
        text = "divided"
    else:
        return
    values = {"itl": itl, "tpot": tpot, "ratio": ratio, "accepted": accepted, "hint": hint(run, ratio)}
    yield found("itl_beside_tpot", severity, text, **values)


RULES = (order, moments, one_request, identity, parts_of_e2e, itl_beside_tpot)
