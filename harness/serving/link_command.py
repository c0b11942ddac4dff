"""`python -m harness serving link`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from harness.errors import FAILED, OK, UsageError
from harness.serving.link.bounds import least_share, most_worth
from harness.serving.link.changes import parse_change
from harness.serving.link.closure import Workload
from harness.serving.link.inverse import Need, needs
from harness.serving.link.model import Link, link
from harness.serving.link.own import own_times
from harness.serving.link.predictions import Outlook, Value, outlook, predict
from harness.serving.link.tables import bundled, read_tables
from harness.serving.link.uncertainty import interval
from harness.serving.link.validation import CALIBRATION, HELD, Row, Summary, validated
from harness.serving.prediction import KernelChange, Part, Prediction
from harness.writing import write
from shapes.attention import Parallel

KV = {"bf16": "bfloat16", "fp8": "fp8"}
ALLOWED = 0.08  # mean error of TPOT that a calibrated model may have, in leave-one-out
NEGLIGIBLE = 0.002
NAMED_SOURCES = 8
_MS = re.compile(r"([0-9]*\.?[0-9]+)(ms|s|us)?")
_OBSERVED = re.compile(r"(.+?)\.\.(.+)")


def show(
    *,
    hardware: str,
    engine: str,
    tp: int,
    ep: int,
    dp_attention: bool,
    isl: int,
    osl: int,
    concurrency: str,
    range_ratio: float,
    prefill_tokens: int,
    waves: int,
    tables: str | None,
    runs: Sequence[str],
    trace: str | None,
    kv_dtype: str,
    launch: str,
    what_if: Sequence[str],
    target_tpot: str | None,
    observed: str | None,
    validate: bool,
    json_to: str | None,
) -> int:
    """Prints what is predicted, or writes it as JSON. Exit code 1 where `--validate` finds more than 8 %."""
    changes = [parse_change(text) for text in what_if]
    target = _ms(target_tpot) if target_tpot else None
    bounds = _bounds(observed, changes)
    if bounds and (hardware, engine) not in bundled() and tables is None:
        _out(json_to, {"bounds": bounds}, _bounds_text(bounds))
        return OK
    model = link(
        hardware,
        engine,
        parallel=_parallel(tp, ep, dp_attention),
        kv=KV[kv_dtype],
        eager=launch == "eager",
        tables=read_tables(_folder(tables)) if tables else None,
        exposure=_exposure(trace),
        own=own_times(runs) if runs else None,
    )
    if validate:
        return _validate(model, json_to)
    loads = [
        Workload(isl, osl, c, range_ratio=range_ratio, prefill_tokens=prefill_tokens, waves=waves)
        for c in _counts(concurrency)
    ]
    looks = [outlook(model, load) for load in loads]
    predicted = [predict(model, load, changes) for load in loads] if changes else []
    wanted = [needs(model, load, target) for load in loads]
    if json_to:
        write(
            json_to, json.dumps(_document(model, looks, predicted, wanted, target, bounds), indent=1) + "\n"
        )
        return OK
    blocks = [_heading(model, loads[0]), _outlooks(model, looks), _shares(looks[-1])]
    if changes:
        blocks += [_changes(loads, predicted, what_if), _sources(loads[-1], predicted[-1][0])]
    blocks.append(_needs(loads, wanted, target))
    if bounds:
        blocks.append(_bounds_text(bounds))
    blocks.append(_remarks(model, looks[-1], predicted[-1][0] if predicted else None))
    print("\n\n".join(blocks))
    return OK


def _parallel(tp: int, ep: int, dp_attention: bool) -> Parallel:
    try:
        return Parallel(tp=1, dp=tp, ep=ep) if dp_attention else Parallel(tp=tp, ep=ep)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _counts(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"cannot read --concurrency {text!r}; write 16 or 4,8,16") from None
    return found


def _ms(text: str) -> float:
    found = _MS.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"cannot read time {text!r}; write 20ms")
    return float(found[1]) * {"s": 1e3, "us": 1e-3}.get(found[2] or "ms", 1.0)


def _folder(text: str):
    from pathlib import Path

    return Path(text)


def _exposure(trace: str | None) -> dict[tuple[str, str], float] | None:
    if trace is None:
        return None
    try:
        from harness.serving.trace import decompose
    except ImportError:
        raise UsageError("--trace needs harness/serving/trace, which is not in this checkout") from None
    found = decompose(trace)
    phases = {name: found.exposure(name) for name in ("decode", "prefill")}
    if not phases["decode"]:
        raise UsageError(f"no decode step was found in {trace}: its exposure cannot be used")
    return {(name, op): w for name, ws in phases.items() for op, w in (ws or phases["decode"]).items()}


def _bounds(observed: str | None, changes: Sequence[KernelChange]) -> list[dict[str, Any]]:
    """Of each change alone, from a time before and one after."""
    if observed is None:
        return []
    found = _OBSERVED.fullmatch(observed.replace(" ", ""))
    if not found:
        raise UsageError(f"cannot read --observed {observed!r}; write BEFORE..AFTER: 53.19ms..28.37ms")
    before, after = _ms(found[1]), _ms(found[2])
    factors = [change for change in changes if change.factor]
    if not factors:
        raise UsageError("--observed needs a factor to be held against: --what-if OP=FACTORx")
    shares = [(change, least_share(before, after, change.factor or 1.0)) for change in factors]
    return [
        {
            "op": change.op,
            "factor": change.factor,
            "before_ms": before,
            "after_ms": after,
            "least_share": share,
            "possible_alone": 0 <= share <= 1,
            "most_worth": most_worth(share) if 0 <= share < 1 else None,
        }
        for change, share in shares
    ]


def _bounds_text(bounds: Sequence[dict[str, Any]]) -> str:
    lines = []
    for one in bounds:
        told = f"{one['op']} alone, {one['factor']:g}x faster, to explain {one['before_ms']:g} to "
        told += f"{one['after_ms']:g} ms: it took at least {one['least_share']:.0%} of the time before"
        lines.append(
            told if one["possible_alone"] else told + ", which cannot be: something else changed too"
        )
    return "\n".join(["bounds, without a model:", *lines])


def _heading(model: Link, load: Workload) -> str:
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


def _outlooks(model: Link, looks: Sequence[Outlook]) -> str:
    rows = [
        [
            look.load.concurrency,
            _value(look.tpot),
            f"{look.ttft.value:.0f}",
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
    names = ["concurrency", "TPOT ms (90 %)", "TTFT ms", "first wave too", "output tok/s (90 %)", "a GPU",
             "batch", "decode step", "stall", "prefill"]  # fmt: skip
    return _table(rows, names)


def _shares(look: Outlook) -> str:
    rows = [
        [s.name, s.calls, f"{s.decode_ms:.2f}", f"{s.stall_ms:.2f}", _percent(s.share), s.origin]
        for s in look.shares
        if abs(s.share.value) >= NEGLIGIBLE
    ]
    rest = sum(s.share.value for s in look.shares if abs(s.share.value) < NEGLIGIBLE)
    names = ["kernels", "calls", "decode ms", "stall ms", "share of TPOT (90 %)", "time from"]
    table = _table(rows, names)
    return f"at concurrency {look.load.concurrency}:\n{table}\nall others: {rest:.1%}"


def _changes(
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
        ]
    table = _table(rows, ["concurrency", "quantity", "before", "after", "change (90 %)"])
    return f"what if {', '.join(what_if)}:\n{table}"


def _sources(load: Workload, one: Prediction) -> str:
    parts = _table([_part(p) for p in one.parts], ["part of the change of TPOT", "ms (90 %)", "from"])
    sources = _table(
        [_part(p) for p in one.uncertainty[:NAMED_SOURCES]], ["uncertain alone", "ms (90 %)", "from"]
    )
    return f"at concurrency {load.concurrency}:\n{parts}\n\n{sources}"


def _part(part: Part) -> list[str]:
    return [part.what, f"{part.value:+.3f} ({part.low:+.3f}..{part.high:+.3f})", part.origin]


def _needs(loads: Sequence[Workload], wanted: Sequence[Sequence[Need]], target: float | None) -> str:
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


def _remarks(model: Link, look: Outlook, one: Prediction | None) -> str:
    lines = list(one.assumptions) if one else list(model.notes)
    if look.batch > 0.999 * look.capacity:
        lines.append(f"the cache holds {look.capacity:.0f} requests of this length; the others wait")
    lines.append(f"tables: {model.structure.where}; intervals: {model.world().count} draws, fixed seed")
    return "\n".join(f"- {line}" for line in lines)


def _validate(model: Link, json_to: str | None) -> int:
    found = validated(model)
    if not found:
        raise UsageError(
            f"nothing was measured of {model.hardware} with {model.engine} to hold the model against"
        )
    if json_to:
        document = [{**asdict(summary), "rows": [_row_json(row) for row in rows]} for summary, rows in found]
        write(json_to, json.dumps({"series": document}, indent=1) + "\n")
    else:
        print("\n\n".join(_series(summary, rows) for summary, rows in found))
    held = [summary for summary, _ in found if summary.use in (CALIBRATION, HELD)]
    return OK if all(summary.mean <= ALLOWED for summary in held) else FAILED


def _series(summary: Summary, rows: Sequence[Row]) -> str:
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


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "concurrency": row.point.load.concurrency,
        "measured": {k: v for k, v in asdict(row.point).items() if k != "load"},
        "tpot_ms": asdict(row.tpot),
        "ttft_ms": row.ttft_ms,
        "ttft_mean_ms": row.ttft_mean_ms,
        "output_tok_s_gpu": row.output_tok_s_gpu,
        "error": row.error,
        "covered": row.covered,
    }


def _document(
    model: Link,
    looks: Sequence[Outlook],
    predicted: Sequence[Sequence[Prediction]],
    wanted: Sequence[Sequence[Need]],
    target: float | None,
    bounds: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    fitted = model.fitted(model.world())
    low, high = interval(fitted.kappa)
    rows = []
    for i, look in enumerate(looks):
        row = asdict(look)
        row["capacity"] = None if look.capacity == float("inf") else look.capacity
        row["changes"] = [one.model_dump() for one in predicted[i]] if predicted else []
        row["needs"] = [asdict(need) for need in wanted[i]]
        rows.append(row)
    return {
        "hardware": model.hardware,
        "engine": model.engine,
        "parallel": model.structure.parallel.text,
        "gpus": model.gpus,
        "tables": model.structure.where,
        "kappa": {"value": float(fitted.kappa[0]), "low": low, "high": high},
        "host_ms": float(fitted.host_ms[0]),
        "calibration": list(model.calibrated_with),
        "target_tpot_ms": target,
        "notes": list(model.notes),
        "workloads": rows,
        "bounds": list(bounds),
    }


def _out(json_to: str | None, document: dict[str, Any], text: str) -> None:
    if json_to:
        write(json_to, json.dumps(document, indent=1) + "\n")
    else:
        print(text)


def _value(value: Value, digits: int = 2) -> str:
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}..{value.high:.{digits}f})"


def _percent(value: Value) -> str:
    return f"{value.value:.1%} ({value.low:.1%}..{value.high:.1%})"


def _table(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> str:
    used = [i for i in range(len(names)) if any(str(row[i]) for row in rows)]
    return tabulate([[row[i] for i in used] for row in rows], [names[i] for i in used], disable_numparse=True)
