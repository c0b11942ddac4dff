"""A page of what an engine runs for a deployment: a map of its shapes by tokens."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone

from harness.engine import EngineView
from harness.files import write
from harness.page.document import Chart, Page, PageSection, Table, TableRow, TableValue, anchor, distinct
from harness.page.style import coded
from harness.report.engine_table import by_share, flat, heading, layer_text, notes, summary

COLOURS = {
    "tuned": "#009E73",
    "fallback": "#E69F00",
    "no table": "#BBBBBB",
    "no row": "#666666",
    "defect": "#D55E00",
}
"""State of a shape -> its colour. People with any colour vision can tell these apart (Okabe and Ito)."""

COLUMNS = {
    "share": "share", "op": "op", "layer": "layer", "sizes": "sizes", "row": "runs",
    "decided_in": "decided in", "state": "state", "table": "table", "entry_m": "as",
    "entry_kernel": "kernel", "entry_us": "us", "entry_file": "entry in", "entry_line": "line",
    "fallback": "falls back to", "defects": "defects",
}  # fmt: skip
"""Name of a fact -> heading of its column in the table of shapes."""


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
    rows = [TableRow([_cell(value[name]) for name in COLUMNS]) for value in values]
    chart = Chart(
        anchor("shapes", view.release),
        "Shapes by tokens",
        "Each cell is a shape that the deployment calls; layers with the largest share of the time come "
        "first. Green: its table has an entry; orange: it has none, and a fallback runs; red: the kernel has "
        "a known defect; grey: no table decides; dark grey: the engine runs what no row here does.",
        picture if values else None,
        Table(list(COLUMNS.values()), rows, frozenset({"share", "as", "us", "line"})),
        len(values),
    )
    said = [(label, note.replace("\n  ", "; ")) for label, lines in notes(view).items() for note in lines]
    return PageSection(anchor("engine", view.release), view.release, "; ".join(summary(view)), [chart], said)


def _cell(value: str | float | None) -> str | TableValue:
    if isinstance(value, float):
        return TableValue(f"{value:.4g}", value)
    return TableValue(str(value), value) if isinstance(value, int) else value or ""
