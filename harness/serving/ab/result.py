"""Result of an A/B, from its record: effects, what the servers differ in, what is to be known of the runs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness.files import JsonObject
from harness.serving.ab.effect import Effect, confidence, effect, looks, more_pairs
from harness.serving.ab.plan import METRICS
from harness.serving.ab.record import Record
from harness.serving.ledger.prediction import Prediction

QUANTITIES = {"tpot": "tpot", "ttft": "ttft", "output_throughput": "throughput"}
"""Of a prediction: the metric that it is held against."""


def effects(record: Record, arm: str) -> dict[str, Effect]:
    """By metric, as far as both have it in a pair."""
    plan = record.plan
    level = confidence(plan.pairs, len(plan.others))
    found = {}
    for metric in METRICS:
        if rows := record.values(metric, (plan.base, arm)):
            base, own = zip(*rows, strict=True)
            found[metric] = effect(
                base, own, higher=metric == "throughput", level=level, margin=plan.margin
            )  # fmt: skip
    return found


def summary(record: Record) -> JsonObject:
    """As plain values, for --json and the tables."""
    plan = record.plan
    per_arm = {arm: effects(record, arm) for arm in plan.others}
    pairs = sum(1 for pair in record.pairs() if pair)
    return {
        "folder": str(record.folder),
        "created": record.about["created"],
        "plan": plan.model_dump(),
        "engine": record.of("ready")[-1] if record.of("ready") else {},
        "pairs": pairs,
        "finished": _finished(record, pairs),
        "verdicts": [
            {"a": arm, "b": plan.base, "metric": metric, "decides": metric == plan.metric,
             "change_percent": percent(found.ratio, metric), "floor": 0.0, **_finite(asdict(found))}
            for arm, of_arm in per_arm.items()
            for metric, found in of_arm.items()
        ],
        "more_pairs": {
            arm: more_pairs(of_arm[plan.metric], plan.margin)
            for arm, of_arm in per_arm.items()
            if plan.metric in of_arm and of_arm[plan.metric].verdict == "unclear"
        },
        "expected": [line for arm, of_arm in per_arm.items() for line in expected(record, arm, of_arm)],
        "differences": {arm: differences(record, arm) for arm in plan.others},
        "names": record.about.get("names", []),
        "findings": list(findings(record)),
        "seconds": sum(e["seconds"] for e in record.of("stopped")),
    }  # fmt: skip


def percent(ratio: float, metric: str) -> float:
    """Change of the metric itself, per cent; a ratio over 1 is faster: less time, or more throughput."""
    return 100 * (ratio - 1 if metric == "throughput" else 1 / ratio - 1)


def _finished(record: Record, pairs: int) -> str:
    """Why there are no more pairs; empty: the record can be resumed."""
    plan = record.plan
    if record.of("given up"):
        return "given up"
    if pairs >= looks(plan.pairs)[-1]:
        return "all pairs made"
    decided = [e for e in record.of("look", pairs=pairs) if "unclear" not in e["verdicts"].values()]
    return "decided" if decided else ""


def expected(record: Record, arm: str, found: dict[str, Effect]) -> Iterator[JsonObject]:
    """Each prediction of the arm beside what was found; changes in per cent of the metric before."""
    for prediction in record.predictions:
        metric = QUANTITIES.get(prediction.quantity, "")
        if prediction.of not in ("", arm) or prediction.change is None or not prediction.before:
            continue
        line: JsonObject = {"arm": arm, "metric": metric, "method": prediction.method}
        line |= {key: _share(prediction, key) for key in ("change", "low", "high")}
        if metric in found:
            of_metric = found[metric]
            ends = sorted(percent(end, metric) for end in (of_metric.low, max(of_metric.high, 1e-9)))
            low = ends[0] if line["low"] is None else line["low"]
            high = ends[1] if line["high"] is None else line["high"]
            line |= {"found": percent(of_metric.ratio, metric), "found_low": ends[0], "found_high": ends[1]}
            line["meets"] = low <= ends[1] and ends[0] <= high
            yield _finite(line)


def _share(prediction: Prediction, key: str) -> float | None:
    value = getattr(prediction, key)
    return None if value is None else 100 * value / prediction.before


def differences(record: Record, arm: str) -> JsonObject:
    """Of the servers as they said themselves, and of their variables: name -> (base, arm), where all launches
    of an arm agree. `told`: whether both servers said how they are configured."""
    both = [_servers(record, name) for name in (record.plan.base, arm)]
    told = all(server["server_info"] for servers in both for server in servers) and all(both)
    found: JsonObject = {"told": told}
    for part in ("server_info", "environment"):
        base, own = (_constant([server[part] for server in servers]) for servers in both)
        names = [name for name in {**base, **own} if base.get(name) != own.get(name)]
        found[part] = {
            name: [base.get(name), own.get(name)] for name in names if not _moving(name, part, both)
        }
    return found


def _servers(record: Record, arm: str) -> list[JsonObject]:
    servers = []
    for ready in record.of("ready", arm=arm):
        name = f"{ready['pair']:03d}-{ready['attempt']}-{arm}"
        with contextlib.suppress(OSError, ValueError):
            servers.append(json.loads((record.folder / "launches" / name / "server.json").read_text()))
    return servers


def _constant(parts: list[JsonObject]) -> JsonObject:
    first = parts[0] if parts else {}
    return {name: value for name, value in first.items() if all(part.get(name) == value for part in parts)}


def _moving(name: str, part: str, both: list[list[JsonObject]]) -> bool:
    """Whether launches of one arm differ in it, too."""
    return any(len({json.dumps(s[part].get(name)) for s in servers}) > 1 for servers in both)


def findings(record: Record) -> Iterator[str]:
    """One line each: what a reader of the verdicts has to know."""
    plan = record.plan
    for arm in plan.others:
        found = differences(record, arm)
        if plan.changes(arm) == plan.changes(plan.base):
            yield f"{arm} and {plan.base} are launched alike: an A/A, which shows this machine's noise"
        elif found["told"] and not found["server_info"]:
            names = ", ".join(found["environment"]) or "nothing else"
            yield f"the servers of {arm} and {plan.base} report the same configuration; differing variables: {names}"
    counted = [run for number, runs in record.pairs().items() if number for run in runs.values()]
    tokens: dict[str, int] = Counter()
    for run in counted:
        tokens[run["arm"]] += run["output_tokens"] or 0
    if len(set(tokens.values())) > 1:
        each = ", ".join(f"{arm} {count}" for arm, count in tokens.items())
        yield f"the arms made different numbers of tokens, which is other work: {each}"
    for rule, lines in sorted(_suspect(counted).items()):
        yield f"{len(lines)} of {len(counted)} runs are suspect ({rule}): {lines[0]}"
    for failed in record.of("failed"):
        yield f"pair {failed['pair']} was made again: {failed['reason']}"
    for lost in record.of("given up"):
        yield f"pair {lost['pair']} was given up"
    if any(ready["owned"] is None for ready in record.of("ready")):
        yield "nobody can tell whether the server that answered was the one that was launched (a container's)"
    if len({(ready["arm"], ready["version"]) for ready in record.of("ready")}) > len(plan.arms):
        yield "the engine's version changed between launches of one arm"
    if len({begun["boot"] for begun in record.of("begun")}) > 1:
        yield "the machine was started anew between pairs"


def _suspect(runs: list[Any]) -> dict[str, list[str]]:
    by_rule: dict[str, list[str]] = {}
    for run in runs:
        for rule, message in run["suspect"].items():
            by_rule.setdefault(rule, []).append(message)
    return by_rule


def _finite(values: JsonObject) -> JsonObject:
    """JSON has no infinity: an end of an interval that is none is left open."""
    return {k: None if isinstance(v, float) and abs(v) == float("inf") else v for k, v in values.items()}
