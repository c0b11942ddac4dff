"""The table of a raced case, what is stored of it, and the tables of configurations chosen by compiling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.files import JsonObject
from harness.report.case_table import case_table
from harness.report.text import extent
from harness.results.schema import CaseDone, Cell, Record, Run
from shapes.case import text_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.fitting_table import FittingTable


def race_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The table of who was not beaten, and how many were."""
    from rich.console import Group

    beaten = {id(r) for r in records if isinstance(r, Cell) and r.status == "ok" and not r.samples.seconds}
    done = next(r for r in records if isinstance(r, CaseDone))
    parts = [case_table([r for r in records if id(r) not in beaten], run)]
    if search := done.entries:
        pruned = ", ".join(f"{count} {why}" for why, count in search.pruned.items())
        parts.append(
            f"of {search.considered} configurations {search.raced} were raced, {len(beaten)} of them "
            f"beaten in the eliminations" + (f"; not raced: {pruned}" if pruned else "")
        )
    return Group(*parts)


def stored_text(choice: Mapping[str, Any]) -> str:
    """A stored choice in words."""
    config, against = (text_of(choice[name]) for name in ("config", "against"))
    interval = f"{choice['ratio']}x ({choice['low']}..{choice['high']})"
    return f"{config}, {choice['verdict']} against {against}: {interval}"


def tune_tables(rows: Sequence[JsonObject]) -> RenderableType:
    """Of each target and implementation what was considered, and a line for all cases that got the same
    configuration and are bound by the same."""
    from rich.console import Group

    of_each: dict[tuple[str, str], list[JsonObject]] = {}
    for row in rows:
        of_each.setdefault((row["target"], row["implementation"]), []).append(row)
    parts: list[RenderableType] = []
    for (target, implementation), group in of_each.items():
        parts += [f"{target} {implementation}, {_considered(group)}", choices_table(group), ""]
    return Group(*parts[:-1])


def _considered(rows: Sequence[JsonObject]) -> str:
    """Over all cases; reasons that differ in numbers count as one."""
    refused = Counter[str]()
    for row in rows:
        for why, count in row["refused"].items():
            refused[re.sub(r"\d+", "N", why)] += count
    considered, judged = (sum(row[name] for row in rows) for name in ("configurations", "judged"))
    heading = (
        f"{len(rows)} cases: {considered} configurations, {considered - judged} of them known to be worse "
        f"without compiling; {sum(refused.values())} refused"
    )
    return "\n".join([heading, *(f"  {count}: {why}" for why, count in refused.most_common())])


def choices_table(rows: Sequence[JsonObject]) -> FittingTable:
    from harness.report.fitting_table import Column, FittingTable

    groups: dict[tuple[str, str], list[JsonObject]] = {}
    for row in rows:
        groups.setdefault((_words(row["config"]), row["bound_by"]), []).append(row)
    lines = [
        [
            str(len(group)),
            group[0]["case"],
            config or "none may be shipped",
            extent([row["estimate_us"] for row in group]),
            bound,
            _words(group[0]["second"]),
            str(group[0]["second_us"] or ""),
        ]
        for (config, bound), group in groups.items()
    ]
    columns = [
        Column("cases", right=True),
        Column("first of them", wraps=True),
        Column("configuration", wraps=True),
        Column("estimate us", right=True),
        Column("bound by"),
        Column("second there", wraps=True, spare=1),
        Column("us", right=True, spare=2),
    ]
    return FittingTable(columns, lines)


def _words(config: JsonObject | None) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items()) if config else ""
