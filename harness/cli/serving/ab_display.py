"""What `serving ab` prints: the plan before the first launch, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType

from harness.files import JsonObject
from harness.report.fitting_table import table_of
from harness.report.terminal import plain_text
from harness.report.text import ranged
from harness.serving.ab.effect import LOOKS, MOST_PAIRS, confidence, looks, pairs_for, usual_spread
from harness.serving.ab.expected import assumed_deployments
from harness.serving.ab.plan import Plan, client_command, launch_command
from harness.serving.ab.record import Record, pair_seconds
from harness.serving.ab.result import NAMES, closing, in_percent, row, warning
from harness.serving.ledger import Prediction

CHANGES = (1.0, 2.0, 5.0)  # effects in per cent, for which a plan tells how many pairs find them


def planned(
    plan: Plan,
    record: Record | None,
    folder: Path,
    names: Sequence[JsonObject],
    predictions: Sequence[Prediction],
    budget_s: float | None = None,
) -> str:
    """What would run, how long it takes, what it can tell, and what is expected."""
    lines = []
    for number, arm in enumerate(plan.arms):
        port, cache = plan.port + 10 * number, folder / "cache" / arm
        files = folder / "launches" / f"000-0-{arm}"
        warming = client_command(plan.for_warm_up(), arm, port, plan.seed, files / "warm-up.json", cache)
        lines += [
            f"{arm}:",
            f"  server   {launch_command(plan, arm, f'ab-{folder.name}-{number}-{arm}', port, cache)}",
            f"  warm-up  {warming}",
            f"  client   {client_command(plan, arm, port, plan.seed, files / 'result.json', cache)}",
        ]
    looked_at = looks(plan.pairs)
    pair_s = pair_seconds(plan, record)
    first_pairs = "; ".join(" ".join(plan.order(pair)) for pair in (1, 2, 3))
    source = "as the launches so far took" if record and record.of("stopped") else "as the plan expects"
    lines += [
        "",
        f"order: a launch of each arm that is thrown away, then pairs: {first_pairs} ...",
        f"looked at after {', '.join(map(str, looked_at))} pairs, and at no other time",
        f"time: {_time(pair_s)} a pair ({source}), "
        f"{_time((looked_at[-1] + 1) * pair_s)} for {looked_at[-1]} pairs",
    ]
    if budget_s:
        made = len(record.pairs()) if record else 0  # with pair 0
        fitting = min(int(budget_s / pair_s), looked_at[-1] + 1 - made)  # with pair 0 if it is not made yet
        pairs = fitting if made else max(0, fitting - 1)
        lines.append(f"budget: {_time(budget_s)}; pairs that would end within it: {pairs}")
    lines += ["", _needed(plan, pair_s)]
    notes = [warning(unread) for unread in names]
    for prediction, metric, (change, low, high) in in_percent(predictions):
        by = ranged(change, low, high, "+.2f", " %")
        arm = f"{prediction.of}: " if prediction.of else ""
        notes.append(f"expected: {arm}{NAMES[metric]} changes by {by}")
    for text in assumed_deployments(predictions):
        notes.append(f"note: {text}: check that the plan is for these, too")
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def _needed(plan: Plan, pair_s: float) -> str:
    """A table of the number of pairs that find an effect four times in five."""
    spread, arms = usual_spread(plan.metric, plan.concurrency), len(plan.others)
    column, rows = f"effect on {NAMES[plan.metric]}", []
    for change in CHANGES:
        by_looks = None if plan.pairs else pairs_for(change, spread, confidence(None, arms), LOOKS)
        pairs = by_looks or pairs_for(change, spread, confidence(1, arms))  # looked at once, after them all
        if pairs is None:
            needed = f"over {MOST_PAIRS}"
        elif by_looks or plan.pairs:
            needed = str(pairs)
        else:
            needed = f"{pairs}, by --pairs {pairs}: the four looks do not reach"
        time = _time((pairs + 1) * pair_s) if pairs else ""
        rows.append({column: f"{change:g} %", "pairs needed": needed, "time": time})
    where = f"where launches differ by {spread:g} %, as on 8 MI355X with DeepSeek-R1"
    unseen = "" if plan.concurrency else "; the client command names no concurrency"
    return f"{plain_text(table_of(rows))}\n{where}{unseen}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def shown(result: JsonObject) -> RenderableType:
    """A table of the effects of each arm, with notes below it."""
    base, *_ = result["plan"]["arms"]
    head = f"{result['pairs']} pairs against {base}"
    engine = [result["engine"][key] for key in ("engine", "version") if result["engine"].get(key)]
    if engine:
        head += f", {' '.join(engine)}"
    parts: list[RenderableType] = [f"{head}\n"]
    if result["verdicts"]:
        parts += [table_of([row(line, base) for line in result["verdicts"]]), ""]
    return Group(*parts, *closing(result))
