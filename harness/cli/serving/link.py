"""`python -m harness serving link`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import FAILED, OK, UsageError
from harness.files import write
from harness.serving.ledger.bounds import least_share, most_worth
from harness.serving.ledger.ledger import Opened, Predicted, Setting, append, read
from harness.serving.ledger.prediction import KernelChange, Prediction
from harness.serving.link.changes import parse_change
from harness.serving.link.closed_loop import Workload
from harness.serving.link.inverse import Need, needs
from harness.serving.link.measured_times import own_times
from harness.serving.link.model import Link, link
from harness.serving.link.predictions import Outlook, outlook, predict
from harness.serving.link.report import (
    bounds_text,
    changes_text,
    heading,
    needs_text,
    outlooks,
    remarks,
    series_text,
    shares,
    sources_text,
)
from harness.serving.link.tables import bundled, read_tables
from harness.serving.link.uncertainty import interval
from harness.serving.link.validation import CALIBRATION, HELD, Row, validated
from harness.serving.schema import Workload as Load
from shapes.attention import Parallel

KV = {"bf16": "bfloat16", "fp8": "fp8"}
ALLOWED = 0.08  # mean error of TPOT that a calibrated model may have, in leave-one-out
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
    ledger: str | None,
    row: str,
    json_to: str | None,
) -> int:
    """Prints what is predicted, or writes it as JSON. Exit code 1 where `--validate` finds more than 8 %."""
    changes = [parse_change(text) for text in what_if]
    if ledger and not (changes and row):
        raise UsageError("--ledger needs a --row to be called by, and a --what-if: differences are predicted")
    target = _ms(target_tpot) if target_tpot else None
    bounds = _bounds(observed, changes)
    if bounds and (hardware, engine) not in bundled() and tables is None:
        _out(json_to, {"bounds": bounds}, bounds_text(bounds))
        return OK
    model = link(
        hardware,
        engine,
        parallel=_parallel(tp, ep, dp_attention),
        kv=KV[kv_dtype],
        eager=launch == "eager",
        tables=read_tables(Path(tables)) if tables else None,
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
    if ledger:
        _record(Path(ledger), row, changes, model, loads, predicted)
    wanted = [needs(model, load, target) for load in loads]
    if json_to:
        write(
            json_to, json.dumps(_document(model, looks, predicted, wanted, target, bounds), indent=1) + "\n"
        )
        return OK
    blocks = [heading(model, loads[0]), outlooks(model, looks), shares(looks[-1])]
    if changes:
        blocks += [changes_text(loads, predicted, what_if), sources_text(loads[-1], predicted[-1][0])]
    blocks.append(needs_text(loads, wanted, target))
    if bounds:
        blocks.append(bounds_text(bounds))
    blocks.append(remarks(model, looks[-1], predicted[-1][0] if predicted else None))
    print("\n\n".join(blocks))
    return OK


def _record(
    ledger: Path,
    row: str,
    changes: Sequence[KernelChange],
    model: Link,
    loads: Sequence[Workload],
    predicted: Sequence[Sequence[Prediction]],
) -> None:
    """Writes the predictions down, a row of the ledger for each load."""
    known = {one.row for one in read(ledger)} if ledger.exists() else set()
    names = [row if len(loads) == 1 else f"{row} c={load.concurrency}" for load in loads]
    for name in names:
        if name in known:
            raise UsageError(f"{ledger} has a row {name!r} already; take another --row")
    for name, load, predictions in zip(names, loads, predicted, strict=True):
        workload = Load(input_len=load.isl, output_len=load.osl, concurrency=load.concurrency)
        setting = Setting(
            hardware=model.hardware,
            gpus=model.gpus,
            engine=model.engine,
            model="DeepSeek-R1",
            workload=workload,
            note=model.structure.parallel.text,
        )
        append(ledger, Opened(row=name, changes=tuple(changes), setting=setting))
        for one in predictions:
            append(ledger, Predicted(row=name, prediction=one))


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
        print("\n\n".join(series_text(summary, rows) for summary, rows in found))
    held = [summary for summary, _ in found if summary.use in (CALIBRATION, HELD)]
    return OK if all(summary.mean <= ALLOWED for summary in held) else FAILED


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
