"""The section of a machine: on what a run was measured, with which versions and flags, what disturbed it, how
far its devices differ, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from harness.page.case import MeasuredCase, in_unit, short_keys
from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.style import forest, noise_band, tips
from harness.report.notes import disturbance, spread_lines
from harness.report.rows import device
from harness.report.text import ratio_text, significant
from harness.results.comparison import LAG
from harness.results.schema import Run
from harness.statistics.paired import verdict

ENDS = ("min", "median", "max")
IN_ORDER = "Left to right is the order of measuring; records have no times of day."
READ = "#0072B2"
BYTES = ("device_memory", "last_level_cache")
WIDTH = 500


def machine_section(run: Run, cases: Sequence[MeasuredCase], label: str) -> PageSection:
    not_quiet = disturbance(case.done for case in cases).removeprefix("not quiet: ")
    charts = [_conditions(cases, run), _devices(cases, run), _facts(run)]
    notes = [("again", "python -m harness " + shlex.join(run.command))]
    if not_quiet:
        notes.append(("not quiet", not_quiet))
    notes += [("busy at the start", text) for text in run.busy]
    if cases:
        notes += [("devices", line) for line in spread_lines(cases[0].spreads)]
    return PageSection(
        anchor("machine", run.id),
        f"Machine and origin: {label}" if label else "Machine and origin",
        device(run),
        [chart for chart in charts if chart],
        notes,
        folded=True,
    )


def _facts(run: Run) -> Chart:
    known: list[tuple[str, str, Any]] = [
        ("run", name, getattr(run, name))
        for name in ("id", "created", "suite", "cache", "confidence", "seed")
    ]
    for setting, variables in run.settings.items():
        words = [
            f"{name} not set" if value is None else f"{name}={value}" for name, value in variables.items()
        ]
        known.append(("setting", setting, " ".join(words) or "nothing set"))
    for group, values in run.provenance.items():
        if isinstance(values, dict):
            known += [
                (group, name, _size(value) if name in BYTES else value) for name, value in values.items()
            ]
    limits = run.ceilings or {}
    for dtype, rate in limits.get("rates", {}).items():
        known.append(("limits", f"{dtype}, TFLOPS", significant(rate / 1e12)))
    for name in ("read", "copy"):
        if limits.get(name):
            known.append(("limits", f"{name}, GB/s", significant(limits[name] / 1e9)))
    names = ("of", "what", "value")
    return Chart(
        anchor("facts", run.id),
        "What it was measured on",
        "What was asked for, the machine, versions, flags, and the limits that it was measured to reach.",
        table=table([dict(zip(names, fact, strict=True)) for fact in known], {name: name for name in names}),
    )


def _size(count: int) -> str:
    """A number of bytes, as `22.8 GiB` or `32 MiB`."""
    power, name = (30, "GiB") if count >= 1 << 30 else (20, "MiB")
    return f"{significant(count / (1 << power))} {name}" if count else "not known"


def _conditions(cases: Sequence[MeasuredCase], run: Run) -> Chart | None:
    """Clocks, temperature, power and other processes' share of the CPU in each case, a plot for each."""
    keys = short_keys(cases) if cases else {}
    values = [
        {"case": keys[case.planned.key], "place": place, "what": name, **reading}
        for place, case in enumerate(cases, 1)
        for conditions in case.done.conditions
        for name, reading in conditions.items()
        if isinstance(reading, dict) and reading.keys() == set(ENDS)
    ]
    if not values:
        return None
    order = alt.X("place:O", title="case, in the order of measuring", axis=alt.Axis(labelAngle=0))
    base = alt.Chart().encode(x=order)
    low = alt.Y("min:Q", title=None, scale=alt.Scale(zero=False))
    bars = base.mark_rule(strokeWidth=6, opacity=0.35, color=READ, aria=False).encode(y=low, y2="max:Q")
    dots = base.mark_point(filled=True, size=50, opacity=1, color=READ)
    tooltip = ["what:N", "case:N", *(f"{end}:Q" for end in ENDS)]
    picture = (
        alt.layer(bars, dots.encode(y="median:Q", tooltip=tooltip))
        .properties(width=WIDTH, height=70)
        .facet(data={"values": values}, row=alt.Row("what:N", sort=None, title=None), spacing=6)
        .resolve_scale(y="independent")
    )
    ends = {end: (end, lambda value: significant(value, 4)) for end in ENDS}
    return Chart(
        anchor("conditions", run.id),
        "Clocks, heat, load",
        "What the monitors read during the rounds of each case: the dot is the median, the bar goes from the "
        f"smallest to the largest. What they could not read is missing. {IN_ORDER} No axis begins at zero.",
        picture,
        table(values, {"case": "case", "what": "what", **ends}),
        len(values),
    )


def _devices(cases: Sequence[MeasuredCase], run: Run) -> Chart | None:
    """What each device took for the cases of calibration; None where nothing was calibrated."""
    calibrations = cases[0].calibrations if cases else ()
    if not calibrations:
        return None
    ratios = {
        (ratio.device, ratio.case): ratio.comparison
        for spread in cases[0].spreads
        for ratio in spread.to_median
    }
    texts = {at: "the median" if of.low == of.high else ratio_text(of) for at, of in ratios.items()}
    speeds = [
        {
            "name": f"{device} at {case}",
            "ratio": 1 / of.ratio,
            "low": 1 / of.high,
            "high": 1 / of.low,
            "verdict": verdict(1 / of.high, 1 / of.low, noise=LAG),
            "text": texts[device, case],
        }
        for (device, case), of in ratios.items()
    ]
    tooltip = tips(name="device", text="time of the median", verdict="")
    picture = forest(speeds, "speed over the median device's", noise_band(LAG), tooltip=tooltip)
    measured = Counter(case.done.device for case in cases)
    rows = [
        c.model_dump()
        | {
            "cases": measured[c.device],
            "ratio": ratios[c.device, c.case].ratio if (c.device, c.case) in ratios else None,
            "text": texts.get((c.device, c.case), ""),
        }
        for c in sorted(calibrations, key=lambda c: (c.type, c.case, c.device))
    ]
    _, times = in_unit(rows)
    columns: Columns = {
        "device": "device", "type": "type", "cases": ("cases", str), "calibrated with": "case",
        "when": "when", **times, "of the median": ("ratio", "text"),
    }  # fmt: skip
    return Chart(
        anchor("devices", run.id),
        "Devices",
        "Right of 1: faster than the median device of its type, by both passes together. The grey band "
        f"is {LAG:.0%} to either side: a device whose interval reaches into it neither lags nor leads. "
        "The table has the times of each before all other cases (first) and after them (last), and how many "
        "cases it measured.",
        picture if speeds else None,
        table(rows, columns),
        len(speeds),
    )
