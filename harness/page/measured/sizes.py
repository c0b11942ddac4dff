"""Across sizes: how times, speedups and shares of the limit go with batch, context or tokens; and who is
fastest where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, interval_ends, unit_of, us_text
from harness.page.measured.ranking import ratio_text
from harness.page.style import OTHER, PROVIDERS, provider
from harness.report.case_table import runner_up
from harness.report.spread_text import apart
from harness.report.text import microseconds, significant
from shapes.case import text_of

if TYPE_CHECKING:
    import altair

LOAD = ("batch", "tokens", "m", "new", "ctx")
"""Sizes that go with the load of a server, as the ops call them."""

UNTOLD = "not told apart"
LETTER = 6.2  # pixels of a letter in a field

SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in one size alone, in its order.

    fixed: their other sizes and boundary
    """

    size: str
    fixed: str
    cases: Sequence[MeasuredCase]

    @property
    def op(self) -> str:
        return self.cases[0].planned.op


def sweeps(cases: Sequence[MeasuredCase]) -> Iterator[Sweep]:
    """Every size that takes two values or more where all others, the boundary and the run stay."""
    names = dict.fromkeys(name for case in cases for name in case.planned.sizes)
    for name in names:
        groups: dict[tuple[str, str, str], list[MeasuredCase]] = {}
        for case in cases:
            if isinstance(case.planned.sizes.get(name), int):
                rest = text_of({k: v for k, v in case.planned.sizes.items() if k != name})
                groups.setdefault((rest, case.planned.boundary, case.label), []).append(case)
        for (others, boundary, label), group in groups.items():
            if len({case.planned.sizes[name] for case in group}) > 1:
                group.sort(key=lambda case: case.planned.sizes[name])
                yield Sweep(name, ", ".join(filter(None, [others, boundary, label])), group)


def sweep_charts(sweep: Sweep) -> list[Chart]:
    points = [point for case in sweep.cases for point in _points(sweep, case)]
    if not points:
        return []
    size, unit = unit_of(point["time_us"] for point in points)
    for point in points:
        point |= {
            "time": point["time_us"] / size,
            "low": point["low_us"] / size,
            "high": point["high_us"] / size,
        }
    against = [point for point in points if point["speedup"] is not None]
    shares = [point for point in points if point["share"] is not None]
    of, table = f"{sweep.size} at {sweep.fixed}", _table(points, sweep)
    names = sorted({point["name"] for point in points})
    charts = [
        Chart(
            anchor("time-over", sweep.op, sweep.size, sweep.fixed),
            f"Time over {of}",
            f"Lower is faster; the band is the interval. Both axes are logarithmic.{_devices(sweep)}",
            _lines(points, names, sweep, "time", ("low", "high"), f"time per call, {unit}", log=True),
            table,
            len(points),
        )
    ]
    if against:
        baseline = next((name for case in sweep.cases for name in case.baselines), "the baseline")
        charts.append(
            Chart(
                anchor("speedup-over", sweep.op, sweep.size, sweep.fixed),
                f"Speedup over {baseline} by {of}",
                f"Above the line at 1 is faster than {baseline}; a band that crosses it shows no difference.",
                _lines(
                    against,
                    names,
                    sweep,
                    "speedup",
                    ("speedup_low", "speedup_high"),
                    f"speedup over {baseline}",
                    at=1.0,
                ),
                table,
                len(against),
            )
        )
    if shares:
        charts.append(
            Chart(
                anchor("share-over", sweep.op, sweep.size, sweep.fixed),
                f"Share of the machine's limit by {of}",
                "How much of what the machine was measured to reach; what is left up to 100 % could be won.",
                _lines(shares, names, sweep, "share", None, "% of the measured limit", zero=True),
                table,
                len(shares),
            )
        )
    return charts


def _devices(sweep: Sweep) -> str:
    """A sentence where several measured its cases: by how much they differ."""
    used = {case.done.device for case in sweep.cases} - {""}
    if len(used) < 2:
        return ""
    of_them = (s for s in sweep.cases[0].spreads if used <= set(s.devices))
    known = next((apart(spread) for spread in of_them), "were not compared with each other")
    return f" {len(used)} devices measured its cases; those of their type {known}."


