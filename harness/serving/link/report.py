"""Text and JSON of predictions and of the validation of the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType

from harness.paths import PUBLISHED
from harness.report.fitting_table import FittingTable, table_of
from harness.report.notes import Notes, printed_notes
from harness.report.text import ranged
from harness.serving.ledger import NAME, Prediction, Quantities, ledger_lines, read, rows
from harness.serving.link.calibration import OF_TPOT, OF_TTFT, Normal, Value
from harness.serving.link.model import Link
from harness.serving.link.predictions import Outlook
from harness.serving.link.validation import MODES, QUANTITIES, Validated, Validation

CALIBRATED_ON = ("no", "on two", "shortest")  # in the order of MODES
NEGLIGIBLE = 0.005  # share of TPOT
SHOWN: dict[Quantities, str] = {"tpot": "TPOT", "output_throughput": "output", "ttft": "mean TTFT"}
"""The quantities of a prediction that are shown, with their names."""


def prediction(
    link: Link, looks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> RenderableType:
    """What `predict` or `what-if` prints, with the answer first. changes: as the user wrote them"""
    look, load = looks[-1], looks[0].load
    known = f"calibrated on {', '.join(link.system.calibrate)}" if link.system.calibrate else "not calibrated"
    of = f"{link.gpus} x {link.system.hardware.upper()} with {link.system.engine}"
    least = f"from {load.range_ratio:g} to 1 times " if load.range_ratio < 1 else ""
    lengths = f"lengths {least}{load.isl} in and {load.osl} out"
    if drafts := link.system.drafts:
        unknown = " (not known)" if link.unsure else ""
        lengths = f"--drafts {drafts}, accept length {load.accept_length:.4g}{unknown}; {lengths}"
    where = f"DeepSeek-R1 FP8 on {of}, {link.structure.parallel.text}, {known}; {lengths}"
    parts: list[RenderableType] = [where]
    if look.changes:
        answer = worth(changes, look.changes, look.load.concurrency)
        parts = [answer, where, "", table_of([*map(_changes, looks)])]
    elif not look.needs:
        parts += ["", _outlooks(link, looks), *_shares(look)]
    if look.needs and target_ms is not None:
        reach = [[need.reach for need in each.needs] for each in looks]
        parts += [f"\nspeedup for a TPOT of {target_ms:g} ms, by concurrency:", _by_load(looks, reach)]
    if look.needs:
        most = [[f"{-100 * need.share:.1f} %" for need in each.needs] for each in looks]
        parts += ["\nchange of TPOT if an op took no time, by concurrency:", _by_load(looks, most)]
    return Group(*parts, "", printed_notes(_notes(link, look)))


def worth(what_if: Sequence[str], changes: Sequence[Prediction], concurrency: int) -> str:
    """What changes are worth, in a sentence: `mla_decode=2x: TPOT -5.4 % (-6.9 to -4.0), output ...`."""
    by_name = {of.quantity: of for of in changes}
    told = [f"{name} {_change(by_name[quantity])}" for quantity, name in SHOWN.items() if quantity in by_name]
    return f"{', '.join(what_if)}: {', '.join(told)}, at concurrency {concurrency}"


def _change(of: Prediction) -> str:
    """The change in per cent, with its 90 % interval."""
    ends = [None if x is None else 100 * x / (of.before or math.nan) for x in (of.change, of.low, of.high)]
    return ranged(ends[0], ends[1], ends[2], "+.1f", " %")


def as_json(
    link: Link, looks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> str:
    """changes: as the user wrote them"""
    document = {
        "hardware": link.system.hardware, "engine": link.system.engine,
        "parallel": link.structure.parallel.text, "gpus": link.gpus, "tables": link.structure.where,
        "drafts": link.system.drafts or 0,
        "constants": _constants(link.constants.tpot, OF_TPOT) | _constants(link.constants.ttft, OF_TTFT),
        "calibration": list(link.system.calibrate), "notes": list(link.notes), "what_if": list(changes),
        "target_tpot_ms": target_ms, "workloads": [_workload(look) for look in looks],
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def _workload(look: Outlook) -> dict[str, object]:
    served = look.served
    return {
        "load": asdict(look.load),
        **{name: asdict(getattr(served, name)) for name in ("tpot", "ttft", "ttft_mean", "output")},
        "batch": served.features.batch, "capacity": None if math.isinf(look.capacity) else look.capacity,
        **{name: getattr(served, name) for name in ("decode_ms", "stall_ms", "prefill_ms")},
        "shares": [asdict(share) for share in look.shares],
        "changes": [prediction.model_dump() for prediction in look.changes],
        "needs": [asdict(need) for need in look.needs],
    }  # fmt: skip


def _constants(constants: Normal, names: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = zip(names, constants.mean, constants.deviation, strict=True)
    return {name: {"value": float(value), "deviation": float(sd)} for name, value, sd in rows}


def _notes(link: Link, look: Outlook) -> Notes:
    values = _constants(link.constants.tpot, OF_TPOT)
    known = ", ".join(f"{name} {of['value']:.2f} (+-{of['deviation']:.2f})" for name, of in values.items())
    step = "decode step / accept length" if link.system.drafts else "decode step"
    server = "a server that has served before" if link.system.warm else "a server that is cold at first"
    lines = [*link.notes, *(note for of in look.changes for note in of.assumptions)]
    return [
        ("model", f"TPOT = {step} + stall. A decode step is a + k times the sum of its kernels; the stall is "
         f"p times the prefills of other requests, by which those that decode wait. {known}; a in ms"),
        ("times", f"of kernels: {link.structure.where}"),
        ("note", f"intervals are of 90 %{_published() if look.changes else ''}; mean TTFT is of a run of 10 "
         f"requests for each place, on {server}"),
        *(("note", line) for line in dict.fromkeys(lines)),
    ]  # fmt: skip


def _published() -> str:
    """How many of the published changes lie in the intervals that were predicted for them."""
    known = [line for row in rows(read(PUBLISHED / "changes" / NAME)) for line in ledger_lines(row)]
    inside = sum(line.verdict == "explained" for line in known)
    return f", but of {len(known)} published changes only {inside} lie in theirs"


def _outlooks(link: Link, looks: Sequence[Outlook]) -> FittingTable:
    rows = []
    for look in looks:
        served, batch = look.served, look.served.features.batch
        rows.append({
            "concurrency": look.load.concurrency, "TPOT ms": _value(served.tpot, ".2f"),
            "output tok/s": _value(served.output), "mean TTFT ms": _value(served.ttft_mean),
            "median TTFT ms": _value(served.ttft), "tok/s/GPU": f"{served.output.value / link.gpus:.1f}",
            "batch": f"{batch:.1f}" + (" (memory)" if batch > 0.999 * look.capacity else ""),
            "decode step ms": f"{served.decode_ms:.2f}", "stall ms": f"{served.stall_ms:.2f}",
            "prefill ms": f"{served.prefill_ms:.0f}",
        })  # fmt: skip
    return table_of(rows)


def _shares(look: Outlook) -> list[RenderableType]:
    shown = [share for share in look.shares if abs(share.share) >= NEGLIGIBLE]
    rows = [
        {"kernels": s.name, "share of TPOT": f"{100 * s.share:.1f} %", "decode ms": f"{s.decode_ms:.2f}",
         "stall ms": f"{s.stall_ms:.2f}", "calls": s.calls, "time from": s.origin}
        for s in shown
    ]  # fmt: skip
    rest = f"all others: {100 - 100 * sum(share.share for share in shown):.1f} %"
    if any(share.share < 0 for share in shown):
        rest += "; below 0: by the calibration, a step takes less than its kernels' times add up to"
    return [f"\nat concurrency {look.load.concurrency}:", table_of(rows), rest]


def _changes(look: Outlook) -> dict[str, object]:
    of = {of.quantity: of for of in look.changes}
    shown = {name: of[quantity] for quantity, name in SHOWN.items()}
    sides = {f"{name} {of.unit}": f"{of.before:.4g} -> {of.after:.4g}" for name, of in shown.items()}
    changes = {f"{name} change": _change(of) for name, of in shown.items()}
    return {"concurrency": look.load.concurrency, **changes, **sides}


def _by_load(looks: Sequence[Outlook], cells: Sequence[Sequence[str]]) -> FittingTable:
    """A row for each op, a column for each load, the last load first."""
    by_load = {str(look.load.concurrency): each for look, each in zip(looks, cells, strict=True)}
    return table_of([
        {"op": need.name, **{load: each[i] for load, each in reversed(by_load.items())}}
        for i, need in enumerate(looks[-1].needs)
    ])  # fmt: skip


# Validation


def validation(found: Validation) -> RenderableType:
    """All servers together, then each of them."""
    left_out = {server.name: server.left_out for server in found.servers if server.left_out}
    notes = [
        ("a cell", "mean absolute error (bias); inside: points in their 90 % intervals, which are so wide"),
        ("constants", "those of all other machines and engines; what calibrates a server is not predicted; "
         "some kernel times of gfx942 (MI300X, MI325X) were fitted to MI325X's server"),
        *(("not in all", f"{name}: {why}") for name, why in left_out.items()),
        *(("times", f"of kernels: {where}") for where in dict.fromkeys(s.times for s in found.servers)),
    ]  # fmt: skip
    each = table_of([row for server in found.servers for row in _errors(server)])
    every = [row for of in (found.together, found.with_drafts) for row in _errors(of)]
    together: list[RenderableType] = [table_of(every), ""] if every else []
    return Group(*together, each, "", printed_notes(notes))


def _errors(of: Validated) -> Iterator[dict[str, object]]:
    name = of.name
    for mode in MODES:
        if found := [(quantity, each) for quantity in QUANTITIES if (each := of.errors(mode, quantity))]:
            cells: dict[str, str] = {}
            for quantity, e in found:
                cells[quantity] = f"{100 * e.mean:.1f} % ({100 * e.bias:+.0f})"
                cells[f"{quantity} inside"] = f"{e.covered}/{e.points}, {100 * e.width:.0f} %"
            yield {"server": name, "calibrated": dict(zip(MODES, CALIBRATED_ON, strict=True))[mode], **cells}
            name = ""


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
    every = {"all": errors(validation.together), "all_with_drafts": errors(validation.with_drafts)}
    document = {"servers": servers, **every, "prior": prior}
    return json.dumps(document, indent=1) + "\n"


def _value(value: Value, form: str = ".0f") -> str:
    return ranged(value.value, value.low, value.high, form)
