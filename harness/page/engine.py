"""A page of what an engine runs for a deployment: a map of its shapes by tokens."""

from __future__ import annotations

from datetime import datetime, timezone

from harness.engine.view import EngineView
from harness.files import write
from harness.page.document import Chart, Page, PageSection, Table, TableRow, TableValue, anchor, distinct
from harness.report.engine_table import UNSAID, heading, layer_text, notes, summary
from shapes.case import text_of

COLOURS = {
    "tuned": "#009E73",
    "fallback": "#E69F00",
    "no table": "#BBBBBB",
    "no row": "#666666",
    "defect": "#D55E00",
}
"""Of what holds for a shape; those of Okabe and Ito, which people with any colour vision tell apart."""


def write_page(view: EngineView, target: str) -> None:
    from harness.page.html import html

    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    title = f"{view.release} on {view.device}"
    page = Page(title, "; ".join(heading(view)), distinct([engine_section(view)]))
    write(target, html(page, f"{at}, from files of {', '.join(view.libraries) or 'the engine'}"))


def engine_section(view: EngineView) -> PageSection:
    import altair as alt

    values = [
        {
            "layer": f"{shape.call.place} {layer_text(shape)}",
            "tokens": shape.tokens,
            "state": "defect" if shape.defects else shape.state,
            "share": shape.share,
            "runs": shape.row or "no row",
            "kernel": shape.found.entry.kernel if shape.found and shape.found.entry else "",
            "fallback": shape.found.fallback if shape.found else "",
            "defects": "; ".join(shape.defects),
        }
        for shape in view.shapes
    ]
    of_layers: dict[str, float] = {}
    for shape in view.shapes:
        layer = f"{shape.call.place} {layer_text(shape)}"
        of_layers[layer] = of_layers.get(layer, 0.0) + shape.share
    order = sorted(of_layers, key=lambda layer: -of_layers[layer])
    picture = (
        alt.Chart({"values": values})
        .mark_rect(stroke="#FFFFFF", strokeWidth=1)
        .encode(
            x=alt.X("tokens:O", title="tokens"),
            y=alt.Y("layer:N", sort=order, title=None, axis=alt.Axis(labelLimit=320)),
            color=alt.Color(
                "state:N",
                scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
                title=None,
                legend=alt.Legend(orient="top"),
            ),
            tooltip=[
                "layer:N", "tokens:Q", "state:N", alt.Tooltip("share:Q", format=".2%"), "runs:N", "kernel:N",
                "fallback:N", "defects:N",
            ],
        )
        .properties(width=520, height=alt.Step(22))
    )  # fmt: skip
    columns = ("share", "op", "layer", "sizes", "runs", "decided in", "state", "table", "as", "kernel", "us",
               "entry", "falls back to", "defects")  # fmt: skip
    rows = []
    for shape in sorted(view.shapes, key=lambda shape: -shape.share):
        found = shape.found
        entry = found.entry if found else None
        where = (f"{entry.file}:{entry.line}" if entry.line else entry.file) if entry else ""
        rows.append(
            TableRow(
                [
                    TableValue(f"{shape.share:.2%}", shape.share),
                    shape.call.op,
                    shape.call.place,
                    text_of({name: value for name, value in shape.sizes.items() if name not in UNSAID}),
                    shape.row or "no row",
                    shape.decided_in,
                    shape.state,
                    found.table if found else "",
                    TableValue(str(entry.m), entry.m) if entry else "",
                    entry.kernel if entry else "",
                    TableValue(f"{entry.us:.4g}", entry.us) if entry and entry.us else "",
                    where,
                    found.fallback if found else "",
                    "; ".join(shape.defects),
                ]
            )
        )
    chart = Chart(
        anchor("shapes", view.release),
        "Shapes by tokens",
        "Each cell is a shape that the deployment calls; layers with the largest share of the time come "
        "first. Green: its table has an entry; orange: it has none, and a default runs; red: the kernel has "
        "a known defect; grey: no table decides; dark grey: the engine runs what no row here does.",
        picture if values else None,
        Table(columns, rows, frozenset({"share", "as", "us"})),
        len(values),
    )
    said = [(label, line) for label, lines in notes(view).items() for line in lines]
    return PageSection(anchor("engine", view.release), view.release, "; ".join(summary(view)), [chart], said)
