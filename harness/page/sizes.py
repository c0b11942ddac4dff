"""How times, speedups and shares of the limit depend on batch, context or tokens; and which row is fastest in
which case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.page.case import MeasuredCase, interval_ends, shared_sizes, us_text, verdict_text
from harness.page.document import Chart, Columns, Table, anchor, table
from harness.page.style import OTHER, PROVIDERS, coded, provider, tips
from harness.report.notes import apart
from harness.report.text import microseconds, significant, uncertain_ratio, unit
from shapes.case import text_of

if TYPE_CHECKING:
    import altair

LOAD = ("batch", "tokens", "m", "new", "ctx")
"""The sizes that grow with the load of a server, as the ops call them."""
UNTOLD = "not told apart"
LETTER = 6.2
"""The width of a letter in a field, in pixels."""
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in one size alone, ordered by it."""

    size: str
    fixed: str
    """The sizes that all cases have, and the boundary, as text."""
    cases: Sequence[MeasuredCase]


def sweeps(cases: Sequence[MeasuredCase]) -> Iterator[Sweep]:
    """A sweep for every size that has two or more values while all other sizes, the boundary and the run are
    the same."""
    names = dict.fromkeys(name for case in cases for name in case.planned.sizes)
    for name in names:
        groups: dict[tuple[str, str, str], list[MeasuredCase]] = {}
        for case in cases:
            if isinstance(case.planned.sizes.get(name), int):
                rest = text_of({k: v for k, v in case.planned.sizes.items() if k != name})
                groups.setdefault((rest, case.planned.boundary, case.label), []).append(case)
        for fixed, group in groups.items():
            if len({case.planned.sizes[name] for case in group}) > 1:
                group.sort(key=lambda case: case.planned.sizes[name])
                yield Sweep(name, ", ".join(filter(None, fixed)), group)


def sweep_charts(sweep: Sweep) -> list[Chart]:
    points = [point for case in sweep.cases for point in _points(sweep, case)]
    if not points:
        return []
    size, name = unit(min(point["time_us"] for point in points))
    for point in points:
        point |= {key: point[f"{key}_us"] / size for key in ("time", "low", "high")}
    columns: Columns = {
        sweep.size: ("x", str), "implementation": "name", "time, us": ("time_us", us_text),
        "from, us": ("low_us", us_text), "to, us": ("high_us", us_text),
        "vs baseline": ("speedup", "ratio"), "verdict": "verdict",
        "% of limit": ("share", "share_text"),
    }  # fmt: skip
    lines = _Lines(sweep, sorted({point["name"] for point in points}), table(points, columns))
    baseline = next((name for case in sweep.cases for name in case.baselines), "the baseline")
    of = f"{sweep.size} at {sweep.fixed}"
    charts = [
        lines.chart(
            "time-over",
            f"Time over {of}",
            f"Lower is faster; the band is the interval. Both axes are logarithmic.{_devices(sweep)}",
            points,
            "time",
            f"time per call, {name}",
            band=("low", "high"),
            log=True,
        ),
        lines.chart(
            "speedup-over",
            f"Speedup over {baseline} by {of}",
            f"Above the line at 1 is faster than {baseline}; a band that crosses it shows no difference.",
            [point for point in points if point["speedup"] is not None],
            "speedup",
            f"speedup over {baseline}",
            band=("speedup_low", "speedup_high"),
            at=1.0,
        ),
        lines.chart(
            "share-over",
            f"Share of the machine's limit by {of}",
            "The share of what the machine was measured to reach; the rest up to 100 % could be gained.",
            [point for point in points if point["share"] is not None],
            "share",
            "% of the measured limit",
            zero=True,
        ),
    ]
    return [chart for chart in charts if chart.marks]


def _devices(sweep: Sweep) -> str:
    """A sentence on how far the devices differ, where several measured the cases."""
    used = {case.done.device for case in sweep.cases} - {""}
    if len(used) < 2:
        return ""
    of_them = (s for s in sweep.cases[0].spreads if used <= set(s.devices))
    known = next((apart(spread) for spread in of_them), "were not compared with each other")
    return f" {len(used)} devices measured its cases; those of their type {known}."


