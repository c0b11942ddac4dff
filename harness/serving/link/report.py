"""Predictions and the validation of the model as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from harness.report import text
from harness.serving.link.calibration import OF_TPOT, OF_TTFT, Normal, Value
from harness.serving.link.model import Link
from harness.serving.link.predictions import Outlook
from harness.serving.link.validation import MODES, QUANTITIES, Errors, Validated, Validation

NEGLIGIBLE = 0.005  # share of TPOT
SHOWN = ("tpot", "ttft", "output_throughput")


def prediction_text(
    link: Link, looks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> str:
    """The tables that `predict` prints, or, where the outlooks have needs, those of `what-if`.

    changes: as the user wrote them
    """
    look, blocks = looks[-1], [_heading(link, looks[0])]
    if not look.needs:
        blocks += [_outlooks(link, looks), _shares(look)]
    if look.changes:
        blocks.append(f"what if {', '.join(changes)}:\n{_changes(looks)}")
    if look.needs:
        blocks.append(_needs(looks, target_ms))
    server = "a server that has served before" if link.system.warm else "a server that is cold at first"
    lines = [
        *(look.changes[0].assumptions if look.changes else link.notes),
        f"mean TTFT is over a run of 10 requests for each place, on {server}",
        f"times of kernels: {link.structure.where}",
    ]
    return "\n\n".join([*blocks, "\n".join(f"- {line}" for line in lines)])


def as_json(
    link: Link, looks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> str:
    """changes: as the user wrote them"""
    document = {
        "hardware": link.system.hardware,
        "engine": link.system.engine,
        "parallel": link.structure.parallel.text,
        "gpus": link.gpus,
        "tables": link.structure.where,
        "constants": _constants(link.constants.tpot, OF_TPOT) | _constants(link.constants.ttft, OF_TTFT),
        "calibration": list(link.system.calibrate),
        "notes": list(link.notes),
        "what_if": list(changes),
        "target_tpot_ms": target_ms,
        "workloads": [_workload(look) for look in looks],
    }
    return json.dumps(document, indent=1) + "\n"


def _workload(look: Outlook) -> dict[str, object]:
    served = look.served
    return {
        "load": asdict(look.load),
        **{name: asdict(getattr(served, name)) for name in ("tpot", "ttft", "ttft_mean", "output")},
        "batch": served.features.batch,
        "capacity": None if math.isinf(look.capacity) else look.capacity,
        **{name: getattr(served, name) for name in ("decode_ms", "stall_ms", "prefill_ms")},
        "shares": [asdict(share) for share in look.shares],
        "changes": [prediction.model_dump() for prediction in look.changes],
        "needs": [asdict(need) for need in look.needs],
    }


def _constants(constants: Normal, names: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = zip(names, constants.mean, constants.deviation, strict=True)
    return {name: {"value": float(value), "deviation": float(sd)} for name, value, sd in rows}


def _heading(link: Link, look: Outlook) -> str:
    load = look.load
    of_tpot = _constants(link.constants.tpot, OF_TPOT)
    values = ", ".join(f"{n} {each['value']:.2f} (+-{each['deviation']:.2f})" for n, each in of_tpot.items())
    known = f"calibrated on {', '.join(link.system.calibrate)}" if link.system.calibrate else "not calibrated"
    of = f"{link.gpus} x {link.system.hardware} with {link.system.engine}, {link.structure.parallel.text}"
    lengths = f"lengths from {load.range_ratio:g} to 1 times {load.isl} in and {load.osl} out"
    return f"""\