def _points(sweep: Sweep, case: MeasuredCase) -> Iterator[dict[str, Any]]:
    for cell in case.timed:
        verdict = case.against_baseline(cell)
        assert cell.time_us
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
            "ratio": ratio_text(verdict) or ("baseline" if cell.name in case.baselines else ""),
            "verdict": verdict.verdict if verdict else "",
            "share": cell.percent_of_ceiling,
            "share_text": significant(cell.percent_of_ceiling),
        }


def _lines(
    points: Sequence[dict[str, Any]],
    names: Sequence[str],
    sweep: Sweep,
    y: str,
    band: tuple[str, str] | None,
    title: str,
    log: bool = False,
    zero: bool = False,
    at: float | None = None,
) -> altair.TopLevelMixin:
    """names: of all rows of the sweep, so that each looks the same in all of its charts"""
    import altair as alt

    legend = alt.Legend(symbolOpacity=1, values=[n for n in names if any(p["name"] == n for p in points)])
    domain = list(names)
    colours = [PROVIDERS.get(provider(name), OTHER) for name in names]
    colour = alt.Color("name:N", scale=alt.Scale(domain=domain, range=colours), title=None, legend=legend)
    shape = alt.Shape(
        "name:N", scale=alt.Scale(domain=domain, range=_shapes(names)), title=None, legend=legend
    )
    values = sorted({point["x"] for point in points})
    across = (
        alt.Scale(type="log", base=2, nice=False) if values[0] > 0 else alt.Scale(type="symlog", nice=False)
    )
    x = alt.X("x:Q", title=sweep.size, scale=across, axis=alt.Axis(values=values))
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=zero)
    base = alt.Chart({"values": list(points)})
    tooltip = [
        alt.Tooltip("name:N", title="implementation"),
        alt.Tooltip("x:Q", title=sweep.size),
        alt.Tooltip("text:N", title="time"),
        alt.Tooltip("ratio:N", title="vs baseline"),
        alt.Tooltip("verdict:N"),
        alt.Tooltip("share_text:N", title="% of limit"),
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
            x=x, y=alt.Y(f"{y}:Q", title=title, scale=scale), color=colour, detail="name:N"
        ),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            x=x, y=f"{y}:Q", color=colour, shape=shape, tooltip=tooltip
        ),
    ]
    return alt.layer(*layers).properties(width=560, height=320)


def _shapes(names: Sequence[str]) -> list[str]:
    """Implementations of a provider have its colour, each with another shape."""
    places: dict[str, int] = {}
    shapes = []
    for name in names:
        place = places[provider(name)] = places.get(provider(name), -1) + 1
        shapes.append(SHAPES[place % len(SHAPES)])
    return shapes


def _table(points: Sequence[dict[str, Any]], sweep: Sweep) -> Table:
    rows = [
        TableRow(
            [
                TableValue(str(p["x"]), p["x"]),
                p["name"],
                *(TableValue(us_text(p[key]), p[key]) for key in ("time_us", "low_us", "high_us")),
                TableValue(p["ratio"], p["speedup"]),
                p["verdict"],
                TableValue(p["share_text"], p["share"]),
            ]
        )
        for p in points
    ]
    columns = (
        sweep.size,
        "implementation",
        "time, us",
        "from, us",
        "to, us",
        "vs baseline",
        "verdict",
        "% of limit",
    )
    return Table(columns, rows, frozenset(columns) - {"implementation", "verdict"})