def _points(sweep: Sweep, case: MeasuredCase) -> Iterator[dict[str, Any]]:
    for row in case.rows:
        cell, verdict = row.cell, row.verdict
        if not cell.time_us:
            continue
        low, high = interval_ends(cell.time_us, cell.low_us, cell.high_us)
        yield {
            "x": case.planned.sizes[sweep.size],
            "name": cell.name,
            "time_us": cell.time_us,
            "low_us": low,
            "high_us": high,
            "text": microseconds(cell.time_us),
            "speedup": verdict.ratio if verdict else None,
            "speedup_low": verdict.low if verdict else None,
            "speedup_high": verdict.high if verdict else None,
            "ratio": verdict_text(verdict, row.is_baseline),
            "verdict": row.word,
            "share": cell.percent_of_ceiling,
            "share_text": significant(cell.percent_of_ceiling),
        }


@dataclass(frozen=True)
class _Lines:
    """Charts of a sweep with a line for each row."""

    sweep: Sweep
    names: Sequence[str]
    """The names of all rows, so that each row looks the same in all charts."""
    table: Table

    def chart(
        self,
        kind: str,
        title: str,
        reading: str,
        points: Sequence[dict[str, Any]],
        y: str,
        axis: str,
        band: tuple[str, str] | None = None,
        log: bool = False,
        zero: bool = False,
        at: float | None = None,
    ) -> Chart:
        """A chart without marks where there are no points.

        y:    the key of what is drawn; axis: the title of its axis; log, zero: its scale
        band: the keys of the ends of the interval
        at:   where a horizontal line is drawn
        """
        place = anchor(kind, self.sweep.cases[0].planned.op, self.sweep.size, self.sweep.fixed)
        if not points:
            return Chart(place, title, reading)
        import altair as alt

        present = [name for name in self.names if any(point["name"] == name for point in points)]
        legend = alt.Legend(symbolOpacity=1, values=present)
        colours = {name: PROVIDERS.get(provider(name), OTHER) for name in self.names}
        colour = alt.Color("name:N", scale=coded(colours), title=None, legend=legend)
        shape = alt.Shape("name:N", scale=coded(_shapes(self.names)), title=None, legend=legend)
        values = sorted({point["x"] for point in points})
        across = alt.Scale(type="symlog", nice=False)
        if values[0] > 0:
            across = alt.Scale(type="log", base=2, nice=False)
        x = alt.X("x:Q", title=self.sweep.size, scale=across, axis=alt.Axis(values=values))
        scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=zero)
        base = alt.Chart({"values": list(points)})
        tooltip = [
            *tips(name="implementation"),
            alt.Tooltip("x:Q", title=self.sweep.size),
            *tips(text="time", ratio="vs baseline", verdict="", share_text="% of limit"),
        ]
        layers: list[alt.Chart] = []
        if at is not None:
            layers.append(alt.Chart({"values": [{"at": at}]}).mark_rule(color="#888").encode(y="at:Q"))
        if band:
            layers.append(
                base.mark_area(opacity=0.15, aria=False).encode(
                    x=x, y=alt.Y(f"{band[0]}:Q", scale=scale), y2=f"{band[1]}:Q", color=colour
                )
            )
        layers += [
            base.mark_line(aria=False).encode(
                x=x, y=alt.Y(f"{y}:Q", title=axis, scale=scale), color=colour, detail="name:N"
            ),
            base.mark_point(filled=True, size=70, opacity=1).encode(
                x=x, y=f"{y}:Q", color=colour, shape=shape, tooltip=tooltip
            ),
        ]
        picture = alt.layer(*layers).properties(width=560, height=320)
        return Chart(place, title, reading, picture, self.table, len(points))


def _shapes(names: Sequence[str]) -> dict[str, str]:
    """Implementations of a provider have the same colour, and each another shape."""
    places: dict[str, int] = {}
    shapes = {}
    for name in names:
        place = places.get(provider(name), 0)
        places[provider(name)] = place + 1
        shapes[name] = SHAPES[place % len(SHAPES)]
    return shapes


