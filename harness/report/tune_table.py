"""The table of a raced case, and the text of what is stored for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.report.case_table import case_table
from harness.results.schema import CaseDone, Cell, Record, Run
from shapes.case import text_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def race_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The table of the configurations that were not beaten, with the numbers of the others."""
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
    """`BLOCK_M=64, faster against BLOCK_M=32: 1.2x (1.1..1.3)`."""
    config, against = (text_of(choice[name]) for name in ("config", "against"))
    interval = f"{choice['ratio']}x ({choice['low']}..{choice['high']})"
    return f"{config}, {choice['verdict']} against {against}: {interval}"
