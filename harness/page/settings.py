"""Charts of what settings (flags, revisions) do to implementations, and of what moved between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from harness.page.case import MeasuredCase, add_times_in_unit, four_digits, ratio_data, short_keys
from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.style import forest, grid, noise_band, scale_of, tooltips
from harness.report.rows import (
    SettingComparison,
    effect_word,
    first_setting_name,
    flag_effects,
    setting_comparisons,
)
from harness.report.text import microseconds, ratio_text, short_ratio, significant
from harness.results.comparison import RunComparison
from harness.results.read import RecordedRun

RAN_SHAPES = {"the same": "circle", "other kernels": "diamond", "not seen": "cross"}
"""Shapes of the dots by Row.ran."""


def setting_charts(case: MeasuredCase) -> list[Chart]:
    """The speedups of the settings, and the effects of the flags."""
    comparisons = setting_comparisons(case, case.run)
    rows = [
        ratio_data(f"{comparison.name} · {row.cell.setting}", row.verdict)
        | {"ran": row.ran, "changed": row.change, "took": microseconds(row.cell.time_us),
           "implementation": comparison.name, "setting": row.cell.setting, "status": row.cell.status,
           "time_us": row.cell.time_us, "low_us": row.cell.low_us, "high_us": row.cell.high_us,
           "anchor": case.row_anchor(row.cell)}
        for comparison in comparisons
        for row in comparison.others
    ]  # fmt: skip
    _, time_columns = add_times_in_unit(rows)
    points = [row for row in rows if row["ratio"] is not None]
    first = first_setting_name(case.run)
    line_at_1 = alt.Chart({"values": [{"none": 1}]}).mark_rule(color="#888").encode(x="none:Q")
    picture = forest(
        points, f"speedup over {first}", line_at_1,
        tooltip=tooltips(
            name="implementation · setting", text="speedup", verdict="", took="time", ran="what ran",
            changed="change",
        ),
        shape=alt.Shape("ran:N", scale=scale_of(RAN_SHAPES), legend=alt.Legend(
            title="what ran", titleOrient="left", orient="top")),
    )  # fmt: skip
    columns: Columns = {
        "implementation": "implementation", "setting": "setting", "status": "status",
        **time_columns, f"vs {first}": ("ratio", "text"), "verdict": "verdict",
        "what ran": "ran", "change": "changed",
    }  # fmt: skip
    chart = Chart(
        anchor("settings", case.label, case.planned.key), case.named("What the settings do"),
        f"Right of 1 is faster than {first}, the bar is the interval. "
        "A diamond: other kernels ran; a circle: the same did.",
        picture if points else None, table(rows, columns), marks=len(points),
    )  # fmt: skip
    return [chart, *_effects(case, comparisons)]


def settings_over_cases(cases: Sequence[MeasuredCase]) -> Chart | None:
    """A grid of the speedups of all settings in all cases of a run; None where the run has only one case."""
    keys = short_keys(cases)
    values: list[dict[str, Any]] = [
        {"case": keys[case.planned.key], "name": f"{comparison.name} · {row.cell.setting}",
         "text": short_ratio(row.verdict), "whole": ratio_text(row.verdict),
         "ratio": row.verdict.ratio, "verdict": row.verdict.verdict}
        for case in cases
        for comparison in setting_comparisons(case, case.run)
        for row in comparison.others
        if row.verdict and row.verdict.ratio is not None
    ]  # fmt: skip
    if len(cases) < 2 or not values:
        return None
    columns: Columns = {
        "case": "case", "implementation · setting": "name", "speedup": ("ratio", "whole"),
        "verdict": "verdict",
    }  # fmt: skip
    picture = grid(
        values, alt.X("name:N", sort=None, title=None, axis=alt.Axis(labelAngle=-30)),
        alt.Y("case:N", sort=None, title=None),
        tooltips(name="implementation · setting", case="", whole="speedup", verdict=""),
    )  # fmt: skip
    return Chart(
        anchor("settings-over-cases", cases[0].run.id), cases[0].named("What the settings do in each case"),
        "Each field is a case and a setting: how many times as fast as "
        f"{first_setting_name(cases[0].run)} it is. Colours are verdicts.",
        picture, table(values, columns), marks=len(values),
    )  # fmt: skip


def _effects(case: MeasuredCase, comparisons: Sequence[SettingComparison]) -> Iterator[Chart]:
    """Yields the chart of the effects of the flags, if there are any."""
    values = [
        {"name": comparison.name, "what": f"{effect.kind}: {effect.what}",
         "ratio": effect.comparison.ratio, "verdict": effect.comparison.verdict,
         "word": effect_word(effect), "text": short_ratio(effect.comparison),
         "ends": f"{significant(effect.comparison.low)} to {significant(effect.comparison.high)}"}
        for comparison in comparisons
        for effect in flag_effects(comparison, case.run)
    ]  # fmt: skip
    columns: Columns = {
        "implementation": "name", "effect": "what", "speedup": ("ratio", "text"), "interval": "ends",
        "verdict": "word",
    }  # fmt: skip
    if values:
        picture = grid(
            values, alt.X("name:N", title=None, axis=alt.Axis(labelAngle=0)),
            alt.Y("what:N", sort=None, title=None),
            tooltips(name="implementation", what="effect", text="speedup", ends="interval", word="verdict"),
        )  # fmt: skip
        yield Chart(
            anchor("effects", case.label, case.planned.key),
            case.named("Effects of the flags, and of two together"),
            "A main effect is what a flag brings over all settings of the others; an interaction is the "
            "factor by which it brings more (above 1) or less (below 1) where the other flag is changed too.",
            picture, table(values, columns), marks=len(values),
        )  # fmt: skip


# Two runs


def moved_section(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> PageSection:
    """What became faster or slower from run A to run B, with the noise between the sessions."""
    changed_words = {True: "yes", False: "no", None: ""}
    rows = [
        ratio_data(f"{row.name} at {row.case}", row.comparison)
        | {"drift": "drift of the machine" if row.drift else "", "case": row.case,
           "implementation": row.name, "a_us": row.a_us, "b_us": row.b_us,
           "judged": row.comparison.verdict if row.baseline else "absolute times",
           "changed": changed_words[row.changed]}
        for row in comparison.rows
    ]  # fmt: skip
    tooltip = tooltips(name="row", text="B vs A", verdict="", drift="")
    picture = forest(rows, "time in A over time in B", noise_band(comparison.noise), tooltip=tooltip)
    columns: Columns = {
        "case": "case", "implementation": "implementation", "A, us": ("a_us", four_digits),
        "B, us": ("b_us", four_digits), "B vs A": ("ratio", "text"), "verdict": "judged",
        "changed": "changed",
    }  # fmt: skip
    regressions = len(comparison.regressions)
    chart = Chart(
        anchor("moved-rows", str(a.folder), str(b.folder)), "What moved",
        "Right of 1: faster in B. The grey band is the noise between the sessions: a ratio in it is no "
        "change.",
        picture, table(rows, columns), marks=len(rows),
    )  # fmt: skip
    notes = [(name, f"{r.folder} ({r.run.created}, commit {r.commit})") for name, r in (("A", a), ("B", b))]
    notes.append(("noise", f"{comparison.noise:.1%}, {comparison.noise_from}"))
    notes += [("differs", note) for note in comparison.notes]
    notes += [("in one run only", text) for text in comparison.missing]
    headline = f"{regressions} regressed" if regressions else "nothing regressed"
    name = anchor("moved", str(a.folder), str(b.folder))
    return PageSection(name, f"{a.run.id} to {b.run.id}", headline, [chart], notes)
