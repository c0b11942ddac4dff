"""Section of a forecast: a step's parts, TPOT, TTFT and throughput, and what a change or a target needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.forecast_charts import (
    SweepPoint,
    answer,
    needs,
    op_name,
    part_marks,
    parts,
    sweep,
)
from harness.page.serving.forecast_document import ForecastDocument, ForecastWorkload, parse_forecast
from harness.page.serving.marks import cell, ranged

QUANTITIES = (("tpot", "tpot", "TPOT", "ms"), ("ttft_mean", "ttft", "mean TTFT", "ms"),
              ("output", "output_throughput", "output throughput", "tok/s"))  # fmt: skip
"""Of each: its key in a workload, that of its prediction, its name, its unit."""
NOW, BEFORE, AFTER = "as it is", "before the changes", "after the changes"


def forecast_section(document: Mapping[str, Any], title: str) -> PageSection:
    """document: as `serving link --json` writes it. Raises UsageError where it is none."""
    forecast = parse_forecast(document, title)
    charts: list[Chart] = []
    if forecast.workloads:
        charts = [*_parts(forecast, title), *_sweeps(forecast, title), *_needs(forecast, title)]
    return PageSection(
        anchor=anchor("forecast", title),
        title=title,
        headline=_headline(forecast),
        charts=charts,
        notes=list(_notes(forecast)),
    )


def _headline(forecast: ForecastDocument) -> str:
    if not forecast.workloads:
        return "No workload is forecast in this document."
    where = f"{forecast.gpus or ''} x {forecast.hardware} with {forecast.engine}, {forecast.parallel}"
    first, last = forecast.workloads[0], forecast.workloads[-1]
    ends = [first] if first is last else [first, last]
    tpots = " and ".join(
        f"{ranged(w.tpot.value, w.tpot.low, w.tpot.high, '.4g')} ms at concurrency {w.load.concurrency}"
        for w in ends
    )
    text = f"{where}: TPOT {tpots}."
    change = next((p for p in last.changes if p.quantity == "tpot"), None)
    if change is not None:
        changes = ", ".join(forecast.what_if) or "The changes"
        text += (
            f" {changes}: {ranged(change.change, change.low, change.high)} ms of TPOT at "
            f"concurrency {last.load.concurrency}."
        )
    return text


def _parts(forecast: ForecastDocument, title: str) -> Iterator[Chart]:
    workloads = [workload for workload in forecast.workloads if workload.shares]
    if not workloads:
        return
    numeric = ["concurrency", "calls", "decode steps, ms", "stalls, ms", "share of TPOT", "low", "high"]
    columns = ["concurrency", "kernel", "op class", "time from", *numeric[1:]]
    rows = [
        TableRow(
            [
                cell(workload.load.concurrency, "d"),
                term.name,
                term.op_class,
                term.origin,
                cell(term.calls, "d"),
                cell(term.decode_ms, ".4f"),
                cell(term.stall_ms, ".4f"),
                *(cell(share, ".2%") for share in (term.share.value, term.share.low, term.share.high)),
            ]
        )
        for workload in workloads
        for term in workload.shares
    ]
    yield Chart(
        anchor=anchor("forecast", title, "parts"),
        title="Where the time of a token goes",
        reading=(
            "A bar is TPOT at one concurrency before any change, and a segment of it one kernel, coloured by "
            "op class. Pale segments are the time in which a decoding request waits for other requests' "
            "prefills. All time shown is exposed: what hides behind other work adds nothing to TPOT."
        ),
        picture=parts(workloads),
        table=Table(columns, rows, frozenset(numeric)),
        marks=sum(1 for _ in part_marks(workloads)),
    )


def _sweeps(forecast: ForecastDocument, title: str) -> Iterator[Chart]:
    for key, quantity, name, unit in QUANTITIES:
        points = [p for workload in forecast.workloads for p in _points(workload, key, quantity)]
        points.sort(key=lambda point: (point.side == AFTER, point.concurrency))
        target = forecast.target_tpot_ms if key == "tpot" else None
        changed = any(point.side == AFTER for point in points)
        change = (
            " After the changes the band is the 90 % interval of the change alone, put upon the value before."
            if changed
            else ""
        )
        yield Chart(
            anchor=anchor("forecast", title, name),
            title=f"{name} by concurrency",
            reading=(
                "A point is the forecast at one concurrency, its line and band the 90 % interval."
                f"{change} The axis of concurrency doubles at equal distances."
            ),
            picture=sweep(points, name, unit, target),
            table=_sweep_table(forecast, points, quantity, name, unit),
            marks=len(points),
        )


def _points(workload: ForecastWorkload, key: str, quantity: str) -> Iterator[SweepPoint]:
    value = getattr(workload, key)
    change = next((p for p in workload.changes if p.quantity == quantity), None)
    concurrency = workload.load.concurrency
    side = BEFORE if change else NOW
    yield SweepPoint(concurrency, side, value.value, value.low, value.high, "the value")
    if change is None or change.before is None or change.after is None:
        return
    low, high = (None if end is None else change.before + end for end in (change.low, change.high))
    yield SweepPoint(concurrency, AFTER, change.after, low, high, "the change, upon the value before")


def _sweep_table(
    forecast: ForecastDocument, points: list[SweepPoint], quantity: str, name: str, unit: str
) -> Table:
    by_load = {w.load.concurrency: w for w in forecast.workloads}
    columns = [
        "concurrency",
        "shown",
        f"{name}, {unit}",
        "low",
        "high",
        "change",
        "change low",
        "change high",
    ]
    rows = []
    for point in points:
        change = None
        if point.side == AFTER:
            changes = by_load[point.concurrency].changes
            change = next(p for p in changes if p.quantity == quantity)
        of_change = (None,) * 3 if change is None else (change.change, change.low, change.high)
        rows.append(
            TableRow(
                [
                    cell(point.concurrency, "d"),
                    point.side,
                    *(cell(value) for value in (point.value, point.low, point.high)),
                    *(cell(value, "+.5g") for value in of_change),
                ]
            )
        )
    return Table(columns, rows, frozenset(columns) - {""})


def _needs(forecast: ForecastDocument, title: str) -> Iterator[Chart]:
    workloads = [workload for workload in forecast.workloads if workload.needs]
    if not workloads:
        return
    target = forecast.target_tpot_ms
    numeric = ["concurrency", "TPOT, ms", "TPOT were it free, ms", "most it can give, ms", "share of TPOT"]
    asked = [] if target is None else [f"speedup for {target:g} ms"]
    rows = [
        TableRow(
            [
                cell(workload.load.concurrency, "d"),
                op_name(need),
                *(cell(value) for value in (workload.tpot.value, need.limit_ms, need.most_ms)),
                cell(need.share, ".2%"),
                *([answer(need, target)] if asked else []),
            ]
        )
        for workload in workloads
        for need in workload.needs
    ]
    to_target = (
        ""
        if target is None
        else f" The dashed line is the target of {target:g} ms; to the right stands the speedup of the op "
        "alone that reaches it."
    )
    yield Chart(
        anchor=anchor("forecast", title, "needs"),
        title="What each op can give" if target is None else "What the target needs",
        reading=(
            "From TPOT as it is (the grey tick) to TPOT were the op to take no time (the diamond), for the "
            f"central case.{to_target}"
        ),
        picture=needs(workloads, target),
        table=Table(["concurrency", "op", *numeric[1:], *asked], rows, frozenset(numeric)),
        marks=2 * len(rows),
    )


def _notes(forecast: ForecastDocument) -> Iterator[tuple[str, str]]:
    if not forecast.workloads:
        return
    load = forecast.workloads[0].load
    yield "lengths", f"at most {load.isl} tokens in and {load.osl} out"
    if forecast.tables:
        yield "times of kernels", forecast.tables
    if (kappa := forecast.constants.kappa) is not None:
        how = "; ".join(forecast.calibration) or "not calibrated: assumed"
        yield "kappa", f"{ranged(kappa.value, kappa.low, kappa.high, '.3f')}, {how}"
    last = forecast.workloads[-1]
    change = next((p for p in last.changes if p.quantity == "tpot"), None)
    if change is not None:
        for part in change.parts:
            value = ranged(part.value, part.low, part.high)
            yield f"part of the change at {last.load.concurrency}", f"{part.what}: {value} ms ({part.origin})"
    for text in dict.fromkeys([*forecast.notes, *(change.assumptions if change else ())]):
        yield "assumption", text
