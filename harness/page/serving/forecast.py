"""Section of a prediction: a step's parts, TPOT, TTFT and throughput, and what changes or a target need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import UsageError, mistake
from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.marks import AFTER, BEFORE, TARGET, WIDTH, cell, op_colours, records
from harness.report.text import ranged
from harness.serving.ledger import Prediction
from harness.serving.link.calibration import Value
from harness.serving.link.predictions import Need, Share
from harness.serving.link.report import worth

if TYPE_CHECKING:
    import altair

QUANTITIES = (("tpot", "tpot", "TPOT", "ms"), ("ttft_mean", "ttft", "mean TTFT", "ms"),
              ("output", "output_throughput", "output throughput", "tok/s"))  # fmt: skip
"""Of each: its key in a workload, that of its prediction, its name, its unit."""
IN_DECODE, IN_STALL = "decode step", "stall by other requests' prefills"


class Record(BaseModel):
    """A part of the document, as far as a page shows it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Offered(Record):
    isl: int
    osl: int
    concurrency: int


class Workload(Record):
    load: Offered
    tpot: Value
    ttft_mean: Value
    output: Value
    shares: tuple[Share, ...] = ()
    changes: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()

    def change(self, quantity: str) -> Prediction | None:
        return next((each for each in self.changes if each.quantity == quantity), None)


class Document(Record):
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
    """document: as `serving predict` or `what-if` writes it with --json; UsageError where it is none."""
    try:
        forecast = Document.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"cannot read {title}: no prediction of serving: {mistake(error)}") from None
    if not forecast.workloads:
        return PageSection(anchor("forecast", title), title, "No load is predicted in this document.")
    charts = [
        *_parts(forecast, title),
        *(_sweep(forecast, title, *each) for each in QUANTITIES),
        *_needs(forecast, title),
    ]
    return PageSection(anchor("forecast", title), title, _headline(forecast), charts, list(_notes(forecast)))


def _headline(forecast: Document) -> str:
    where = f"{forecast.gpus or ''} x {forecast.hardware} with {forecast.engine}, {forecast.parallel}"
    ends = dict.fromkeys((forecast.workloads[0], forecast.workloads[-1]))
    tpots = " and ".join(
        f"{ranged(each.tpot.value, each.tpot.low, each.tpot.high, '.4g')} ms at concurrency "
        f"{each.load.concurrency}"
        for each in ends
    )
    text, last = f"{where}: TPOT {tpots}.", forecast.workloads[-1]
    return f"{worth(forecast.what_if, last.changes, last.load.concurrency)}. {text}" if last.changes else text


def _parts(forecast: Document, title: str) -> Iterator[Chart]:
    terms = [(each.load.concurrency, term) for each in forecast.workloads for term in each.shares]
    if not terms:
        return
    numeric = ["concurrency", "calls", "decode steps, ms", "stalls, ms", "share of TPOT"]
    rows = [
        TableRow(
            [
                cell(concurrency, "d"),
                term.name,
                term.origin,
                cell(term.calls, "d"),
                cell(term.decode_ms, ".4f"),
                cell(term.stall_ms, ".4f"),
                cell(term.share, ".2%"),
            ]
        )
        for concurrency, term in terms
    ]
    marks = [
        {
            "concurrency": concurrency,
            "kernel": term.name,
            "class": term.name.partition(":")[0],
            "phase": phase,
            "ms": ms,
            "origin": term.origin,
            "aria": f"{term.name}, {phase}, concurrency {concurrency}: {ms:.4g} ms",
        }
        for concurrency, term in terms
        for phase, ms in ((IN_DECODE, term.decode_ms), (IN_STALL, term.stall_ms))
        if ms
    ]
    yield Chart(
        anchor=anchor("forecast", title, "parts"),
        title="Where the time of a token goes",
        reading=(
            "A bar is TPOT at one concurrency before any change, and a segment of it one kernel, coloured by "
            "op class. Pale segments are the time in which a decoding request waits for other requests' "
            "prefills."
        ),
        picture=_bars(marks),
        table=Table(["concurrency", "kernel", "time from", *numeric[1:]], rows, frozenset(numeric)),
        marks=len(marks),
    )


def _bars(marks: list[dict[str, Any]]) -> altair.TopLevelMixin:
    """A bar for each concurrency, of which each kernel is a segment."""
    import altair as alt

    classes = op_colours([str(mark["class"]) for mark in marks])
    for mark in marks:
        mark["order"] = classes[0].index(mark["class"]) + (1000 if mark["phase"] == IN_STALL else 0)
    names = (("kernel:N", "kernel"), ("class:N", "op class"), ("phase:N", "in"), ("origin:N", "time from"))
    tooltip = [alt.Tooltip(field, title=name) for field, name in names]
    return (
        alt.Chart(records(marks))
        .mark_bar(stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("ms:Q", stack="zero", axis=alt.Axis(title="of TPOT, ms"), scale=alt.Scale(zero=True)),
            y=alt.Y("concurrency:O", axis=alt.Axis(title="concurrency, requests")),
            color=alt.Color(
                "class:N",
                scale=alt.Scale(domain=classes[0], range=classes[1]),
                legend=alt.Legend(title=None, orient="bottom", columns=5, symbolOpacity=1),
            ),
            opacity=alt.Opacity(
                "phase:N",
                scale=alt.Scale(domain=[IN_DECODE, IN_STALL], range=[1.0, 0.45]),
                legend=alt.Legend(title=None, orient="top", symbolFillColor="#555555"),
            ),
            order=alt.Order("order:Q"),
            tooltip=[*tooltip, alt.Tooltip("ms:Q", title="of TPOT, ms", format=".4f")],
            description=alt.Description("aria:N"),
        )
        .properties(width=WIDTH, height=alt.Step(34))
    )


