"""What `serving ab` prints: beforehand the commands, the pairs and the time; afterwards the effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.files import JsonObject
from harness.report.text import table
from harness.serving.ab.effect import confidence, looks, pairs_for, spread
from harness.serving.ab.plan import Plan, client, launch
from harness.serving.ab.record import Record
from harness.serving.ab.result import percent
from harness.serving.ab.session import order, pair_seconds

NAMES = {"tpot": "TPOT, mean", "ttft": "TTFT, mean", "ttft_median": "TTFT, median", "throughput": "output"}
UNITS = {"throughput": "tok/s"}
CHANGES = (1.0, 2.0, 5.0)  # per cent
MOST_LOOKED_AT = range(2, 200)


def planned(plan: Plan, record: Record | None, folder: Path, names: Sequence[JsonObject]) -> str:
    """What would run, for how long, and what it can tell."""
    lines = [_commands(plan, folder), "", _schedule(plan, record), "", _needed(plan, record)]
    return "\n".join([*lines, *(["", *map(name_line, names)] if names else [])])


def _commands(plan: Plan, folder: Path) -> str:
    lines = []
    for number, arm in enumerate(plan.arms):
        port, cache = plan.port + 10 * number, folder / "cache" / arm
        result = folder / "launches" / f"000-0-{arm}" / "result.json"
        lines += [
            f"{arm}:",
            f"  server  {launch(plan, arm, f'ab-{folder.name}-{number}-{arm}', port, cache)}",
        ]
        lines += [f"  client  {client(plan, arm, port, plan.seed, result, cache)}"]
        changed = [f"{k}={v}" for k, v in plan.arms[arm].env.items()] + [
            plan.arms[arm].flags,
            plan.arms[arm].image,
        ]
        lines += [f"  changes {' '.join(filter(None, changed)) or 'nothing'}"]
    return "\n".join(lines)


def _schedule(plan: Plan, record: Record | None) -> str:
    most, pair_s = looks(plan.pairs)[-1], pair_seconds(plan, record)
    arms = list(plan.arms)
    first = ", ".join("".join(f" {arm}" for arm in order(arms, pair)) for pair in (1, 2, 3)).strip()
    when = f"looked at after {', '.join(map(str, looks(plan.pairs)))} pairs, and no other time"
    known = "as the launches so far took" if record and record.of("stopped") else "as the plan expects"
    return (
        f"order: one launch of each arm that is thrown away, then pairs: {first} ...; {when}\n"
        f"time: {time_text(pair_s)} a pair ({known}), {time_text((most + 1) * pair_s)} for {most} pairs"
    )


def _needed(plan: Plan, record: Record | None) -> str:
    """Pairs that find an effect four times in five."""
    apart = spread(plan.metric, plan.concurrency)
    level, pair_s = confidence(plan.pairs, len(plan.others)), pair_seconds(plan, record)
    rows = []
    for change in CHANGES:
        among = looks(None) if plan.pairs is None else MOST_LOOKED_AT
        pairs = pairs_for(change, apart, level, among)
        fixed = pairs_for(change, apart, confidence(1, len(plan.others)), MOST_LOOKED_AT)
        shown = str(pairs) if pairs else f"over {among[-1]}; --pairs {fixed}"
        rows.append([f"{change:g} %", shown, time_text(((pairs or fixed or 0) + 1) * pair_s)])
    where = "" if plan.concurrency else ", no concurrency is seen in the client command"
    note = f"launches of one image differ by {apart:g} % there (8 MI355X, DeepSeek-R1{where})"
    return table(rows, [f"effect on {NAMES[plan.metric]}", "pairs needed", "time"]) + f"\n{note}"


def name_line(found: JsonObject) -> str:
    return f"{'note' if found['found'] is None else 'warning'}: {found['says']}"


def time_text(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def shown(found: JsonObject) -> str:
    """The effects of each arm, and what else is to be known."""
    plan = found["plan"]
    engine = " ".join(filter(None, (found["engine"].get("engine"), found["engine"].get("version"))))
    base = next(iter(plan["arms"]))
    rows = [_row(line) for line in found["verdicts"]]
    level = next((line["confidence"] for line in found["verdicts"]), 0.95)
    headers = [
        "arm",
        "metric",
        base,
        "arm's",
        "change",
        f"{100 * level:.3g} % interval",
        "between launches",
        "verdict",
    ]
    lines = [f"{found['pairs']} pairs against {base}{f', {engine}' if engine else ''}", ""]
    lines += [table(rows, headers), ""] if rows else ["no pair was finished", ""]
    lines += list(closing(found))
    return "\n".join(lines).rstrip()


def _row(line: JsonObject) -> list[str]:
    unit = UNITS.get(line["metric"], "ms")
    apart = line["launch_spread"]
    word = line["verdict"] if line["decides"] else f"({line['verdict']})"
    return [
        line["a"], NAMES[line["metric"]], f"{line['base']:.4g} {unit}", f"{line['arm']:.4g} {unit}",
        f"{line['change_percent']:+.2f} %", interval_text(line),
        "" if apart is None else f"{apart:.2f} %", word,
    ]  # fmt: skip


def interval_text(line: JsonObject) -> str:
    """Of the change of the metric itself, the lower end first."""
    if not line["low"] or line["high"] is None:
        return "any"
    low, high = sorted(percent(line[end], line["metric"]) for end in ("low", "high"))
    return f"{low:+.2f} to {high:+.2f} %"


def closing(found: JsonObject) -> Iterator[str]:
    """What stands below the table, a line each."""
    margin = found["plan"]["margin"]
    for line in found["verdicts"]:
        if line["decides"] and line["verdict"] == "same":
            yield f"{line['a']}: same within {margin:g} %"
        elif line["decides"] and line["verdict"] in ("faster", "slower"):
            beyond = line["low"] > 1 + margin / 100 or line["high"] < 1 / (1 + margin / 100)
            yield f"{line['a']}: {line['verdict']}, {'by more than' if beyond else 'maybe by less than'} the margin of {margin:g} %"
    for arm, more in found["more_pairs"].items():
        yield f"{arm}: unclear: " + (
            f"{more[0]} more pairs would narrow it to +-{more[1]:.2g} % and decide it, if nothing else changes"
            if more
            else "more pairs than are worth making would be needed"
        )
    for line in found["expected"]:
        sides = [
            f"{line[key]:+.2f}" if line[key] is not None else "open" for key in ("change", "low", "high")
        ]
        yield (
            f"{line['arm']}: {line['metric']} was expected to change by {sides[0]} % ({sides[1]} to {sides[2]}), found "
            f"{line['found']:+.2f} %: {'they meet' if line['meets'] else 'they do not meet'}"
        )
    for arm, differing in found["differences"].items():
        for part, names in (
            ("server's setting", differing["server_info"]),
            ("variable", differing["environment"]),
        ):
            for name, (before, after) in names.items():
                yield f"{arm}: {part} {name}: {before!r} -> {after!r}"
    yield from map(name_line, found["names"])
    yield from (f"note: {line}" for line in found["findings"])
    if not found["finished"]:
        yield f"not finished: --resume {found['folder']} goes on"
    elif found["finished"] == "decided":
        yield f"decided after {found['pairs']} pairs"