def winners(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Who is fastest in each case, and by how much; None where nothing has a time."""
    import altair as alt

    timed = [case for case in cases if case.timed]
    if not timed:
        return None
    axis = _axis(timed)
    shared = _shared(timed)
    values, rows = [], []
    for case in timed:
        fastest, verdict = case.timed[0], runner_up(case.timed, case.verdicts)
        others = {k: v for k, v in case.planned.sizes.items() if k != axis and k not in shared}
        margin = _margin(case)
        value = {
            "x": str(case.planned.sizes.get(axis, "")),
            "y": ", ".join(filter(None, [text_of(others), case.planned.boundary, case.label])),
            "provider": provider(fastest.name) if _is_told(case) else UNTOLD,
            "text": f"{fastest.name}\n{margin}",
            "name": fastest.name,
            "margin": margin,
            "time": microseconds(fastest.time_us),
            "share": significant(fastest.percent_of_ceiling),
        }
        values.append(value)
        weight = 100 * case.planned.weight
        rows.append(
            TableRow(
                [
                    case.planned.key + (f" · {case.label}" if case.label else ""),
                    TableValue(f"{weight:.1f}", weight),
                    fastest.name,
                    TableValue(us_text(fastest.time_us), fastest.time_us),
                    TableValue(margin, verdict.ratio if verdict else None),
                    TableValue(value["share"], fastest.percent_of_ceiling),
                ]
            )
        )
    domain = sorted({value["provider"] for value in values})
    colours = ["#9994" if p == UNTOLD else PROVIDERS.get(p, OTHER) for p in domain]
    xs = sorted({value["x"] for value in values}, key=lambda text: (len(text), text))
    longest = max(len(line) for value in values for line in value["text"].split("\n"))
    base = alt.Chart({"values": values}).encode(
        x=alt.X("x:O", sort=xs, title=axis or None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:N", sort=None, title=None),
    )
    tooltip = [
        alt.Tooltip("y:N", title="case"),
        alt.Tooltip("x:N", title=axis or "size"),
        alt.Tooltip("name:N", title="fastest"),
        alt.Tooltip("time:N"),
        alt.Tooltip("margin:N"),
        alt.Tooltip("share:N", title="% of limit"),
    ]
    rect = base.mark_rect(opacity=0.35, stroke="#8886").encode(
        color=alt.Color("provider:N", scale=alt.Scale(domain=domain, range=colours), title=None),
        tooltip=tooltip,
    )
    text = base.mark_text(lineBreak="\n", fontSize=11, lineHeight=13, dy=-6, aria=False).encode(text="text:N")
    columns = ("case", "% of the suite", "fastest", "time, us", "against the second", "% of limit")
    return Chart(
        anchor("winners", timed[0].planned.op),
        "Fastest implementation",
        "One field a case: who is fastest and by how much it leads the second. Grey: not told apart from it."
        + (f" All have {text_of(shared)}." if shared else ""),
        alt.layer(rect, text).properties(width=alt.Step(12 + LETTER * longest), height=alt.Step(44)),
        Table(columns, rows, frozenset(columns) - {"case", "fastest"}),
        len(values),
    )


def _shared(cases: Sequence[MeasuredCase]) -> dict[str, int | str]:
    """Sizes that all have."""
    first = cases[0].planned.sizes
    return {k: v for k, v in first.items() if all(case.planned.sizes.get(k) == v for case in cases)}


def _is_told(case: MeasuredCase) -> bool:
    """Whether the fastest is known to be so, or has nobody beside it."""
    verdict = runner_up(case.timed, case.verdicts)
    return len(case.timed) == 1 or (verdict is not None and verdict.verdict == "faster")


def _margin(case: MeasuredCase) -> str:
    verdict = runner_up(case.timed, case.verdicts)
    if verdict is None:
        return "no second" if len(case.timed) == 1 else "not compared"
    if verdict.verdict == "faster":
        return f"{ratio_text(verdict).partition(' ')[0]} {verdict.b}"
    words = {"same": "same as", "unclear": "not told from", "slower": "slower by rounds than"}
    return f"{words[verdict.verdict]} {verdict.b}"


def _axis(cases: Sequence[MeasuredCase]) -> str:
    """The size that goes with the load, else that which takes most values; empty where none takes two."""
    values: dict[str, set[object]] = {}
    for case in cases:
        for name, value in case.planned.sizes.items():
            values.setdefault(name, set()).add(value)
    several = {name: len(values[name]) for name in values if len(values[name]) > 1}
    load = next((name for name in LOAD if name in several), "")
    return load or max(several, key=several.__getitem__, default="")
