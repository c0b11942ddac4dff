"""Settings: what flags, or another revision, do to each implementation of a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, interval_ends, short_keys, us_text
from harness.page.measured.forest import forest
from harness.page.measured.ranking import ratio_text
from harness.page.style import verdict_colour
from harness.report.setting_table import (
    TOGETHER,
    SettingComparison,
    first_setting,
    flag_effects,
    setting_comparisons,
)
from harness.report.text import microseconds, significant, uncertain_ratio
from harness.results.effects import changes, same_kernels
from harness.results.schema import Run

if TYPE_CHECKING:
    import altair

RAN = {"the same": "circle", "other kernels": "diamond"}


def setting_charts(case: MeasuredCase) -> list[Chart]:
    comparisons = setting_comparisons([*case.cells, *case.verdicts], case.run)
    points, rows = [], []
    for comparison in comparisons:
        for cell, verdict in comparison.others:
            ran = "the same" if same_kernels(comparison.baseline, cell) else "other kernels"
            changed = changes(comparison.baseline, cell) if cell.time_us is not None else cell.reason
            name = f"{comparison.name} · {cell.setting}"
            ratio = verdict.ratio if verdict else None
            if verdict and ratio is not None:
                low, high = interval_ends(ratio, verdict.low, verdict.high)
                points.append(
                    {
                        "name": name,
                        "ratio": ratio,
                        "low": low,
                        "high": high,
                        "text": ratio_text(verdict),
                        "verdict": verdict.verdict,
                        "ran": ran,
                        "changed": changed,
                        "time": microseconds(cell.time_us),
                    }
                )
            rows.append(
                TableRow(
                    [
                        comparison.name,
                        cell.setting,
                        cell.status,
                        TableValue(us_text(cell.time_us), cell.time_us),
                        TableValue(ratio_text(verdict), ratio),
                        verdict.verdict if verdict else "",
                        ran if cell.time_us is not None else "",
                        changed,
                    ],
                    case.row_anchor(cell),
                )
            )
    columns = (
        "implementation",
        "setting",
        "status",
        "time, us",
        f"vs {first_setting(case.run)}",
        "verdict",
        "what ran",
        "change",
    )
    table = Table(columns, rows, frozenset({"time, us", columns[4]}))
    chart = Chart(
        anchor("arms", case.label, case.planned.key),
        "What the settings do",
        f"Right of 1 is faster than {first_setting(case.run)}, the bar is the interval. "
        "A diamond: other kernels ran; a circle: the same did.",
        _picture(points, case.run) if points else None,
        table,
        len(points),
    )
    grid = _interactions(case, comparisons)
    return [chart, *([grid] if grid else [])]


def _picture(points: Sequence[dict[str, Any]], run: Run) -> altair.TopLevelMixin:
    import altair as alt

    shapes = alt.Scale(domain=list(RAN), range=list(RAN.values()))
    return forest(
        points,
        f"speedup over {first_setting(run)}",
        alt.Chart({"values": [{"none": 1}]}).mark_rule(color="#888").encode(x="none:Q"),
        [
            alt.Tooltip("name:N", title="implementation · setting"),
            alt.Tooltip("text:N", title="speedup"),
            alt.Tooltip("verdict:N"),
            alt.Tooltip("time:N"),
            alt.Tooltip("ran:N", title="what ran"),
            alt.Tooltip("changed:N", title="change"),
        ],
        shape=alt.Shape("ran:N", scale=shapes, title="what ran"),
    )


def settings_over_cases(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Of one run: every setting of every implementation in every case; None where it has only one case."""
    import altair as alt

    keys = short_keys(cases)
    values: list[dict[str, Any]] = [
        {
            "case": keys[case.planned.key],
            "name": f"{comparison.name} · {cell.setting}",
            "text": uncertain_ratio(verdict.ratio, verdict.low, verdict.high)[0],
            "whole": ratio_text(verdict),
            "ratio": verdict.ratio,
            "verdict": verdict.verdict,
        }
        for case in cases
        for comparison in setting_comparisons([*case.cells, *case.verdicts], case.run)
        for cell, verdict in comparison.others
        if verdict and verdict.ratio is not None
    ]
    if len(cases) < 2 or not values:
        return None
    columns = ("case", "implementation · setting", "speedup", "verdict")
    first = first_setting(cases[0].run)
    return Chart(
        anchor("settings-over-cases", cases[0].run.id),
        f"What the settings do in each case{f': {cases[0].label}' if cases[0].label else ''}",
        f"One field a case and setting: how many times as fast as {first} it is. Colours are verdicts.",
        _grid(
            values,
            alt.X("name:N", sort=None, title=None, axis=alt.Axis(labelAngle=-30)),
            alt.Y("case:N", sort=None, title=None),
            [
                alt.Tooltip("name:N", title="implementation · setting"),
                alt.Tooltip("case:N"),
                alt.Tooltip("whole:N", title="speedup"),
                alt.Tooltip("verdict:N"),
            ],
        ),
        Table(
            columns,
            [
                TableRow([v["case"], v["name"], TableValue(v["whole"], v["ratio"]), v["verdict"]])
                for v in values
            ],
            frozenset({"speedup"}),
        ),
        len(values),
    )


