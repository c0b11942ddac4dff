"""Ranking: who takes how long in a case, with intervals, beside the machine's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, interval_ends, unit_of, us_text
from harness.page.style import provider, provider_scale
from harness.report.text import microseconds, significant, uncertain_ratio
from harness.results.schema import Cell, Verdict

if TYPE_CHECKING:
    import altair

READING = (
    "One line an implementation: the dot is its time per call, the bar its interval; further left is faster. "
    "The dashed line is what this machine would need at its measured limits. Whether two rows can be told "
    "apart is in the table's verdict, which is made of paired rounds. checked: right, and not timed here."
)
WIDTH = 640
COLUMNS = (
    "implementation", "status", "time, us", "from, us", "to, us", "vs baseline", "verdict", "TFLOPS", "GB/s",
    "% of limit", "note",
)  # fmt: skip


def ranking(cases: Sequence[MeasuredCase]) -> Chart:
    """Of one case, of one run or of several."""
    first = cases[0]
    rows = [(case, cell) for case in cases for cell in case.cells]
    rows.sort(key=lambda row: (row[1].time_us is None, row[1].time_us or 0, row[0].row_name(row[1])))
    timed = [(case, cell) for case, cell in rows if cell.time_us is not None]
    return Chart(
        anchor("ranking", first.planned.key),
        "Time of a call",
        READING if timed else "Nothing has a time.",
        _picture(rows) if timed else None,
        Table(
            COLUMNS,
            [_row(case, cell) for case, cell in rows],
            frozenset({"time, us", "from, us", "to, us", "TFLOPS", "GB/s", "% of limit", "vs baseline"}),
        ),
        marks=len(timed),
    )


def _picture(rows: Sequence[tuple[MeasuredCase, Cell]]) -> altair.TopLevelMixin:
    import altair as alt

    timed = [(case, cell) for case, cell in rows if cell.time_us is not None]
    failed = [(case, cell) for case, cell in rows if cell.time_us is None and cell.status != "unsupported"]
    size, unit = unit_of(cell.time_us for _, cell in timed if cell.time_us)
    order = [case.row_name(cell) for case, cell in (*timed, *failed)]
    y = alt.Y("name:N", sort=order, title=None)
    x = alt.X(
        "time:Q",
        scale=alt.Scale(type="log", nice=False, padding=24),
        title=f"time per call, {unit} (log scale)",
    )
    base = alt.Chart({"values": [_mark(case, cell, size) for case, cell in timed]})
    scale = provider_scale(provider(cell.name) for _, cell in timed)
    colour = alt.Color("provider:N", scale=scale, legend=None)
    tooltip = [
        alt.Tooltip("name:N", title="implementation"),
        alt.Tooltip("text:N", title="time"),
        alt.Tooltip("ends:N", title="interval"),
        alt.Tooltip("ratio:N", title="vs baseline"),
        alt.Tooltip("verdict:N"),
        alt.Tooltip("share:N", title="% of limit"),
    ]
    layers: list[alt.Chart] = [
        base.mark_rule(strokeWidth=6, opacity=0.35, aria=False).encode(
            y=y, x="low:Q", x2="high:Q", color=colour
        ),
        base.mark_point(filled=True, size=80, opacity=1).encode(
            y=y, x=x, color=colour, tooltip=tooltip, description="text_of_all:N"
        ),
    ]
    limits = {case.label: case.limit_us for case, _ in timed if case.limit_us}
    if limits:
        line = alt.Chart(
            {
                "values": [
                    {
                        "limit": us / size,
                        "what": " ".join(filter(None, ["limit of", label or "this machine"])),
                    }
                    for label, us in limits.items()
                ]
            }
        )
        layers += [
            line.mark_rule(strokeDash=[5, 4], color="#888").encode(x="limit:Q"),
            line.mark_text(align="left", dx=-4, baseline="bottom", fontSize=10).encode(
                x="limit:Q", y=alt.value(-3), text="what:N"
            ),
        ]
    if failed:
        values = [
            {"name": case.row_name(cell), "status": cell.status, "failed": cell.status != "checked"}
            for case, cell in failed
        ]
        red = alt.condition("datum.failed", alt.value("#D55E00"), alt.value("#888888"))
        layers.append(
            alt.Chart({"values": values})
            .mark_text(align="right", fontWeight="bold")
            .encode(y=y, x=alt.value(WIDTH - 4), text="status:N", color=red)
        )
    return alt.layer(*layers).properties(width=WIDTH, height=alt.Step(24))


def _mark(case: MeasuredCase, cell: Cell, size: float) -> dict[str, Any]:
    verdict = case.against_baseline(cell)
    assert cell.time_us
    name, time = case.row_name(cell), microseconds(cell.time_us)
    low, high = interval_ends(cell.time_us, cell.low_us, cell.high_us)
    return {
        "name": name,
        "provider": provider(cell.name),
        "time": cell.time_us / size,
        "low": low / size,
        "high": high / size,
        "text": time,
        "ends": f"{microseconds(cell.low_us)} to {microseconds(cell.high_us)}" if cell.low_us else "none",
        "ratio": ratio_text(verdict) or ("baseline" if cell.name in case.baselines else ""),
        "verdict": verdict.verdict if verdict else "",
        "share": significant(cell.percent_of_ceiling),
        "text_of_all": f"{name}: {time}",
    }


def ratio_text(verdict: Verdict | None) -> str:
    return " ".join(uncertain_ratio(verdict.ratio, verdict.low, verdict.high)).strip() if verdict else ""


def _row(case: MeasuredCase, cell: Cell) -> TableRow:
    verdict = case.against_baseline(cell)
    baseline = cell.name in case.baselines
    return TableRow(
        [
            case.row_name(cell),
            cell.status,
            *(TableValue(us_text(us), us) for us in (cell.time_us, cell.low_us, cell.high_us)),
            TableValue(
                ratio_text(verdict) or "baseline" * baseline,
                verdict.ratio if verdict else 1.0 if baseline else None,
            ),
            verdict.verdict if verdict else "",
            TableValue(significant(cell.tflops), cell.tflops),
            TableValue(significant(cell.gbps), cell.gbps),
            TableValue(significant(cell.percent_of_ceiling), cell.percent_of_ceiling),
            cell.reason,
        ],
        case.row_anchor(cell),
    )
