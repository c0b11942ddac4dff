"""What `serving ab` prints: beforehand the commands, the pairs and the time; afterwards the effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.files import JsonObject
from harness.report.text import table
from harness.serving.ab.plan import Plan, client, launch
from harness.serving.ab.record import Record
from harness.serving.ab.result import LOOKS, QUANTITIES, confidence, looks, pairs_for, percents, spread
from harness.serving.ab.session import order, pair_seconds
from harness.serving.ledger.prediction import Prediction

NAMES = {"tpot": "TPOT, mean", "ttft": "TTFT, mean", "ttft_median": "TTFT, median", "throughput": "output"}
UNITS = {"tpot": "ms", "ttft": "ms", "ttft_median": "ms", "throughput": "tok/s"}
CHANGES = (1.0, 2.0, 5.0)  # per cent
MOST_LOOKED_AT = range(2, 200)


def planned(
    plan: Plan,
    record: Record | None,
    folder: Path,
    names: Sequence[JsonObject],
    predictions: Sequence[Prediction],
) -> str:
    """What would run, for how long, what it can tell, and what is expected of it."""
    lines = []
    for number, arm in enumerate(plan.arms):
        port, cache = plan.port + 10 * number, folder / "cache" / arm
        result = folder / "launches" / f"000-0-{arm}" / "result.json"
        warm = client(plan, arm, port, plan.seed, result.with_name("warm-up.json"), cache, warm_up=True)
        lines += [
            f"{arm}:",
            f"  server   {launch(plan, arm, f'ab-{folder.name}-{number}-{arm}', port, cache)}",
            f"  warm-up  {warm}",
            f"  client   {client(plan, arm, port, plan.seed, result, cache)}",
        ]
    at, pair_s = looks(plan.pairs), pair_seconds(plan, record)
    first = "; ".join(" ".join(order(list(plan.arms), pair)) for pair in (1, 2, 3))
    known = "as the launches so far took" if record and record.of("stopped") else "as the plan expects"
    lines += [
        "",
        f"order: a launch of each arm that is thrown away, then pairs: {first} ...",
        f"looked at after {', '.join(map(str, at))} pairs, and at no other time",
        f"time: {_time(pair_s)} a pair ({known}), {_time((at[-1] + 1) * pair_s)} for {at[-1]} pairs",
        "",
        _needed(plan, pair_s),
    ]
    told = [*map(_name, names)]
    for each in predictions:
        metric, ends = QUANTITIES.get(each.quantity, ""), percents(each)
        if metric and ends:
            told.append(f"expected: {each.of and each.of + ': '}{NAMES[metric]} changes by {_change(*ends)}")
    return "\n".join([*lines, *([""] if told else []), *told])


def _change(change: float | None, low: float | None, high: float | None) -> str:
    middle, *ends = ("open" if end is None else f"{end:+.2f}" for end in (change, low, high))
    return f"{middle} % ({' to '.join(ends)})"


def _needed(plan: Plan, pair_s: float) -> str:
    """Pairs that find an effect four times in five."""
    apart, arms = spread(plan.metric, plan.concurrency), len(plan.others)
    rows = []
    for change in CHANGES:
        fixed = pairs_for(change, apart, confidence(1, arms), MOST_LOOKED_AT)
        looked = None if plan.pairs else pairs_for(change, apart, confidence(None, arms), LOOKS)
        shown = looked or (fixed if plan.pairs else f"over {LOOKS[-1]}; --pairs {fixed}")
        rows.append([f"{change:g} %", shown, _time(((looked or fixed or 0) + 1) * pair_s)])
    unseen = "" if plan.concurrency else "; the client command names no concurrency"
    return (
        table(rows, [f"effect on {NAMES[plan.metric]}", "pairs needed", "time"])
        + f"\nwhere launches differ by {apart:g} %, as on 8 MI355X with DeepSeek-R1{unseen}"
    )


def _name(found: JsonObject) -> str:
    return f"{'note' if found['found'] is None else 'warning'}: {found['says']}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def shown(found: JsonObject) -> str:
    """The effects of each arm, and what else is to be known."""
    base, verdicts = next(iter(found["plan"]["arms"])), found["verdicts"]
    engine = " ".join(filter(None, (found["engine"].get("engine"), found["engine"].get("version"))))
    lines = [f"{found['pairs']} pairs against {base}{f', {engine}' if engine else ''}", ""]
    if verdicts:
        level = f"{100 * verdicts[0]['confidence']:.3g} % interval"
        headers = ["arm", "metric", base, "arm's", "change", level, "between launches", "verdict"]
        lines += [table([[line["a"], *row(line)] for line in verdicts], headers), ""]
    return "\n".join([*lines, *closing(found)])


def row(line: JsonObject) -> list[str]:
    """Of a verdict: the metric, both values, the change, its interval, launch to launch, the word; brackets
    where another metric decides."""
    unit, apart = UNITS[line["metric"]], line["launch_spread"]
    return [
        NAMES[line["metric"]],
        *(f"{line[side]:.4g} {unit}" for side in ("base", "arm")),
        f"{line['percent']:+.2f} %",
        "{:+.2f} to {:+.2f} %".format(*line["interval"]) if line["interval"] else "any",
        "" if apart is None else f"{apart:.2f} %",
        line["verdict"] if line["decides"] else f"({line['verdict']})",
    ]


def closing(found: JsonObject) -> Iterator[str]:
    """What stands below the table, a line each."""
    margin = found["plan"]["margin"]
    for line in filter(lambda each: each["decides"], found["verdicts"]):
        if line["verdict"] == "same":
            yield f"{line['a']}: same within {margin:g} %"
        elif line["verdict"] != "unclear":
            beyond = line["low"] > 1 + margin / 100 or line["high"] < 1 / (1 + margin / 100)
            how = "by more than" if beyond else "perhaps by less than"
            yield f"{line['a']}: {line['verdict']}, {how} the margin of {margin:g} %"
    for arm, more in found["more_pairs"].items():
        then = (
            "no number of pairs up to 200 would decide it"
            if found["pairs"] > 1
            else "one pair has no interval"
        )
        if more:
            then = f"{more[0]} more pairs would narrow it to +-{more[1]:.2g} % and decide it at this effect"
        yield f"{arm}: unclear: {then}"
    for line in found["expected"]:
        yield (
            f"{line['arm']}: {NAMES[line['metric']]} was expected to change by "
            f"{_change(line['change'], line['low'], line['high'])}, and did by {line['found']:+.2f} %: "
            f"the intervals {'meet' if line['meets'] else 'do not meet'}"
        )
    for arm, differing in found["differences"].items():
        for what, part in (("setting", "server_info"), ("variable", "environment")):
            for name, (before, after) in differing[part].items():
                yield f"{arm}: {what} {name}: {before!r} -> {after!r}"
    yield from map(_name, found["names"])
    yield from (f"note: {line}" for line in found["findings"])
    if not found["finished"]:
        yield f"not finished: --resume {found['folder']} goes on"
