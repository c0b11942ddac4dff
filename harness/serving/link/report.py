"""What `serving link` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from harness.serving.ledger.prediction import Part, Prediction
from harness.serving.link.closed_loop import Workload
from harness.serving.link.inverse import Need
from harness.serving.link.model import Link
from harness.serving.link.predictions import Outlook, Value
from harness.serving.link.uncertainty import interval
from harness.serving.link.validation import CALIBRATION, Row, Summary

NEGLIGIBLE = 0.002  # share of TPOT
NAMED_SOURCES = 8
SHOWN = ("tpot", "ttft", "output_throughput")


def bounds_text(bounds: Sequence[dict[str, Any]]) -> str:
    lines = []
    for one in bounds:
        told = f"{one['op']} alone, {one['factor']:g}x faster, to explain {one['before_ms']:g} to "
        told += f"{one['after_ms']:g} ms: it took at least {one['least_share']:.0%} of the time before"
        lines.append(
            told if one["possible_alone"] else told + ", which cannot be: something else changed too"
        )
    return "\n".join(["bounds, without a model:", *lines])


def heading(model: Link, load: Workload) -> str:
    fitted = model.fitted(model.world())
    low, high = interval(fitted.kappa)
    parallel = model.structure.parallel.text
    lines = [
        f"DeepSeek-R1 FP8 on {model.gpus} x {model.hardware} with {model.engine}, {parallel}; lengths from "
        f"{load.range_ratio:g} to 1 times {load.isl} in and {load.osl} out",
    ]
    if model.calibrated_with:
        lines += [
            f"calibrated: kappa {fitted.kappa[0]:.3f} ({low:.3f}..{high:.3f}), {fitted.host_ms[0]:.0f} ms of "
            f"host a request; what it leaves: {fitted.scatter:.1%}",
            *(f"  {source}" for source in model.calibrated_with),
        ]
    else:
        lines.append(f"not calibrated: kappa is assumed {fitted.kappa[0]:.2f}, +- {fitted.scatter:.0%}")
    return "\n".join(lines)


def outlooks(model: Link, looks: Sequence[Outlook]) -> str:
    rows = [
        [
            look.load.concurrency,
            _value(look.tpot),
            _value(look.ttft, 0),
            f"{look.ttft_mean.value:.0f}" if look.load.waves else "",
            _value(look.output, 0),
            f"{look.output.value / model.gpus:.1f}",
            f"{look.batch:.1f}" + (" (memory)" if look.batch > 0.999 * look.capacity else ""),
            f"{look.decode_ms:.2f}",
            f"{look.stall_ms:.2f}",
            f"{look.prefill_ms:.0f}",
        ]
        for look in looks
    ]
    names = ["concurrency", "TPOT ms (90 %)", "TTFT ms (90 %)", "first wave too", "output tok/s (90 %)",
             "a GPU", "batch", "decode step", "stall", "prefill"]  # fmt: skip
    return _table(rows, names)


def shares(look: Outlook) -> str:
    rows = [
        [s.name, s.calls, f"{s.decode_ms:.2f}", f"{s.stall_ms:.2f}", _percent(s.share), s.origin]
        for s in look.shares
        if abs(s.share.value) >= NEGLIGIBLE
    ]
    rest = sum(s.share.value for s in look.shares if abs(s.share.value) < NEGLIGIBLE)
    names = ["kernels", "calls", "decode ms", "stall ms", "share of TPOT (90 %)", "time from"]
    table = _table(rows, names)
    return f"at concurrency {look.load.concurrency}:\n{table}\nall others: {rest:.1%}"


def changes_text(
    loads: Sequence[Workload], predicted: Sequence[Sequence[Prediction]], what_if: Sequence[str]
) -> str:
    rows = []
    for load, records in zip(loads, predicted, strict=True):
        rows += [
            [
                load.concurrency,
                f"{one.quantity} {one.unit}",
                f"{one.before:.4g}",
                f"{one.after:.4g}",
                f"{one.change:+.3g} ({one.low:+.3g}..{one.high:+.3g})",
            ]
            for one in records
            if one.quantity in SHOWN
        ]
    table = _table(rows, ["concurrency", "quantity", "before", "after", "change (90 %)"])
    return f"what if {', '.join(what_if)}:\n{table}"


def sources_text(load: Workload, one: Prediction) -> str:
    parts = _table([_part(p) for p in one.parts], ["part of the change of TPOT", "ms (90 %)", "from"])
    sources = _table(
        [_part(p) for p in one.uncertainty[:NAMED_SOURCES]], ["uncertain alone", "ms (90 %)", "from"]
    )
    return f"at concurrency {load.concurrency}:\n{parts}\n\n{sources}"


def _part(part: Part) -> list[str]:
    return [part.what, f"{part.value:+.3f} ({part.low:+.3f}..{part.high:+.3f})", part.origin]


def needs_text(loads: Sequence[Workload], wanted: Sequence[Sequence[Need]], target: float | None) -> str:
    rows = []
    for load, many in zip(loads, wanted, strict=True):
        for need in many:
            name = need.ops[0] if len(need.ops) == 1 else "all of these alike"
            most = f"{need.most_ms:.2f} ({need.share:.1%})"
            rows.append([load.concurrency, name, most, f"{need.limit_ms:.2f}", *_reach(need, target)])
    names = ["concurrency", "op", "most it can give, ms", "TPOT were it free"]
    return _table(rows, [*names, f"for {target:g} ms"] if target else names)


def _reach(need: Need, target: float | None) -> list[str]:
    if target is None:
        return []
    if need.factor is None:
        return [f"not reachable: even at infinite speed {need.limit_ms:.1f} ms"]
    return ["reached already" if need.factor == 1.0 else f"{need.factor:.3g}x"]


def remarks(model: Link, look: Outlook, one: Prediction | None) -> str:
    lines = list(one.assumptions) if one else list(model.notes)
    if look.batch > 0.999 * look.capacity:
        lines.append(f"the cache holds {look.capacity:.0f} requests of this length; the others wait")
    if look.load.waves:
        lines.append(
            "TTFT is of the steady state; a client's mean also holds its cold first wave, about a second "
            "more in InferenceX's runs, which is not modelled"
        )
    lines.append(f"tables: {model.structure.where}; intervals: {model.world().count} draws, fixed seed")
    return "\n".join(f"- {line}" for line in lines)


def series_text(summary: Summary, rows: Sequence[Row]) -> str:
    lines = [
        [
            row.point.load.concurrency,
            f"{row.point.tpot_ms:.2f}",
            _value(row.tpot),
            f"{row.error:+.1%}" + ("" if row.covered else " outside"),
            f"{row.point.ttft_median_ms or row.point.ttft_ms:.0f}"
            + ("" if row.point.ttft_median_ms else " (mean)"),
            f"{row.ttft_ms if row.point.ttft_median_ms else row.ttft_mean_ms:.0f}",
            f"{row.point.output_tok_s_gpu:.1f}",
            f"{row.output_tok_s_gpu:.1f}",
        ]
        for row in rows
    ]
    names = ["concurrency", "TPOT ms", "predicted (90 %)", "error", "TTFT ms", "predicted", "tok/s a GPU",
             "predicted"]  # fmt: skip
    how = "each predicted from the others" if summary.use == CALIBRATION else "nothing was fitted to it"
    return (
        f"{summary.series}: {summary.use}, {how}\n{summary.source}\n{_table(lines, names)}\n"
        f"mean error {summary.mean:.1%}, largest {summary.largest:.1%}, bias {summary.bias:+.1%}; "
        f"{summary.covered} of {summary.points} in their 90 % intervals"
    )


def _value(value: Value, digits: int = 2) -> str:
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}..{value.high:.{digits}f})"


def _percent(value: Value) -> str:
    return f"{value.value:.1%} ({value.low:.1%}..{value.high:.1%})"


def _table(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> str:
    used = [i for i in range(len(names)) if any(str(row[i]) for row in rows)]
    return tabulate([[row[i] for i in used] for row in rows], [names[i] for i in used], disable_numparse=True)