DeepSeek-R1 FP8 on {of}; {lengths}
TPOT = a + k * decode + p * stall, {known}: {values}
  a: ms of a step beside its kernels; k: time of its kernels in the server over their sum;
  p: the same of the prefills of other requests, which stall those that decode"""


def _outlooks(link: Link, looks: Sequence[Outlook]) -> str:
    rows = []
    for look in looks:
        served, batch = look.served, look.served.features.batch
        milliseconds = [_value(served.tpot), _value(served.ttft, ".0f"), _value(served.ttft_mean, ".0f")]
        output = [_value(served.output, ".0f"), f"{served.output.value / link.gpus:.1f}"]
        place = f"{batch:.1f}" + (" (memory)" if batch > 0.999 * look.capacity else "")
        parts = [f"{served.decode_ms:.2f}", f"{served.stall_ms:.2f}", f"{served.prefill_ms:.0f}"]
        rows.append([look.load.concurrency, *milliseconds, *output, place, *parts])
    names = ["concurrency", "TPOT ms (90 %)", "median TTFT ms (90 %)", "mean TTFT ms (90 %)",
             "output tok/s (90 %)", "a GPU", "batch", "decode step", "stall", "prefill"]  # fmt: skip
    return _table(rows, names)


def _shares(look: Outlook) -> str:
    shown = [share for share in look.shares if share.share >= NEGLIGIBLE]
    rows = [
        [s.name, s.calls, f"{s.decode_ms:.2f}", f"{s.stall_ms:.2f}", f"{s.share:.1%}", s.origin]
        for s in shown
    ]
    names = ["kernels", "calls", "decode ms", "stall ms", "share of TPOT", "time from"]
    rest = 1 - sum(share.share for share in shown)
    return f"at concurrency {look.load.concurrency}:\n{_table(rows, names)}\nall others: {rest:.1%}"


def _changes(looks: Sequence[Outlook]) -> str:
    rows = []
    for look in looks:
        for of in look.changes:
            if of.quantity in SHOWN:
                change = f"{of.change:+.3g} ({of.low:+.3g}..{of.high:+.3g})"
                values = [f"{of.before:.4g}", f"{of.after:.4g}", change]
                rows.append([look.load.concurrency, f"{of.quantity} {of.unit}", *values])
    return _table(rows, ["concurrency", "quantity", "before", "after", "change (90 %)"])


def _needs(looks: Sequence[Outlook], target: float | None) -> str:
    rows = []
    for look in looks:
        for need in look.needs:
            worth = [f"{need.most_ms:.2f} ({need.share:.1%})", f"{need.limit_ms:.2f}"]
            rows.append([look.load.concurrency, need.name, *worth, *([need.reach] if target else [])])
    names = ["concurrency", "op", "most it can give, ms", "TPOT were it free"]
    return _table(rows, [*names, f"for {target:g} ms"] if target else names)


# Validation


def validation_text(validation: Validation) -> str:
    rows = []
    for server in (*validation.servers, validation.together):
        for mode in MODES:
            found = [server.errors(mode, quantity) for quantity in QUANTITIES]
            if any(found):
                rows.append([server.name, mode, *(cell for each in found for cell in _cells(each))])
    names = ["server", "constants"]
    for quantity in QUANTITIES:
        names += [quantity, "inside", "width"]
    left_out = {server.name: server.left_out for server in validation.servers if server.left_out}
    lines = [
        "each server is predicted with constants learnt from all other machines and engines",
        "points that a server is calibrated on are not predicted",
        "mean absolute error (bias), points inside their 90 % interval, width of the interval over the value",
        *(f"not in `all`: {name}: {why}" for name, why in left_out.items()),
        *dict.fromkeys(f"times of kernels: {server.times}" for server in validation.servers),
    ]
    return "\n".join([_table(rows, names), "", *(f"- {line}" for line in lines)])


def _cells(of: Errors | None) -> list[str]:
    if of is None:
        return ["", "", ""]
    return [f"{of.mean:.1%} ({of.bias:+.1%})", f"{of.covered} of {of.points}", f"{of.width:.0%}"]


def validation_json(validation: Validation) -> str:
    def errors(of: Validated) -> dict[str, object]:
        return {mode: {q: asdict(e) for q in QUANTITIES if (e := of.errors(mode, q))} for mode in MODES}

    def constants(names: Sequence[str], of: Normal) -> dict[str, object]:
        return {"constants": names, "mean": of.mean.tolist(), "covariance": of.covariance.tolist()}

    servers = []
    for server in validation.servers:
        about = {"server": server.name, "times": server.times, "left_out": server.left_out}
        servers.append(about | {"errors": errors(server), "points": [asdict(row) for row in server.rows]})
    prior = {
        "TPOT": constants(OF_TPOT, validation.prior.tpot),
        "TTFT": constants(OF_TTFT, validation.prior.ttft),
    }
    document = {"servers": servers, "all": errors(validation.together), "prior": prior}
    return json.dumps(document, indent=1) + "\n"


def _value(value: Value, form: str = ".2f") -> str:
    return text.interval(value.value, value.low, value.high, form)


def _table(rows: Sequence[Sequence[object]], names: Sequence[str]) -> str:
    return text.table(*text.filled_columns(rows, names))
