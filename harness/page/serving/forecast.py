"""Section of a prediction: a step's parts, TPOT, TTFT and throughput, and what changes or a target need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.serving.shared import AFTER, BEFORE, TARGET, WIDTH, digits, op_colours
from harness.page.style import colour_by, tooltips
from harness.report.text import ranged
from harness.serving.ledger import Prediction
from harness.serving.link.calibration import Value
from harness.serving.link.predictions import Need, Share, worth
from harness.serving.schema import LenientRecord

QUANTITIES = (("tpot", "tpot", "TPOT", "ms"), ("ttft_mean", "ttft", "mean TTFT", "ms"),
              ("output", "output_throughput", "output throughput", "tok/s"))  # fmt: skip
"""(key in a Workload, Prediction.quantity, name, unit) of each quantity."""
IN_DECODE, IN_STALL = "decode step", "stall by other requests' prefills"
"""The two parts of the time of a token."""
AS_IT_IS, BEFORE_CHANGES, AFTER_CHANGES = "as it is", "before the changes", "after the changes"


class Offered(LenientRecord):
    isl: int
    osl: int
    concurrency: int


class Workload(LenientRecord):
    load: Offered
    tpot: Value
    ttft_mean: Value
    output: Value
    shares: tuple[Share, ...] = ()
    changes: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()

    def change(self, quantity: str) -> Prediction | None:
        return next((change for change in self.changes if change.quantity == quantity), None)


class Document(LenientRecord):
    """What `serving predict --json` or `what-if --json` writes, as far as the page shows it."""

    hardware: str = ""
    engine: str = ""
    parallel: str = ""
    gpus: int | None = None
    tables: str = ""
    calibration: tuple[str, ...] = ()
    what_if: tuple[str, ...] = ()
    target_tpot_ms: float | None = None
    notes: tuple[str, ...] = ()
    workloads: tuple[Workload, ...] = ()


def forecast_section(document: Mapping[str, Any], title: str) -> PageSection:
    """The section of what `serving predict --json` or `what-if --json` wrote. Raises UsageError."""
    try:
        forecast = Document.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"cannot read {title}: no prediction of serving: {mistake(error)}") from None
    if not forecast.workloads:
        return PageSection(anchor("forecast", title), title, "No load is predicted in this document.")
    charts = [
        *_parts(forecast, title),
        *(_by_concurrency(forecast, title, quantity) for quantity in QUANTITIES),
        *_needs(forecast, title),
    ]
    return PageSection(anchor("forecast", title), title, _headline(forecast), charts, list(_notes(forecast)))


def _headline(forecast: Document) -> str:
    """What the changes are worth at the last concurrency, then TPOT at the first and the last one."""
    where = f"{forecast.gpus or ''} x {forecast.hardware} with {forecast.engine}, {forecast.parallel}"
    first, last = forecast.workloads[0], forecast.workloads[-1]
    tpots = []
    for workload in dict.fromkeys((first, last)):  # one, where both are the same
        tpot = ranged(workload.tpot.value, workload.tpot.low, workload.tpot.high, ".4g")
        tpots.append(f"{tpot} ms at concurrency {workload.load.concurrency}")
    text = f"{where}: TPOT {' and '.join(tpots)}."
    return f"{worth(forecast.what_if, last.changes, last.load.concurrency)}. {text}" if last.changes else text


def _parts(forecast: Document, title: str) -> Iterator[Chart]:
    """The chart of the kernels' parts of TPOT; none where the document has no parts."""
    rows = [
        {"concurrency": workload.load.concurrency, **vars(share)}
        for workload in forecast.workloads
        for share in workload.shares
    ]
    if not rows:
        return
    columns: Columns = {
        "concurrency": ("concurrency", str), "kernel": "name", "time from": "origin", "calls": ("calls", str),
        "decode steps, ms": ("decode_ms", digits(".4f")), "stalls, ms": ("stall_ms", digits(".4f")),
        "share of TPOT": ("share", digits(".2%")),
    }  # fmt: skip
    marks = [
        {"concurrency": row["concurrency"], "kernel": row["name"], "class": row["name"].partition(":")[0],
         "phase": phase, "ms": row[ms], "origin": row["origin"],
         "aria": f"{row['name']}, {phase}, concurrency {row['concurrency']}: {row[ms]:.4g} ms"}
        for row in rows
        for phase, ms in ((IN_DECODE, "decode_ms"), (IN_STALL, "stall_ms"))
        if row[ms]
    ]  # fmt: skip
    yield Chart(
        anchor("forecast", title, "parts"),
        "Where the time of a token goes",
        "A bar is TPOT at one concurrency before any change, and a segment of it one kernel, coloured by "
        "op class. Pale segments are the time in which a decoding request waits for other requests' "
        "prefills.",
        _bars(marks),
        table(rows, columns),
        len(marks),
    )


