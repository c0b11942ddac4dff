"""The section of a decision: the choices, a map of the fastest rows, and where launches would save time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from harness.decide.choices import launch_text
from harness.decide.decision import BestCase, Choice, Decision
from harness.decide.text import answer, crossover_text, notes, snippet
from harness.decide.worth import Worth
from harness.page.case import four_digits
from harness.page.document import Chart, Columns, Page, PageSection, Table, TableRow, anchor, table
from harness.page.style import forest, heat_map, noise_band, row_colours, scale_of, tooltips
from harness.report.text import grouped, microseconds, ratio_text
from harness.serving.link.kernel_times import AXES
from shapes.case import text_of

SAVED, LEFT = "saved by this launch", "left to another launch"
PART_COLOURS = {SAVED: "#0072B2", LEFT: "#D55E00"}
MOST_CASES = 40  # cases in the chart of savings


def decision_page(decision: Decision, worth: Worth | None) -> Page:
    launches = decision.launches
    title = f"How to launch {launches.engine} on {launches.measured.device}"
    return Page(title, decision.mix.text, [decision_section(decision, worth)])


def decision_section(decision: Decision, worth: Worth | None) -> PageSection:
    engine = decision.launches.engine
    by_op = grouped(decision.cases, lambda best: best.case.op)
    maps = [_map(op, cases) for op, cases in by_op.items()]
    charts = [*_choices(decision), *maps, *_savings(decision), *_crossovers(decision)]
    launch = [("launch", line) for line in snippet(decision)] if decision.chosen else []
    return PageSection(anchor("decision", engine), f"{engine}: the decision", answer(decision, worth), charts,
                       [*notes(decision, worth), *launch])  # fmt: skip


def _choices(decision: Decision) -> Iterator[Chart]:
    """Yields the chart of the choices that were compared, if there are any."""
    compared = decision.compared
    if not compared:
        return
    rows = [_choice_data(choice) for choice in compared]
    columns: Columns = {
        "choice": "choice", "op": "op", "speedup": ("ratio", "speedup"), "verdict": "verdict",
        "saves of all, %": ("share", lambda share: f"{share:.2f}"), "cases": ("cases", str),
    }  # fmt: skip
    noise = max((choice.noise for choice in compared if math.isfinite(choice.noise)), default=0.0)
    yield Chart(
        "choices", "What each choice does",
        "The speedup of an op over the cases in which a choice runs another row, each counted with its "
        "calls. Right of 1 is faster than the default. Intervals hold together with 95 %; grey is noise.",
        forest(rows, "speedup over the default", noise_band(noise),
               tooltip=tooltips(name="choice", speedup="", share_text="saves of all", verdict="")),
        table(rows, columns), marks=len(rows),
    )  # fmt: skip


def _choice_data(choice: Choice) -> dict[str, Any]:
    comparison = choice.comparison
    assert comparison
    launch = launch_text(choice.settings)
    is_known = math.isfinite(comparison.high)
    return {
        "name": f"{choice.op} | {launch}", "choice": launch, "op": choice.op, "ratio": comparison.ratio,
        "low": comparison.low if is_known else None, "high": comparison.high if is_known else None,
        "verdict": comparison.verdict, "speedup": ratio_text(comparison), "share": 100 * choice.share,
        "share_text": f"{choice.share:.2%}", "cases": len(choice.pairs),
    }  # fmt: skip


def _map(op: str, cases: Sequence[BestCase]) -> Chart:
    """A field for each case: the fastest row that a flag can choose."""
    _, interpolated_sizes = AXES[op]
    size = interpolated_sizes[0]  # from left to right; the others go down
    sizes = [best.case.sizes for best in cases]
    varying = [name for name in sizes[0] if len({str(of_case.get(name)) for of_case in sizes}) > 1]
    values = [_field_data(best, size, [name for name in varying if name != size]) for best in cases]
    colours = row_colours(dict.fromkeys(value["name"] for value in values))
    across = sorted({value["x"] for value in values}, key=lambda x: (len(x), x))  # texts of numbers, by size
    tooltip = tooltips(case="", name="fastest", took="time", chosen="this launch runs", lead="faster by",
                   settings="with", beyond="no flag for")  # fmt: skip
    colour = alt.Color("name:N", scale=scale_of(colours), title=None, legend=alt.Legend(orient="top"))
    opacity = alt.Opacity("clear:N", scale=alt.Scale(domain=[True, False], range=[0.6, 0.25]), legend=None)
    columns: Columns = {
        "case": "case", "fastest": "name", "time": ("us", four_digits), "this launch runs": "chosen",
        "faster by": "lead", "with": "settings", "no flag for": "beyond",
    }  # fmt: skip
    shared = {name: value for name, value in sizes[0].items() if name not in (*varying, size)}
    return Chart(
        anchor("map", op), f"{op}: the fastest row that a flag can choose",
        "Each field is a case. A number says by how much that row is faster than what this launch runs; "
        f"pale fields have none that is clearly faster. All have {text_of(shared)}.",
        heat_map(values, across, size, {}, color=colour, opacity=opacity, tooltip=tooltip),
        table(values, columns), marks=len(values),
    )  # fmt: skip


def _field_data(best: BestCase, x_size: str, y_sizes: Sequence[str]) -> dict[str, Any]:
    sizes = best.case.sizes
    fastest, fastest_us = best.fastest.new.cell.impl, best.fastest.new_us
    lead = best.chosen.new_us / fastest_us
    beyond = f"{best.no_flag.cell.impl}, {microseconds(best.no_flag_us)}" if best.no_flag else ""
    return {
        "x": str(sizes[x_size]), "y": text_of({name: sizes[name] for name in y_sizes}) or best.case.op,
        "case": best.case.sizes_text, "name": fastest, "us": fastest_us, "took": microseconds(fastest_us),
        "chosen": best.chosen.new.cell.impl,
        "lead": f"{lead:.2f}x" if best.clear else "", "clear": best.clear,
        "settings": launch_text(best.settings), "beyond": beyond,
    }  # fmt: skip


def _savings(decision: Decision) -> Iterator[Chart]:
    """Yields a chart of what this launch saves in each case, and what another launch would save more, as
    shares of the time of all cases under the default; none where nothing is saved."""
    total_us = sum(best.case.calls * best.chosen.us for best in decision.cases)
    rows: list[dict[str, Any]] = []
    for best in decision.cases:
        default_us, chosen_us, fastest_us = best.chosen.us, best.chosen.new_us, best.fastest.new_us
        for part, us in ((SAVED, default_us - chosen_us), (LEFT, chosen_us - fastest_us)):
            percent = 100 * best.case.calls * us / total_us
            if abs(percent) >= 0.005:  # smaller ones would read 0.00 %
                text = f"{percent:+.2f} %"
                rows.append({"case": best.case.text, "part": part, "share": percent, "text": text})
    if not rows:
        return
    rows.sort(key=lambda row: -abs(row["share"]))
    order = list(dict.fromkeys(row["case"] for row in rows))[:MOST_CASES]
    shown = [row for row in rows if row["case"] in order]
    picture = (
        alt.Chart({"values": shown})
        .mark_bar(opacity=0.8)
        .encode(
            x=alt.X("share:Q", title="% of the time of all cases"),
            y=alt.Y("case:N", sort=order, title=None, axis=alt.Axis(labelLimit=320)),
            color=alt.Color(
                "part:N", scale=scale_of(PART_COLOURS), title=None, legend=alt.Legend(orient="top")
            ),
            tooltip=tooltips(case="", part="", text="of all"),
        )
        .properties(width=420, height=alt.Step(22))
    )
    columns: Columns = {"case": "case", "part": "part", "% of all": ("share", lambda share: f"{share:+.2f}")}
    yield Chart(
        "savings", "Where it saves, and what leaving it costs",
        "Blue: what this launch saves against the default in a case, times its calls. Orange: what the "
        "fastest row of the case would save more, by estimates; no single launch may have all of it.",
        picture, table(rows, columns), marks=len(shown),
    )  # fmt: skip


def _crossovers(decision: Decision) -> Iterator[Chart]:
    """Yields the table of crossovers, if there are any."""
    if decision.crossovers:
        numbers = Table(["crossover"], [TableRow([crossover_text(c)]) for c in decision.crossovers])
        reading = "By the times at neighbouring sizes, with the logarithm of their ratio taken as linear."
        yield Chart("crossovers", "Where the fastest row changes", reading, table=numbers)
