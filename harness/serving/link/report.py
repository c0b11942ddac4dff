"""Forecasts, bounds and the validation of the model as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from harness.report import text
from harness.serving.ledger.bounds import ChangeBound
from harness.serving.ledger.prediction import Part, Prediction
from harness.serving.link.calibration import ASSUMED_DEVIATION, ROUNDS, has_first_wave
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.forecast import Forecast
from harness.serving.link.inverse import Need
from harness.serving.link.model import Link
from harness.serving.link.predictions import OpenOutlook, Outlook, Value
from harness.serving.link.simulation import MOST_REQUESTS
from harness.serving.link.uncertainty import interval
from harness.serving.link.validation import ValidationRow, ValidationSummary

NEGLIGIBLE = 0.002  # share of TPOT
NAMED_SOURCES = 8
APART = 1.1  # a factor between TPOT in closed form and of requests one by one that is said
SHOWN = ("tpot", "ttft", "output_throughput")


def as_text(
    model: Link,
    forecasts: Sequence[Forecast],
    bounds: Sequence[ChangeBound],
    what_if: Sequence[str],
    target_tpot_ms: float | None,
) -> str:
    """what_if: the changes as they were given"""
    last = forecasts[-1]
    blocks = [heading(model, forecasts[0].load), outlooks(model, forecasts), shares(last.outlook)]
    if what_if:
        blocks += [changes_text(forecasts, what_if), sources_text(last.load, last.predictions[0])]
    blocks.append(needs_text(forecasts, target_tpot_ms))
    if bounds:
        blocks.append(bounds_text(bounds))
    blocks.append(remarks(model, last))
    return "\n\n".join(blocks)


def as_json(
    model: Link,
    forecasts: Sequence[Forecast],
    bounds: Sequence[ChangeBound],
    what_if: Sequence[str],
    target_tpot_ms: float | None,
) -> str:
    """what_if: the changes as they were given"""
    document = _model_json(model) | {
        "what_if": list(what_if),
        "target_tpot_ms": target_tpot_ms,
        "workloads": [_forecast_json(forecast) for forecast in forecasts],
        "bounds": [asdict(bound) for bound in bounds],
    }
    return json.dumps(document, indent=1) + "\n"


def _model_json(model: Link) -> dict[str, object]:
    world = model.world()
    fitted = model.fitted(world)
    constants = model.constants(world, fitted)
    return {
        "hardware": model.hardware,
        "engine": model.engine,
        "parallel": model.structure.parallel.text,
        "gpus": model.gpus,
        "tables": model.structure.where,
        "constants": {name: asdict(Value.of(draws)) for name, draws in constants.items()},
        "settled": fitted.settled,
        "calibration": list(model.calibrated_with),
        "notes": list(model.notes),
    }


def _forecast_json(forecast: Forecast) -> dict[str, object]:
    look = forecast.outlook
    return asdict(look) | {
        "capacity": None if look.capacity == float("inf") else look.capacity,
        "changes": [prediction.model_dump() for prediction in forecast.predictions],
        "needs": [asdict(need) for need in forecast.needs],
    }


def open_json(model: Link, looks: Sequence[OpenOutlook]) -> str:
    return json.dumps(_model_json(model) | {"workloads": [asdict(look) for look in looks]}, indent=1) + "\n"


def bounds_json(bounds: Sequence[ChangeBound]) -> str:
    return json.dumps({"bounds": [asdict(bound) for bound in bounds]}, indent=1) + "\n"


def bounds_text(bounds: Sequence[ChangeBound]) -> str:
    return "\n".join(["bounds, without a model:", *map(_bound, bounds)])


def _bound(bound: ChangeBound) -> str:
    what = f"{bound.op} alone, {bound.factor:g}x as fast,"
    seen = f"{bound.before_ms:g} to {bound.after_ms:g} ms"
    if bound.least_share < 0:
        became = "slower" if bound.after_ms > bound.before_ms else "faster"
        return f"{what} cannot explain {seen}, which is {became}: something else changed too"
    line = f"{what} to explain {seen}: it took at least {bound.least_share:.0%} of the time before"
    return line + ("" if bound.possible_alone else ", which cannot be: something else changed too")


def validation_json(series: Sequence[tuple[ValidationSummary, Sequence[ValidationRow]]]) -> str:
    document = [{**asdict(summary), "rows": [_row_json(row) for row in rows]} for summary, rows in series]
    return json.dumps({"series": document}, indent=1) + "\n"


def _row_json(row: ValidationRow) -> dict[str, object]:
    return {
        "concurrency": row.point.load.concurrency,
        "measured": {k: v for k, v in asdict(row.point).items() if k != "load"},
        "tpot_ms": asdict(row.tpot),
        "ttft_ms": asdict(row.ttft),
        "ttft_mean_ms": asdict(row.ttft_mean),
        "ttft_p99_ms": None if row.ttft_p99 is None else asdict(row.ttft_p99),
        "output_tok_s_gpu": asdict(row.output_tok_s_gpu),
        "error": row.error,
        "covered": row.covered,
    }


def heading(model: Link, load: ClosedLoop) -> str:
    world = model.world()
    fitted = model.fitted(world)
    constants = model.constants(world, fitted)
    kappa, host_ms = constants["kappa"], constants["host_ms"]
    low, high = interval(kappa)
    parallel = model.structure.parallel.text
    lines = [
        f"DeepSeek-R1 FP8 on {model.gpus} x {model.hardware} with {model.engine}, {parallel}; lengths from "
        f"{load.range_ratio:g} to 1 times {load.isl} in and {load.osl} out",
    ]
    if model.calibrated_with:
        lines += [
            f"calibrated: kappa {kappa[0]:.3f} ({low:.3f}..{high:.3f}), {host_ms[0]:.0f} ms of "
            f"host a request; what it leaves: {fitted.scatter:.1%}",
            *(f"  {source}" for source in model.calibrated_with),
        ]
    else:
        deviation = math.hypot(ASSUMED_DEVIATION, fitted.scatter)
        lines.append(f"not calibrated: kappa is assumed {kappa[0]:.2f}, +- {deviation:.0%}")
    if not fitted.settled:
        lines.append(
            f"the fit did not settle in {ROUNDS} rounds: its points contradict one another, or the closed "
            "form (outputs of few tokens); trust no interval"
        )
    return "\n".join(lines)


def outlooks(model: Link, forecasts: Sequence[Forecast]) -> str:
    rows = [
        [
            look.load.concurrency,
            _value(look.tpot),
            _value(look.ttft, ".0f"),
            f"{look.ttft_mean.value:.0f}" if look.load.waves else "",
            _central(look.ttft_p99),
            _value(look.output, ".0f"),
            f"{look.output.value / model.gpus:.1f}",
            f"{look.batch:.1f}" + (" (memory)" if look.batch > 0.999 * look.capacity else ""),
            f"{look.decode_ms:.2f}",
            f"{look.stall_ms:.2f}",
            f"{look.prefill_ms:.0f}",
        ]
        for look in (forecast.outlook for forecast in forecasts)
    ]
    names = ["concurrency", "TPOT ms (90 %)", "TTFT ms (90 %)", "first wave too", "p99",
             "output tok/s (90 %)", "a GPU", "batch", "decode step", "stall", "prefill"]  # fmt: skip
    return _table(rows, names)


def open_text(model: Link, looks: Sequence[OpenOutlook]) -> str:
    rows = [
        [
            f"{look.load.rate:g}",
            _value(look.tpot),
            _value(look.ttft_median, ".0f"),
            _value(look.ttft_mean, ".0f"),
            _value(look.ttft_p99, ".0f"),
            _value(look.output, ".0f"),
            f"{look.output.value / model.gpus:.1f}",
            f"{look.batch:.1f}",
            f"{look.falls_behind:.0%}",
        ]
        for look in looks
    ]
    names = ["requests/s", "TPOT ms (90 %)", "median TTFT ms (90 %)", "mean", "p99", "output tok/s (90 %)",
             "a GPU", "batch", "falls behind"]  # fmt: skip
    load = looks[0].load
    lines = [
        *model.notes,
        f"{load.requests} requests, one by one; gaps between them by a gamma law of shape "
        f"{load.burstiness:g}; at most {min(load.concurrency, model.steps(load).capacity):.0f} at once",
        "falls behind: in so many draws TTFT grows with the run, as more come than are served",
    ]
    remarks = "\n".join(f"- {line}" for line in lines)
    return f"{heading(model, load)}\n\n{_table(rows, names)}\n\n{remarks}"


def shares(look: Outlook) -> str:
    rows = [
        [s.name, s.calls, f"{s.decode_ms:.2f}", f"{s.stall_ms:.2f}", _value(s.share, ".1%"), s.origin]
        for s in look.shares
        if abs(s.share.value) >= NEGLIGIBLE
    ]
    rest = sum(s.share.value for s in look.shares if abs(s.share.value) < NEGLIGIBLE)
    names = ["kernels", "calls", "decode ms", "stall ms", "share of TPOT (90 %)", "time from"]
    table = _table(rows, names)
    text = f"at concurrency {look.load.concurrency}:\n{table}\nall others: {rest:.1%}"
    below = [s.name for s in look.shares if s.share.low < 0 and abs(s.share.value) >= NEGLIGIBLE]
    why = "also has what calibration adds to each step beside kappa; below 0 it takes that off"
    return "\n".join([text, *(f"{name} {why}" for name in below)])


def changes_text(forecasts: Sequence[Forecast], what_if: Sequence[str]) -> str:
    rows = [
        [
            forecast.load.concurrency,
            f"{prediction.quantity} {prediction.unit}",
            f"{prediction.before:.4g}",
            f"{prediction.after:.4g}",
            f"{prediction.change:+.3g} ({prediction.low:+.3g}..{prediction.high:+.3g})",
        ]
        for forecast in forecasts
        for prediction in forecast.predictions
        if prediction.quantity in SHOWN
    ]
    table = _table(rows, ["concurrency", "quantity", "before", "after", "change (90 %)"])
    return f"what if {', '.join(what_if)}:\n{table}"


def sources_text(load: ClosedLoop, prediction: Prediction) -> str:
    parts = _table([_part(p) for p in prediction.parts], ["part of the change of TPOT", "ms (90 %)", "from"])
    sources = _table(
        [_part(p) for p in prediction.uncertainty[:NAMED_SOURCES]], ["uncertain alone", "ms (90 %)", "from"]
    )
    return f"at concurrency {load.concurrency}:\n{parts}\n\n{sources}"


def _part(part: Part) -> list[str]:
    return [part.what, text.interval(part.value, part.low, part.high, "+.3f"), part.origin]


def needs_text(forecasts: Sequence[Forecast], target: float | None) -> str:
    rows = []
    for forecast in forecasts:
        concurrency = forecast.load.concurrency
        for need in forecast.needs:
            name = need.ops[0] if len(need.ops) == 1 else "all of these alike"
            most = f"{need.most_ms:.2f} ({need.share:.1%})"
            rows.append([concurrency, name, most, f"{need.limit_ms:.2f}", *_reach(need, target)])
    names = ["concurrency", "op", "most it can give, ms", "TPOT were it free"]
    return _table(rows, [*names, f"for {target:g} ms"] if target else names)


def _reach(need: Need, target: float | None) -> list[str]:
    if target is None:
        return []
    if need.factor is None:
        return [f"not reachable: even at infinite speed {need.limit_ms:.1f} ms"]
    return ["reached already" if need.factor == 1.0 else f"{need.factor:.3g}x"]


def remarks(model: Link, forecast: Forecast) -> str:
    look = forecast.outlook
    lines = list(forecast.predictions[0].assumptions if forecast.predictions else model.notes)
    if look.batch > 0.999 * look.capacity:
        lines.append(f"the cache holds {look.capacity:.0f} requests of this length; the others wait")
    if look.load.waves:
        is_known = any(map(has_first_wave, (model.like or model).calibration))
        world = model.world()
        draws = model.draws(look.load, world, model.fitted(world))
        cold_ms, cold_prefill = draws.cold
        lines.append(
            "TTFT is of the steady state, as a client's median; its mean also holds the first wave, all of "
            f"whose prompts come at once, {cold_ms[0]:.0f} ms later than their prefills, which take "
            f"{cold_prefill[0]:.1f} times as long "
            f"({'calibrated' if is_known else 'assumed'})"
        )
    one_by_one = look.tpot_one_by_one
    if one_by_one and not 1 / APART < look.tpot.value / one_by_one < APART:
        lines.append(
            f"{look.load.concurrency} requests one by one have a TPOT of {one_by_one:.1f} ms, not "
            f"{look.tpot.value:.1f}: the closed form is of longer outputs, or of fewer requests"
        )
    if look.ttft_p99 is None:
        lines.append(
            f"p99 is of requests one by one, of at most {MOST_REQUESTS} of a run: here it is left out"
        )
    lines.append(f"tables: {model.structure.where}; intervals: {model.world().count} draws, fixed seed")
    return "\n".join(f"- {line}" for line in lines)


def series_text(summary: ValidationSummary, rows: Sequence[ValidationRow]) -> str:
    lines = [
        [
            row.point.load.concurrency,
            f"{row.point.tpot_ms:.2f}",
            _value(row.tpot),
            f"{row.error:+.1%}" + ("" if row.covered else " outside"),
            "" if row.point.ttft_median_ms is None else f"{row.point.ttft_median_ms:.0f}",
            "" if row.point.ttft_median_ms is None else f"{row.ttft.value:.0f}",
            f"{row.point.ttft_ms:.0f}",
            f"{row.ttft_mean.value:.0f}",
            "" if row.point.ttft_p99_ms is None else f"{row.point.ttft_p99_ms:.0f}",
            _central(row.ttft_p99) if row.point.ttft_p99_ms is not None else "",
            f"{row.point.output_tok_s_gpu:.1f}",
            f"{row.output_tok_s_gpu.value:.1f}",
        ]
        for row in rows
    ]
    names = ["concurrency", "TPOT ms", "predicted (90 %)", "error", "median TTFT", "predicted", "mean TTFT",
             "predicted", "p99 TTFT", "predicted", "tok/s a GPU", "predicted"]  # fmt: skip
    how = "each predicted from the others" if summary.calibrates else "nothing was fitted to it"
    return f"{summary.series}: {summary.use}, {how}\n{summary.source}\n{_table(lines, names)}\n" + "\n".join(
        f"{name}: mean error {errors.mean:.1%}, largest {errors.largest:.1%}, bias {errors.bias:+.1%}; "
        f"{errors.covered} of {errors.points} in their 90 % intervals"
        for name, errors in summary.errors.items()
    )


def _value(value: Value, form: str = ".2f") -> str:
    return text.interval(value.value, value.low, value.high, form)


def _central(value: Value | None) -> str:
    return "" if value is None else f"{value.value:.0f}"


def _table(rows: Sequence[Sequence[object]], names: Sequence[str]) -> str:
    return text.table(*text.filled_columns(rows, names))