def _interactions(case: MeasuredCase, comparisons: Sequence[SettingComparison]) -> Chart | None:
    import altair as alt

    effects = [(c.name, effect) for c in comparisons for effect in flag_effects(c, case.run)]
    if not effects:
        return None
    values: list[dict[str, Any]] = [
        {
            "name": name,
            "what": f"{effect.kind}: {effect.what}",
            "ratio": effect.comparison.ratio,
            "verdict": effect.comparison.verdict,
            "word": TOGETHER[effect.comparison.verdict]
            if effect.kind == "interaction"
            else effect.comparison.verdict,
            "text": uncertain_ratio(effect.comparison.ratio, effect.comparison.low, effect.comparison.high)[
                0
            ],
            "ends": f"{significant(effect.comparison.low)} to {significant(effect.comparison.high)}",
        }
        for name, effect in effects
    ]
    rows = [
        TableRow([v["name"], v["what"], TableValue(v["text"], v["ratio"]), v["ends"], v["word"]])
        for v in values
    ]
    columns = ("implementation", "effect", "speedup", "interval", "verdict")
    return Chart(
        anchor("effects", case.label, case.planned.key),
        "Effects of the flags, and of two together",
        "A main effect is what a flag brings over all settings of the others; an interaction is by what "
        "factor it brings more (above 1) or less (below) where the other flag is changed too.",
        _grid(
            values,
            alt.X("name:N", title=None, axis=alt.Axis(labelAngle=0)),
            alt.Y("what:N", sort=None, title=None),
            [
                alt.Tooltip("name:N", title="implementation"),
                alt.Tooltip("what:N", title="effect"),
                alt.Tooltip("text:N", title="speedup"),
                alt.Tooltip("ends:N", title="interval"),
                alt.Tooltip("word:N", title="verdict"),
            ],
        ),
        Table(columns, rows, frozenset({"speedup"})),
        len(values),
    )


def _grid(
    values: Sequence[dict[str, Any]], x: altair.X, y: altair.Y, tooltip: Sequence[altair.Tooltip]
) -> altair.TopLevelMixin:
    """A field for each value, coloured by its verdict, with its text in it."""
    import altair as alt

    base = alt.Chart({"values": list(values)}).encode(x=x, y=y)
    return alt.layer(
        base.mark_rect(opacity=0.45, stroke="#8886").encode(color=verdict_colour(0.45), tooltip=tooltip),
        base.mark_text(aria=False).encode(text="text:N"),
    ).properties(width=alt.Step(100), height=alt.Step(24))