def _bars(marks: list[dict[str, Any]]) -> alt.TopLevelMixin:
    """A bar for each concurrency, of which each kernel is a segment."""
    classes = op_colours(mark["class"] for mark in marks)
    for mark in marks:
        mark["order"] = classes.domain.index(mark["class"])
        if mark["phase"] == IN_STALL:
            mark["order"] += 1000  # more than there are classes: all stalls follow all decode steps
    tooltip = tooltips(kernel="", **{"class": "op class"}, phase="in", origin="time from")
    class_legend = alt.Legend(title=None, orient="bottom", columns=5, symbolOpacity=1)
    phase_legend = alt.Legend(title=None, orient="top", symbolFillColor="#555555")
    paleness = alt.Scale(domain=[IN_DECODE, IN_STALL], range=[1.0, 0.45])
    bars = alt.Chart({"values": marks}).mark_bar(stroke="#ffffff", strokeWidth=0.5)
    return bars.encode(
        x=alt.X("ms:Q", stack="zero", title="of TPOT, ms", scale=alt.Scale(zero=True)),
        y=alt.Y("concurrency:O", title="concurrency, requests"),
        color=alt.Color("class:N", scale=classes, legend=class_legend),
        opacity=alt.Opacity("phase:N", scale=paleness, legend=phase_legend),
        order="order:Q",
        tooltip=[*tooltip, alt.Tooltip("ms:Q", title="of TPOT, ms", format=".4f")],
        description="aria:N",
    ).properties(width=WIDTH, height=alt.Step(34))


def _by_concurrency(forecast: Document, title: str, quantity: tuple[str, str, str, str]) -> Chart:
    """The chart of an entry of QUANTITIES."""
    key, predicted, name, unit = quantity
    marks: list[dict[str, Any]] = []
    for workload in forecast.workloads:
        now, change = getattr(workload, key), workload.change(predicted)
        sides = [(BEFORE_CHANGES if change else AS_IT_IS, now.value, now.low, now.high)]
        if change and change.before is not None and change.after is not None:
            low, high = (None if end is None else change.before + end for end in (change.low, change.high))
            sides.append((AFTER_CHANGES, change.after, low, high))
        concurrency = workload.load.concurrency
        for side, value, low, high in sides:
            marks.append({
                "concurrency": concurrency, "side": side, "value": value, "low": low, "high": high,
                "text": ranged(value, low, high, ".5g"),
                "aria": f"{name} {side}, concurrency {concurrency}: {value:.4g} {unit}",
            })  # fmt: skip
    marks.sort(key=lambda mark: (mark["side"] == AFTER_CHANGES, mark["concurrency"]))
    columns: Columns = {
        "concurrency": ("concurrency", str), "shown": "side", f"{name}, {unit}": ("value", digits()),
        "low": ("low", digits()), "high": ("high", digits()),
    }  # fmt: skip
    return Chart(
        anchor("forecast", title, name),
        f"{name} by concurrency",
        "A point is the prediction at one concurrency, its line and band are the 90 % interval. After "
        "changes the interval is the value before plus the interval of the change alone.",
        _lines(marks, f"{name}, {unit}", forecast.target_tpot_ms if key == "tpot" else None),
        table(marks, columns),
        len(marks),
    )


def _lines(marks: Sequence[dict[str, Any]], name: str, target: float | None) -> alt.TopLevelMixin:
    """A quantity by concurrency, before and after a change, each with its band, and a line at the target."""
    places = sorted({mark["concurrency"] for mark in marks})
    sides = dict.fromkeys(mark["side"] for mark in marks)
    x = alt.X(
        "concurrency:Q",
        title="concurrency, requests",
        scale=alt.Scale(type="log", base=2, domain=[places[0] / 1.15, places[-1] * 1.15], nice=False),
        axis=alt.Axis(values=places, format="d", grid=False),
    )
    colour = colour_by("side", dict(zip(sides, (BEFORE, AFTER), strict=False)))
    scale = alt.Scale(zero=True)
    base = alt.Chart({"values": list(marks)}).encode(x=x, color=colour)
    ends = base.encode(y=alt.Y("low:Q", title=name, scale=scale), y2="high:Q")
    values = base.encode(y=alt.Y("value:Q", title=name, scale=scale))
    layers = [
        ends.mark_area(opacity=0.18, line=False),
        ends.mark_rule(strokeWidth=2, opacity=0.7),
        values.mark_line(),
        values.mark_point(filled=True, size=70, opacity=1).encode(
            tooltip=tooltips(side="shown", concurrency="concurrency, requests", text=f"{name} (90 %)"),
            description="aria:N",
        ),
    ]
    if target is not None:
        line = alt.Chart({"values": [{"target": target}]})
        layers.append(line.mark_rule(strokeDash=[6, 4], color=TARGET).encode(y="target:Q"))
    return alt.layer(*layers).properties(width=WIDTH, height=300)


def _needs(forecast: Document, title: str) -> Iterator[Chart]:
    """The table of what each op can give; none where the document does not say it."""
    rows = [
        {"concurrency": workload.load.concurrency, "op": need.name, "reach": need.reach, **vars(need)}
        for workload in forecast.workloads
        for need in workload.needs
    ]
    target = forecast.target_tpot_ms
    columns: Columns = {
        "concurrency": ("concurrency", str), "op": "op", "most it can give, ms": ("most_ms", digits()),
        "share of TPOT": ("share", digits(".2%")), "TPOT were it free, ms": ("limit_ms", digits()),
        **({f"speedup for {target:g} ms": "reach"} if target else {}),
    }  # fmt: skip
    if rows:
        yield Chart(
            anchor("forecast", title, "needs"),
            "What each op can give",
            "What TPOT would lose were the op to take no time, for the central case.",
            table=table(rows, columns),
        )


def _notes(forecast: Document) -> Iterator[tuple[str, str]]:
    load, change = forecast.workloads[0].load, forecast.workloads[-1].change("tpot")
    yield "lengths", f"at most {load.isl} tokens in and {load.osl} out"
    yield "times of kernels", forecast.tables
    yield "calibrated on", "; ".join(forecast.calibration) or "nothing: the constants are other servers'"
    for text in dict.fromkeys([*forecast.notes, *(change.assumptions if change else ())]):
        yield "assumption", text
