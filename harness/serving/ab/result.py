"""The result of an A/B by its record: plain values for --json, and the lines that are printed of them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from harness.files import JsonObject
from harness.report.text import ranged
from harness.serving.ab.effect import MOST_PAIRS, Effect, confidence, effect, looks, more_pairs
from harness.serving.ab.plan import METRICS, PLACEHOLDER
from harness.serving.ab.record import Record
from harness.serving.ledger import Prediction

NAMES = {"tpot": "TPOT, mean", "ttft": "TTFT, mean", "ttft_median": "TTFT, median", "throughput": "output"}
UNITS = {"tpot": "ms", "ttft": "ms", "ttft_median": "ms", "throughput": "tok/s"}


def effects(record: Record, arm: str) -> dict[str, Effect]:
    """The effect on each metric that both arms have in at least one pair."""
    plan = record.plan
    level = confidence(plan.pairs, len(plan.others))
    by_metric = {}
    for metric in METRICS:
        if pairs := record.values(metric, (plan.base, arm)):
            before, after = zip(*pairs, strict=True)
            higher = metric == "throughput"
            by_metric[metric] = effect(before, after, higher=higher, level=level, margin=plan.margin)
    return by_metric


def summary(record: Record) -> JsonObject:
    """All results as plain values, for --json and the tables."""
    plan = record.plan
    verdicts: list[JsonObject] = []
    expected: list[JsonObject] = []
    more: dict[str, tuple[int, float] | None] = {}
    for arm in plan.others:
        by_metric = effects(record, arm)
        for metric, found in by_metric.items():
            decides = metric == plan.metric
            line = {"a": arm, "b": plan.base, "metric": metric, "decides": decides, "floor": 0.0}
            line |= asdict(found)
            if found.interval is None:  # JSON has no infinity
                line |= {"low": None, "high": None}
            verdicts.append(line)
            if decides and found.verdict == "unclear":
                more[arm] = more_pairs(found, plan.margin)
        expected += _expected(record, arm, by_metric)
    ready = record.of("ready")
    return {
        "folder": str(record.folder),
        "created": record.about["created"],
        "plan": plan.model_dump(),
        "engine": ready[-1] if ready else {},
        "pairs": _pairs_made(record),
        "finished": ending(record),
        "verdicts": verdicts,
        "more_pairs": more,
        "expected": expected,
        "differences": {arm: differences(record, arm) for arm in plan.others},
        "names": record.names,
        "findings": list(_findings(record)),
        "seconds": sum(event["seconds"] for event in record.of("stopped")),
    }


def _pairs_made(record: Record) -> int:
    """The number of pairs that count. Pair 0 is thrown away: its launches fill caches."""
    return len(record.pairs().keys() - {0})


def ending(record: Record) -> str:
    """`all pairs made`, `decided` or `given up`; empty if time was over, or it was killed."""
    pairs = _pairs_made(record)
    if any(event["pair"] not in record.pairs() for event in record.of("given up")):
        return "given up"
    if pairs >= looks(record.plan.pairs)[-1]:
        return "all pairs made"
    if any("unclear" not in event["verdicts"] for event in record.of("look", pairs=pairs)):
        return "decided"
    return ""


def _expected(record: Record, arm: str, found: dict[str, Effect]) -> Iterator[JsonObject]:
    """Each prediction for the arm beside the effect, in per cent of the metric before."""
    for prediction, metric, (change, low, high) in in_percent(record.predictions):
        if metric in found and prediction.of in ("", arm):
            found_low, found_high = found[metric].interval or (-math.inf, math.inf)
            meets = (low is None or low <= found_high) and (high is None or found_low <= high)
            line: JsonObject = {"arm": arm, "metric": metric, "method": prediction.method}
            line |= {"change": change, "low": low, "high": high}
            yield line | {"found": found[metric].percent, "meets": meets}


def in_percent(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, str, list[float | None]]]:
    """Each prediction of an A/B's metric: the metric, change, low and high in per cent; None: an open end."""
    for prediction in predictions:
        metric = prediction.quantity.removeprefix("output_")  # the clients' names
        if metric in METRICS and prediction.before and prediction.change is not None:
            ends = (prediction.change, prediction.low, prediction.high)
            yield prediction, metric, [None if end is None else 100 * end / prediction.before for end in ends]


def differences(record: Record, arm: str) -> JsonObject:
    """The settings and variables, as the servers report them, in which an arm differs from the base: the
    values of both, [base, arm], by name. A variable is left out if the launches of one arm do not agree on
    it, and if its value has a placeholder: that is filled in anew for each launch."""
    before = servers(record, record.plan.base)
    after = servers(record, arm)
    differing: JsonObject = {"server_info": {}, "environment": {}}
    for part, values in differing.items():
        for name in dict.fromkeys(key for server in before + after for key in server[part]):
            bases = [server[part].get(name) for server in before] or [None]
            arms = [server[part].get(name) for server in after] or [None]
            agree = all(value == bases[0] for value in bases) and all(value == arms[0] for value in arms)
            is_filled_in = PLACEHOLDER.search(record.plan.variables(arm).get(name, ""))
            if agree and not is_filled_in and bases[0] != arms[0]:
                values[name] = [bases[0], arms[0]]
    return differing