def _sweep(forecast: Document, title: str, key: str, quantity: str, name: str, unit: str) -> Chart:
    marks: list[dict[str, Any]] = []
    for workload in forecast.workloads:
        value, change = getattr(workload, key), workload.change(quantity)
        sides = [("before the changes" if change else "as it is", value.value, value.low, value.high)]
        if change and change.before is not None and change.after is not None:
            low, high = (None if end is None else change.before + end for end in (change.low, change.high))
            sides.append(("after the changes", change.after, low, high))
        concurrency = workload.load.concurrency
        for side, middle, low, high in sides:
            text, aria = ranged(middle, low, high, ".5g"), f"{name} {side}, concurrency {concurrency}"
            about = {"concurrency": concurrency, "side": side, "value": middle, "low": low, "high": high}
            marks.append(about | {"text": text, "aria": f"{aria}: {middle:.4g} {unit}"})
    marks.sort(key=lambda mark: (mark["side"] == "after the changes", mark["concurrency"]))
    columns = ["concurrency", "shown", f"{name}, {unit}", "low", "high"]
    ends = ("value", "low", "high")
    rows = [
        TableRow([cell(mark["concurrency"], "d"), mark["side"], *(cell(mark[end]) for end in ends)])
        for mark in marks
    ]
    return Chart(
        anchor=anchor("forecast", title, name),
        title=f"{name} by concurrency",
        reading=(
            "A point is the prediction at one concurrency, its line and band the 90 % interval; after "
            "changes that of the change alone, put upon the value before."
        ),
        picture=_lines(marks, f"{name}, {unit}", forecast.target_tpot_ms if key == "tpot" else None),
        table=Table(columns, rows, frozenset(columns) - {"shown"}),
        marks=len(marks),
    )


def _lines(marks: Sequence[dict[str, Any]], name: str, target: float | None) -> altair.TopLevelMixin:
    """A quantity against the concurrency, before and after a change, each with its band. target: a line."""
    import altair as alt

    places = sorted({mark["concurrency"] for mark in marks})
    sides = list(dict.fromkeys(mark["side"] for mark in marks))
    x = alt.X(
        "concurrency:Q",
        scale=alt.Scale(type="log", base=2, domain=[places[0] / 1.15, places[-1] * 1.15], nice=False),
        axis=alt.Axis(title="concurrency, requests", values=places, format="d", grid=False),
    )
    colour = alt.Color(
        "side:N",
        scale=alt.Scale(domain=sides, range=[BEFORE, AFTER][: len(sides)]),
        legend=alt.Legend(title=None, orient="top", symbolOpacity=1),
    )
    axis, scale = alt.Axis(title=name), alt.Scale(zero=True)
    names = (("side:N", "shown"), ("concurrency:Q", "concurrency, requests"), ("text:N", f"{name} (90 %)"))
    base = alt.Chart(records(marks)).encode(x=x, color=colour)
    ends = base.encode(y=alt.Y("low:Q", axis=axis, scale=scale), y2="high:Q")
    values = base.encode(y=alt.Y("value:Q", axis=axis, scale=scale))
    layers: list[Any] = [
        ends.mark_area(opacity=0.18, line=False),
        ends.mark_rule(strokeWidth=2, opacity=0.7),
        values.mark_line(),
        values.mark_point(filled=True, size=70, opacity=1).encode(
            tooltip=[alt.Tooltip(field, title=title) for field, title in names],
            description=alt.Description("aria:N"),
        ),
    ]
    if target is not None:
        line = alt.Chart(records([{"target": target}]))
        layers.append(line.mark_rule(strokeDash=[6, 4], color=TARGET).encode(y="target:Q"))
    return alt.layer(*layers).properties(width=WIDTH, height=300)


def _needs(forecast: Document, title: str) -> Iterator[Chart]:
    asked = [f"speedup for {target:g} ms"] if (target := forecast.target_tpot_ms) else []
    numeric = ["concurrency", "most it can give, ms", "share of TPOT", "TPOT were it free, ms"]
    rows = [
        TableRow(
            [
                cell(workload.load.concurrency, "d"),
                need.name,
                cell(need.most_ms),
                cell(need.share, ".2%"),
                cell(need.limit_ms),
                *([need.reach] if asked else []),
            ]
        )
        for workload in forecast.workloads
        for need in workload.needs
    ]
    if rows:
        yield Chart(
            anchor=anchor("forecast", title, "needs"),
            title="What each op can give",
            reading="What TPOT would lose were the op to take no time, for the central case.",
            table=Table(["concurrency", "op", *numeric[1:], *asked], rows, frozenset(numeric)),
        )


def _notes(forecast: Document) -> Iterator[tuple[str, str]]:
    load, change = forecast.workloads[0].load, forecast.workloads[-1].change("tpot")
    yield "lengths", f"at most {load.isl} tokens in and {load.osl} out"
    yield "times of kernels", forecast.tables
    yield "calibrated on", "; ".join(forecast.calibration) or "nothing: the constants are other servers'"
    for text in dict.fromkeys([*forecast.notes, *(change.assumptions if change else ())]):
        yield "assumption", text
