"""Roofline: every time of a run against what its machine reaches, by arithmetic intensity (Williams, Waterman
and Patterson, Communications of the ACM 52(4), 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.catalogue.devices import Ceilings, peaks
from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase
from harness.page.style import provider, provider_scale
from harness.report.text import microseconds, significant
from kernels.platform import Platform


def roofline(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Of cases of one op on one machine; None where nothing has both rates."""
    import altair as alt

    points = [_point(case, cell) for case in cases for cell in case.timed if cell.tflops and cell.gbps]
    if not points:
        return None
    roofs = _roofs(cases[0], [point["intensity"] for point in points])
    scale = provider_scale(point["provider"] for point in points)
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="arithmetic intensity, FLOP per byte")
    y = alt.Y("tflops:Q", scale=alt.Scale(type="log"), title="TFLOPS")
    colour = alt.Color("provider:N", scale=scale, title=None)
    dots = (
        alt.Chart({"values": points})
        .mark_point(filled=True, size=60, opacity=0.8)
        .encode(
            x=x,
            y=y,
            color=colour,
            tooltip=[
                alt.Tooltip("name:N", title="implementation"),
                alt.Tooltip("case:N"),
                alt.Tooltip("text:N", title="time"),
                alt.Tooltip("tflops:Q", title="TFLOPS"),
                alt.Tooltip("gbps:Q", title="GB/s"),
            ],
        )
    )
    layers: list[alt.Chart] = [dots]
    if roofs:
        lines = alt.Chart({"values": roofs})
        dash = alt.StrokeDash("kind:N", title=None)
        layers += [
            lines.mark_line(color="#888", aria=False).encode(x=x, y=y, detail="roof:N", strokeDash=dash),
            lines.mark_text(align="right", baseline="bottom", dy=-3).encode(x=x, y=y, text="end:N"),
        ]
    rows = [
        TableRow(
            [
                point["case"],
                point["name"],
                *(TableValue(significant(point[key]), point[key]) for key in ("intensity", "tflops", "gbps")),
            ]
        )
        for point in points
    ]
    columns = ("case", "implementation", "FLOP per byte", "TFLOPS", "GB/s")
    return Chart(
        anchor("roofline", cases[0].planned.op, cases[0].label),
        "Roofline",
        "Each dot is a time. Under the slope memory bounds, under the flat line of its dtype arithmetic; the "
        "closer to a line, the less is left. A dot above the slope reads from caches.",
        alt.layer(*layers).properties(width=560, height=360),
        Table(columns, rows, frozenset(columns[2:])),
        len(points),
    )


def _point(case: MeasuredCase, cell: Any) -> dict[str, Any]:
    return {
        "name": cell.name,
        "provider": provider(cell.name),
        "case": cell.case,
        "intensity": cell.tflops * 1e3 / cell.gbps,
        "tflops": cell.tflops,
        "gbps": cell.gbps,
        "text": microseconds(cell.time_us),
    }


def _roofs(case: MeasuredCase, intensities: Sequence[float]) -> list[dict[str, Any]]:
    """Corners of the lines that the machine's ceilings make, one line a dtype, over the range of the dots."""
    machine = case.run.provenance.get("machine", {})
    platform = Platform(
        machine.get("platform", ""), machine.get("arch", ""), name=machine.get("device", ""), here=False
    )
    measured, datasheet = Ceilings.recorded(case.run.ceilings or {}), peaks(platform)
    lines = [
        ("measured", dtype, rate, measured) for dtype, rate in (measured.rates if measured else {}).items()
    ]
    if datasheet:
        lines.append(("datasheet", "peak", max(datasheet.rates.values()), datasheet))
    knees = [rate / ceilings.bandwidth for _, _, rate, ceilings in lines if ceilings]
    low, high = min([*intensities, *knees]) / 3, max([*intensities, *knees]) * 3
    return [
        {
            "kind": kind,
            "roof": f"{kind}, {dtype}",
            "end": f"{dtype}" * (intensity == high),
            "intensity": intensity,
            "tflops": min(rate, ceilings.bandwidth * intensity) / 1e12,
        }
        for kind, dtype, rate, ceilings in lines
        if ceilings
        for intensity in (low, rate / ceilings.bandwidth, high)
    ]
