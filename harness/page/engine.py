"""A page of what an engine runs for a deployment: a map of its shapes by tokens."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from functools import partial

import altair as alt

from harness.engine import EngineView
from harness.files import write
from harness.page.document import Chart, Columns, Page, PageSection, anchor, table
from harness.page.style import coded
from harness.report.engine_table import by_share, flat, heading, layer_text, notes, summary
from harness.report.text import significant

COLOURS = {
    "tuned": "#009E73",
    "fallback": "#E69F00",
    "no table": "#BBBBBB",
    "no row": "#666666",
    "defect": "#D55E00",
}
"""State of a shape -> its colour. People with any colour vision can tell these apart (Okabe and Ito)."""

FOUR = partial(significant, digits=4)
WHOLE = partial(significant, digits=9)
COLUMNS: Columns = {
    "share": ("share", FOUR), "op": "op", "layer": "layer", "sizes": "sizes", "runs": "row",
    "decided in": "decided_in", "state": "state", "table": "table", "as": ("entry_m", WHOLE),
    "kernel": "entry_kernel", "us": ("entry_us", FOUR), "entry in": "entry_file",
    "line": ("entry_line", WHOLE), "falls back to": "fallback", "defects": "defects",
}  # fmt: skip
"""The table of shapes."""


def write_page(view: EngineView, target: str) -> None:
    from harness.page.html import html

    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    title = f"{view.release} on {view.device}"
    page = Page(title, "; ".join(heading(view)), [engine_section(view)])
    write(target, html(page, f"{at}, from files of {', '.join(view.libraries) or 'the engine'}"))


def engine_section(view: EngineView) -> PageSection:
    values = [
        {
            **flat(shape),
            "layer": f"{shape.call.place} {layer_text(shape)}",
            "tokens": shape.tokens,
            "state": "defect" if shape.defects else shape.state,
        }
        for shape in by_share(view.shapes)
    ]
    shares = Counter[str]()
    for value in values:
        shares[value["layer"]] += value["share"]
    layers = [layer for layer, _ in shares.most_common()]
    picture = (
        alt.Chart({"values": values})
        .mark_rect(stroke="#FFFFFF", strokeWidth=1)
        .encode(
            x=alt.X("tokens:O", title="tokens"),
            y=alt.Y("layer:N", sort=layers, title=None, axis=alt.Axis(labelLimit=320)),
            color=alt.Color("state:N", scale=coded(COLOURS), title=None, legend=alt.Legend(orient="top")),
            tooltip=[
                "layer:N", "tokens:Q", "state:N", alt.Tooltip("share:Q", format=".2%"), "row:N",
                "entry_kernel:N", "fallback:N", "defects:N",
            ],
        )
        .properties(width=520, height=alt.Step(22))
    )  # fmt: skip
    chart = Chart(
        anchor("shapes", view.release),
        "Shapes by tokens",
        "Each cell is a shape that the deployment calls; layers with the largest share of the time come "
        "first. Green: its table has an entry; orange: it has none, and a fallback runs; red: the kernel has "
        "a known defect; grey: no table decides; dark grey: the engine runs what no row here does.",
        picture if values else None,
        table(values, COLUMNS),
        len(values),
    )
    said = [(label, note.replace("\n  ", "; ")) for label, lines in notes(view).items() for note in lines]
    return PageSection(anchor("engine", view.release), view.release, "; ".join(summary(view)), [chart], said)
