"""Devices of a run that several measured: what each took for the cases of calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, us_text
from harness.page.measured.forest import forest
from harness.report.text import uncertain_ratio
from harness.results.comparison import LAG, DeviceRatio
from harness.results.schema import Calibration, Run
from harness.statistics.paired import verdict

if TYPE_CHECKING:
    import altair

NUMERIC = ("cases", "time, us", "from, us", "to, us", "of the median")


def device_charts(cases: Sequence[MeasuredCase], run: Run) -> list[Chart]:
    """Empty where one device measured it, or nothing was calibrated."""
    calibrations = cases[0].calibrations if cases else ()
    if not calibrations:
        return []
    ratios = [ratio for spread in cases[0].spreads for ratio in spread.to_median]
    return [
        Chart(
            anchor("devices", run.id),
            "Devices",
            "Right of 1: faster than the median device of its type, by both passes together. The grey band "
            f"is {LAG:.0%} to either side: what reaches into it neither lags nor leads. The table has what "
            "each took before all other cases (first) and after them (last), and how many cases it measured.",
            _picture(ratios) if ratios else None,
            _table(calibrations, ratios, Counter(case.done.device for case in cases)),
            len(ratios),
        )
    ]


def _picture(ratios: Sequence[DeviceRatio]) -> altair.TopLevelMixin:
    import altair as alt

    rows = []
    for ratio in ratios:
        of = ratio.comparison
        low, high = 1 / of.high, 1 / of.low
        rows.append(
            {
                "name": f"{ratio.device} at {ratio.case}",
                "ratio": 1 / of.ratio,
                "low": low,
                "high": high,
                "verdict": verdict(low, high, noise=LAG),
                "text": _text(ratio),
            }
        )
    return forest(
        rows,
        "speed over the median device's",
        alt.Chart({"values": [{"from": 1 / (1 + LAG), "to": 1 + LAG}]})
        .mark_rect(color="#8883")
        .encode(x="from:Q", x2="to:Q"),
        [
            alt.Tooltip("name:N", title="device"),
            alt.Tooltip("text:N", title="time of the median"),
            alt.Tooltip("verdict:N"),
        ],
    )


def _table(calibrations: Sequence[Calibration], ratios: Sequence[DeviceRatio], cases: Counter[str]) -> Table:
    by_place = {(ratio.device, ratio.case): ratio for ratio in ratios}
    rows = []
    for c in sorted(calibrations, key=lambda c: (c.type, c.case, c.device)):
        ratio = by_place.get((c.device, c.case))
        rows.append(
            TableRow(
                [
                    c.device,
                    c.type,
                    TableValue(str(cases[c.device]), cases[c.device]),
                    c.case,
                    c.when,
                    *(TableValue(us_text(us), us) for us in (c.time_us, c.low_us, c.high_us)),
                    TableValue(_text(ratio), ratio.comparison.ratio) if ratio else "",
                ]
            )
        )
    columns = ("device", "type", NUMERIC[0], "calibrated with", "when", *NUMERIC[1:])
    return Table(columns, rows, frozenset(NUMERIC))


def _text(ratio: DeviceRatio) -> str:
    of = ratio.comparison
    if of.low == of.high:
        return "the median"
    return " ".join(uncertain_ratio(of.ratio, of.low, of.high)).rstrip()
