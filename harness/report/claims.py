"""The table of tested claims."""

from __future__ import annotations

from harness.results.claims import Ratio


def claims_text(found: Ratio | None) -> str:
    if found is None:
        return "not measured"
    sizes = found.case.partition(" ")[2]
    return f"{found.ratio:.2f}x ({found.low:.2f}..{found.high:.2f}) {found.a} over {found.b}, {sizes}"