def servers(record: Record, arm: str) -> list[JsonObject]:
    """What the servers of an arm's launches report of themselves."""
    reports = []
    for ready in record.of("ready", arm=arm):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads((record.launch_folder(ready) / "server.json").read_text("utf-8")))
    return reports


def _findings(record: Record) -> Iterator[str]:
    """What a reader of the verdicts has to know, a line each."""
    plan, base = record.plan, record.plan.base
    for arm in plan.others:
        if plan.changes(arm) == plan.changes(base):
            yield f"{arm} and {base} are launched alike: an A/A, which shows this machine's noise"
        elif all(server["server_info"] for server in servers(record, arm)):
            differing = differences(record, arm)
            if not differing["server_info"]:
                names = ", ".join(differing["environment"]) or "no variable"
                yield f"the servers of {arm} and {base} report the same settings; they differ in {names}"
    counted = [run for number, pair in record.pairs().items() if number > 0 for run in pair.values()]
    tokens = dict.fromkeys(plan.arms, 0)
    for run in counted:
        tokens[run["arm"]] += run["output_tokens"] or 0
    if len(set(tokens.values())) > 1:
        by_arm = ", ".join(f"{arm} {count}" for arm, count in tokens.items())
        yield f"the arms made different numbers of tokens, which is other work: {by_arm}"
    for rule in sorted({rule for run in counted for rule in run["suspect"]}):
        reasons = [run["suspect"][rule] for run in counted if rule in run["suspect"]]
        yield f"{len(reasons)} of {len(counted)} runs are suspect ({rule}): {reasons[0]}"
    for failed in record.of("failed"):
        yield f"pair {failed['pair']} was made again: {failed['reason']}"
    if any(ready["owned"] is None for ready in record.of("ready")):
        yield "it cannot be told whether the server that answered is the one that was launched"
    if len({(ready["arm"], ready["version"]) for ready in record.of("ready")}) > len(plan.arms):
        yield "the engine's version changed between launches of one arm"
    if len({begun["boot"] for begun in record.of("begun")}) > 1:
        yield "the machine was started anew between pairs"


def warning(name: JsonObject) -> str:
    """A line on a variable's name that the engine may not read (see harness.serving.ab.names); a note where
    that cannot be told."""
    kind = "note" if name["found"] is None else "warning"
    return f"{kind}: {name['says']}"


def row(line: JsonObject, base: str) -> dict[str, str]:
    """The cells of a verdict, by column. The verdict is in brackets if another metric decides."""
    unit, spread = UNITS[line["metric"]], line["launch_spread"]
    cells = {"arm": line["a"], "metric": NAMES[line["metric"]]}
    cells["verdict"] = line["verdict"] if line["decides"] else f"({line['verdict']})"
    cells["change"] = f"{line['percent']:+.2f} %"
    cells[f"{100 * line['confidence']:.3g} % interval"] = interval_text(line)
    cells |= {base: f"{line['base']:.4g} {unit}", "arm's": f"{line['arm']:.4g} {unit}"}
    cells["between launches"] = "" if spread is None else f"{spread:.2f} %"
    return cells


def interval_text(verdict: JsonObject) -> str:
    """The ends of the change's interval, `-1.20 to +0.40 %`; `any` where one pair gives none."""
    return "{:+.2f} to {:+.2f} %".format(*verdict["interval"]) if verdict["interval"] else "any"


def closing(result: JsonObject) -> Iterator[str]:
    """The lines below the table. result: as `summary` returns it"""
    margin = result["plan"]["margin"]
    for line in result["verdicts"]:
        if not line["decides"]:
            continue
        if line["verdict"] == "same":
            yield f"{line['a']}: same within {margin:g} %"
        elif line["verdict"] != "unclear":
            beyond = line["low"] > 1 + margin / 100 or line["high"] < 1 / (1 + margin / 100)
            how = "by more than" if beyond else "perhaps by less than"
            yield f"{line['a']}: {line['verdict']}, {how} the margin of {margin:g} %"
    for arm, more in result["more_pairs"].items():
        if more:
            pairs, half_width = more
            again = f"a new A/B with --pairs {result['pairs'] + pairs}"
            advice = f"{again} would narrow it to +-{half_width:.2g} % and decide it at this effect"
        elif result["pairs"] > 1:
            advice = f"no number of pairs up to {MOST_PAIRS} would decide it"
        else:
            advice = "one pair has no interval"
        yield f"{arm}: unclear: {advice}"
    for line in result["expected"]:
        expected = ranged(line["change"], line["low"], line["high"], "+.2f", " %")
        yield (
            f"{line['arm']}: {NAMES[line['metric']]} was expected to change by {expected}, and did by "
            f"{line['found']:+.2f} %: the intervals {'meet' if line['meets'] else 'do not meet'}"
        )
    for arm, differing in result["differences"].items():
        for what, part in (("setting", "server_info"), ("variable", "environment")):
            for name, (before, after) in differing[part].items():
                sides = ("unset" if value is None else repr(value) for value in (before, after))
                yield f"{arm}: {what} {name}: {' -> '.join(sides)}"
    yield from (warning(name) for name in result["names"])
    yield from (f"note: {line}" for line in result["findings"])
    if not result["finished"]:
        yield f"not finished: --resume {result['folder']} goes on"
