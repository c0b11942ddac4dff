"""A comparison of two serving results as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from harness.report.text import WIDTH
from harness.serving.compare.alike import QuantityComparison
from harness.serving.compare.quantity import Quantity


def as_json(comparison: QuantityComparison) -> str:
    return json.dumps({**asdict(comparison), "ratio": comparison.ratio}, indent=1) + "\n"


def as_text(a: Quantity, b: Quantity, comparison: QuantityComparison) -> str:
    """Both numbers, normalised where they can be, and their ratio; or why they are not compared."""
    lines = []
    for name, quantity, side in (("A", a, comparison.a), ("B", b, comparison.b)):
        m = quantity.metric
        kind = "" if m.tokens == "none" else f" of {m.tokens} tokens"
        statistic = "" if m.statistic == "total" else f"{m.statistic} "
        gpus = f"{quantity.all_gpus} " if quantity.all_gpus else ""
        where = " ".join(
            filter(
                None, (f"{gpus}{quantity.hardware or 'unknown hardware'}", quantity.engine, quantity.version)
            )
        )
        lines.append(f"{name}  {quantity.id}: {where}")
        lines.append(f"   {statistic}{m.name}{kind}: {m.value:,.6g} {m.unit}, scope {m.scope}")
        if side.steps:
            lines.append(f"   normalised: {side.text}  ({'; '.join(side.steps)})")
    if comparison.verdict == "refused":
        lines.append("not alike, so not compared:")
        lines += [_wrapped(reason.text) for reason in comparison.reasons]
    else:
        lines.append(
            f"A / B = {comparison.ratio:.4g}"
            + (" after normalising" if comparison.verdict == "normalised" else "")
        )
    if comparison.confounders:
        lines.append("not only the GPU differs:" if a.hardware != b.hardware else "what differs:")
        lines += [_wrapped(line) for line in comparison.confounders]
    if comparison.uncertain:
        lines.append("uncertain:")
        lines += [_wrapped(line) for line in comparison.uncertain]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
