"""Section of compiled Triton kernels: what each configuration takes of a target's resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import UsageError, one_line
from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.report.compile_table import HEADERS, compile_lines

VERDICTS = {"ok": "#0072B2", "must not be shipped": "#D55E00"}


def compiled_section(document: Mapping[str, Any], title: str) -> PageSection:
    """Of what `compile --json` wrote. Raises UsageError."""
    import altair as alt

    try:
        rows = document["compiles"]
        values = [
            {
                "kernel": f"{row['op']} {row['kernel']}",
                "target": row["target"],
                "registers": row["registers"],
                "spills": row["spills"],
                "config": str(row["config"]),
                "verdict": "ok" if row["ok"] else "must not be shipped",
                "reason": row["reason"],
            }
            for row in rows
        ]
        lines = compile_lines(rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{title} is not what `compile --json` writes: {one_line(error)}") from None
    bad = sum(value["verdict"] != "ok" for value in values)
    picture = (
        alt.Chart({"values": values})
        .mark_point(filled=True, size=40, opacity=0.6)
        .encode(
            x=alt.X("registers:Q", title="registers of a thread"),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color(
                "verdict:N", scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())), title=None
            ),
            shape=alt.Shape("target:N"),
            tooltip=["kernel:N", "target:N", "registers:Q", "spills:Q", "config:N", "verdict:N", "reason:N"],
        )
        .properties(width=520, height=alt.Step(24))
    )
    chart = Chart(
        anchor("compiled", title),
        "Registers",
        "Each dot is a configuration, placed by its registers; what spills must not be shipped.",
        picture if values else None,
        Table(HEADERS, [TableRow(line) for line in lines], frozenset(HEADERS[4:11])),
        len(values),
    )
    headline = f"{len(values)} configurations compiled, {bad} must not be shipped"
    return PageSection(anchor("compile", title), f"Compiled: {title}", headline, [chart])