def winners(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Which row is fastest in each case, and by how much; None where nothing has a time."""
    timed = [case for case in cases if case.timed]
    if not timed:
        return None
    axis = _axis(timed)
    shared = shared_sizes(timed)
    values = [_winner(case, axis, shared) for case in timed]
    columns: Columns = {
        "case": "case", "% of the suite": ("weight", lambda weight: f"{weight:.1f}"),
        "fastest": "name", "time, us": ("time_us", us_text),
        "against the second": ("ratio", "margin"), "% of limit": ("percent", "share"),
    }  # fmt: skip
    return Chart(
        anchor("winners", timed[0].planned.op),
        "Fastest implementation",
        "Each field is a case: the fastest row, and by how much it leads the second. Grey: not told apart."
        + (f" All have {text_of(shared)}." if shared else ""),
        _winners_picture(values, axis),
        table(values, columns),
        len(values),
    )


def _winner(case: MeasuredCase, axis: str, shared: dict[str, int | str]) -> dict[str, Any]:
    fastest, verdict = case.timed[0], case.runner_up
    others = {k: v for k, v in case.planned.sizes.items() if k != axis and k not in shared}
    margin = "no second" if len(case.timed) == 1 else "not compared"
    if verdict is not None and verdict.verdict == "faster":
        margin = f"{uncertain_ratio(verdict.ratio, verdict.low, verdict.high)[0]} {verdict.b}"
    elif verdict is not None:
        words = {"same": "same as", "unclear": "not told from", "slower": "slower by rounds than"}
        margin = f"{words[verdict.verdict]} {verdict.b}"
    told = len(case.timed) == 1 or (verdict is not None and verdict.verdict == "faster")
    return {
        "x": str(case.planned.sizes.get(axis, "")),
        "y": ", ".join(filter(None, [text_of(others), case.planned.boundary, case.label])),
        "provider": provider(fastest.name) if told else UNTOLD,
        "text": f"{fastest.name}\n{margin}",
        "name": fastest.name,
        "margin": margin,
        "time": microseconds(fastest.time_us),
        "share": significant(fastest.percent_of_ceiling),
        "case": case.planned.key + (f" · {case.label}" if case.label else ""),
        "weight": 100 * case.planned.weight,
        "time_us": fastest.time_us,
        "ratio": verdict.ratio if verdict else None,
        "percent": fastest.percent_of_ceiling,
    }


def _winners_picture(rows: Sequence[dict[str, Any]], axis: str) -> altair.TopLevelMixin:
    import altair as alt

    drawn = ("x", "y", "provider", "text", "name", "margin", "time", "share")
    values = [{key: row[key] for key in drawn} for row in rows]
    providers = sorted({value["provider"] for value in values})
    colours = {name: "#9994" if name == UNTOLD else PROVIDERS.get(name, OTHER) for name in providers}
    xs = sorted({value["x"] for value in values}, key=lambda text: (len(text), text))
    longest = max(len(line) for value in values for line in value["text"].split("\n"))
    base = alt.Chart({"values": values}).encode(
        x=alt.X("x:O", sort=xs, title=axis or None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:N", sort=None, title=None),
    )
    tooltip = tips(y="case", x=axis or "size", name="fastest", time="", margin="", share="% of limit")
    rect = base.mark_rect(opacity=0.35, stroke="#8886").encode(
        color=alt.Color("provider:N", scale=coded(colours), title=None), tooltip=tooltip
    )
    text = base.mark_text(lineBreak="\n", fontSize=11, lineHeight=13, dy=-6, aria=False).encode(text="text:N")
    return alt.layer(rect, text).properties(width=alt.Step(12 + LETTER * longest), height=alt.Step(44))


def _axis(cases: Sequence[MeasuredCase]) -> str:
    """The size that grows with the load, else the size with the most values; empty where no size has two."""
    values: dict[str, set[object]] = {}
    for case in cases:
        for name, value in case.planned.sizes.items():
            values.setdefault(name, set()).add(value)
    several = {name: len(values[name]) for name in values if len(values[name]) > 1}
    load = next((name for name in LOAD if name in several), "")
    return load or max(several, key=several.__getitem__, default="")
