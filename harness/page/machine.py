"""The section of a machine: with what a run was measured, what disturbed it, how its devices differ."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from harness.page.case import MeasuredCase, add_times_in_unit, four_digits, short_keys
from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.style import forest, noise_band, tooltips
from harness.report.notes import disturbance, spread_lines
from harness.report.rows import device
from harness.report.text import ratio_text, significant
from harness.results.comparison import LAG
from harness.results.schema import Run
from harness.statistics.paired import verdict

STATISTICS = ("min", "median", "max")  # those that records have of a monitor's readings
READING_COLOUR = "#0072B2"
IN_BYTES = ("device_memory", "last_level_cache")  # facts of the machine that are sizes
WIDTH = 500  # pixels of a plot


def machine_section(run: Run, cases: Sequence[MeasuredCase], label: str) -> PageSection:
    not_quiet = disturbance(case.done for case in cases).removeprefix("not quiet: ")
    charts = filter(None, [_conditions(cases, run), _devices(cases, run), _facts(run)])
    notes = [("again", "python -m harness " + shlex.join(run.command))]
    if not_quiet:
        notes.append(("not quiet", not_quiet))
    notes += [("busy at the start", text) for text in run.busy]
    if cases:
        notes += [("devices", line) for line in spread_lines(cases[0].spreads)]
    return PageSection(
        anchor("machine", run.id), f"Machine and origin: {label}" if label else "Machine and origin",
        device(run), list(charts), notes, folded=True,
    )  # fmt: skip


def _facts(run: Run) -> Chart:
    """A table of what was asked for, the machine, versions, flags, and the measured limits."""
    names = ("id", "created", "suite", "cache", "confidence", "seed")
    facts: list[tuple[str, str, object]] = [("run", name, getattr(run, name)) for name in names]
    for setting, variables in run.settings.items():
        words = [f"{name} not set" if v is None else f"{name}={v}" for name, v in variables.items()]
        facts.append(("setting", setting, " ".join(words) or "nothing set"))
    for group, of_group in run.provenance.items():
        if isinstance(of_group, dict):
            for name, value in of_group.items():
                facts.append((group, name, _bytes_text(value) if name in IN_BYTES else value))
    rates = run.ceilings.get("rates", {})
    facts += [("limits", f"{dtype}, TFLOPS", significant(rate / 1e12)) for dtype, rate in rates.items()]
    for name in ("read", "copy"):
        if rate := run.ceilings.get(name):
            facts.append(("limits", f"{name}, GB/s", significant(rate / 1e9)))
    rows = [{"of": group, "what": name, "value": value} for group, name, value in facts]
    reading = (
        "What was asked for, the machine, versions, flags, and the limits that it was measured to reach."
    )
    numbers = table(rows, {"of": "of", "what": "what", "value": "value"})
    return Chart(anchor("facts", run.id), "What it was measured on", reading, table=numbers)


def _bytes_text(count: int) -> str:
    """A number of bytes, as `22.8 GiB` or `32 MiB`."""
    if not count:
        return "not known"
    return f"{significant(count / 2**30)} GiB" if count >= 2**30 else f"{significant(count / 2**20)} MiB"


def _conditions(cases: Sequence[MeasuredCase], run: Run) -> Chart | None:
    """A plot for each reading of the monitors, such as a clock, over the cases; None if nothing was read."""
    keys = short_keys(cases) if cases else {}
    values = [
        {"case": keys[case.planned.key], "place": place, "what": name, **reading}
        for place, case in enumerate(cases, 1)
        for conditions in case.done.conditions
        for name, reading in conditions.items()
        if isinstance(reading, dict) and reading.keys() == set(STATISTICS)
    ]
    if not values:
        return None
    order = alt.X("place:O", title="case, in the order of measuring", axis=alt.Axis(labelAngle=0))
    base = alt.Chart().encode(x=order)
    bars = base.mark_rule(strokeWidth=6, opacity=0.35, color=READING_COLOUR, aria=False).encode(
        y=alt.Y("min:Q", title=None, scale=alt.Scale(zero=False)), y2="max:Q"
    )
    dots = base.mark_point(filled=True, size=50, opacity=1, color=READING_COLOUR)
    tooltip = ["what:N", "case:N", *(f"{name}:Q" for name in STATISTICS)]
    layers = alt.layer(bars, dots.encode(y="median:Q", tooltip=tooltip)).properties(width=WIDTH, height=70)
    row = alt.Row("what:N", sort=None, title=None)
    picture = layers.facet(data={"values": values}, row=row, spacing=6).resolve_scale(y="independent")
    columns: Columns = {"case": "case", "what": "what", **{name: (name, four_digits) for name in STATISTICS}}
    return Chart(
        anchor("conditions", run.id), "Clocks, heat, load",
        "What the monitors read during the rounds of each case: the dot is the median, the bar goes from the "
        "smallest to the largest. What they could not read is missing. Left to right is the order of "
        "measuring; records have no times of day. No axis begins at zero.",
        picture, table(values, columns), marks=len(values),
    )  # fmt: skip


def _devices(cases: Sequence[MeasuredCase], run: Run) -> Chart | None:
    """The time of each device compared with the median device; None where nothing was calibrated."""
    calibrations = cases[0].calibrations if cases else ()
    if not calibrations:
        return None
    speeds: list[dict[str, Any]] = []
    times_to_median: dict[tuple[str, str], dict[str, Any]] = {}  # by device and case
    for to_median in (ratio for spread in cases[0].spreads for ratio in spread.to_median):
        times = to_median.comparison
        is_median = times.low == times.high  # the device compared with itself
        text = "the median" if is_median else ratio_text(times)
        times_to_median[to_median.device, to_median.case] = {"ratio": times.ratio, "text": text}
        name, low, high = f"{to_median.device} at {to_median.case}", 1 / times.high, 1 / times.low
        speeds.append({"name": name, "ratio": 1 / times.ratio, "low": low, "high": high,
                       "verdict": verdict(low, high, noise=LAG), "text": text})  # fmt: skip
    tooltip = tooltips(name="device", text="time of the median", verdict="")
    picture = forest(speeds, "speed over the median device's", noise_band(LAG), tooltip=tooltip)
    measured = Counter(case.done.device for case in cases)
    rows = []
    for c in sorted(calibrations, key=lambda c: (c.type, c.case, c.device)):
        ratio = times_to_median.get((c.device, c.case), {"ratio": None, "text": ""})
        rows.append(c.model_dump() | {"cases": measured[c.device]} | ratio)
    _, time_columns = add_times_in_unit(rows)
    columns: Columns = {
        "device": "device", "type": "type", "cases": ("cases", str), "calibrated with": "case",
        "when": "when", **time_columns, "of the median": ("ratio", "text"),
    }  # fmt: skip
    return Chart(
        anchor("devices", run.id), "Devices",
        "Right of 1: faster than the median device of its type, by both passes together. The grey band "
        f"is {LAG:.0%} to either side: a device whose interval reaches into it neither lags nor leads. "
        "The table has the times of each before all other cases (first) and after them (last), and how many "
        "cases it measured.",
        picture if speeds else None, table(rows, columns), marks=len(speeds),
    )  # fmt: skip
