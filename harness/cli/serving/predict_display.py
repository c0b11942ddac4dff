"""What `serving predict`, `what-if` and `validate` print: text and JSON."""

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
from harness.serving.ledger import NAME, ledger_lines, read, rows
from harness.serving.link.calibration import TPOT_CONSTANTS, TTFT_CONSTANTS, Normal, Value
from harness.serving.link.model import Link
from harness.serving.link.predictions import SHOWN, Outlook, change_in_per_cent, worth
from harness.serving.link.validation import MODES, QUANTITIES, PredictedServer, Validation

CALIBRATED_ON = dict(zip(MODES, ("no", "on two", "shortest"), strict=True))
"""The name in tables of each way to calibrate: not, on two points, on all points of the shortest lengths."""
NEGLIGIBLE = 0.005  # share of TPOT


def prediction(
    link: Link, outlooks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> RenderableType:
    """What `predict` prints, or `what-if`: with changes what they are worth; always what each op can give,
    and with a target the speedups that reach it. changes: as the user wrote them"""
    system, last, load = link.system, outlooks[-1], outlooks[0].load
    calibration = f"calibrated on {', '.join(system.calibrate)}" if system.calibrate else "not calibrated"
    shortest = f"from {load.range_ratio:g} to 1 times " if load.range_ratio < 1 else ""
    lengths = f"lengths {shortest}{load.isl} in and {load.osl} out"
    if system.drafts:
        unknown = " (not known)" if link.length_deviation else ""
        lengths = f"--drafts {system.drafts}, accept length {load.accept_length:.4g}{unknown}; {lengths}"
    server = f"{link.gpus} x {system.hardware.upper()} with {system.engine}"
    where = f"DeepSeek-R1 FP8 on {server}, {link.structure.parallel.text}, {calibration}; {lengths}"
    parts: list[RenderableType] = [where]
    if last.changes:
        answer = worth(changes, last.changes, last.load.concurrency)
        parts = [answer, where, "", table_of([_changes(outlook) for outlook in outlooks])]
    elif not last.needs:  # `what-if` always has needs
        parts += ["", _outlooks(link, outlooks), *_shares(last)]
    if last.needs and target_ms is not None:
        speedups = [[need.reach for need in outlook.needs] for outlook in outlooks]
        parts.append(f"\nspeedup for a TPOT of {target_ms:g} ms, by concurrency:")
        parts.append(_by_load(outlooks, speedups))
    if last.needs:
        savings = [[f"{-100 * need.share:.1f} %" for need in outlook.needs] for outlook in outlooks]
        parts.append("\nchange of TPOT if an op took no time, by concurrency:")
        parts.append(_by_load(outlooks, savings))
    return Group(*parts, "", printed_notes(_notes(link, last)))


def as_json(
    link: Link, outlooks: Sequence[Outlook], changes: Sequence[str] = (), target_ms: float | None = None
) -> str:
    """The predictions as JSON. changes: as the user wrote them"""
    document = {
        "hardware": link.system.hardware, "engine": link.system.engine,
        "parallel": link.structure.parallel.text, "gpus": link.gpus, "tables": link.structure.source,
        "drafts": link.system.drafts or 0,
        "constants": _constants(link.constants.tpot, TPOT_CONSTANTS)
        | _constants(link.constants.ttft, TTFT_CONSTANTS),
        "calibration": list(link.system.calibrate), "notes": list(link.notes), "what_if": list(changes),
        "target_tpot_ms": target_ms, "workloads": [_workload(outlook) for outlook in outlooks],
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def _workload(outlook: Outlook) -> dict[str, object]:
    served, capacity = outlook.served, outlook.capacity
    return {
        "load": asdict(outlook.load), "tpot": asdict(served.tpot), "ttft": asdict(served.ttft),
        "ttft_mean": asdict(served.ttft_mean), "output": asdict(served.output),
        "batch": served.features.batch, "capacity": None if math.isinf(capacity) else capacity,
        "decode_ms": served.decode_ms, "stall_ms": served.stall_ms, "prefill_ms": served.prefill_ms,
        "shares": [asdict(share) for share in outlook.shares],
        "changes": [change.model_dump() for change in outlook.changes],
        "needs": [asdict(need) for need in outlook.needs],
    }  # fmt: skip


def _constants(constants: Normal, names: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = zip(names, constants.mean, constants.deviation, strict=True)
    return {name: {"value": float(mean), "deviation": float(deviation)} for name, mean, deviation in rows}


def _notes(link: Link, outlook: Outlook) -> Notes:
    constants = ", ".join(
        f"{name} {constant['value']:.2f} (+-{constant['deviation']:.2f})"
        for name, constant in _constants(link.constants.tpot, TPOT_CONSTANTS).items()
    )
    step = "decode step / accept length" if link.system.drafts else "decode step"
    server = "a server that has served before" if link.system.warm else "a server that is cold at first"
    published = _published() if outlook.changes else ""
    assumptions = [line for change in outlook.changes for line in change.assumptions]
    return [
        ("model", f"TPOT = {step} + stall. A decode step is a + k times the sum of its kernels; the stall is "
         f"p times the prefills of other requests, by which those that decode wait. {constants}; a in ms"),
        ("times", f"of kernels: {link.structure.source}"),
        # A place is one of the requests in flight; see `waves` of harness.serving.link.load.Load.
        ("note", f"intervals are of 90 %{published}; mean TTFT is of a run of 10 requests for each place, on "
         f"{server}"),
        *(("note", line) for line in dict.fromkeys((*link.notes, *assumptions))),
    ]  # fmt: skip


def _published() -> str:
    """How many of the published changes lie in the intervals that were predicted for them."""
    lines = [line for row in rows(read(PUBLISHED / "changes" / NAME)) for line in ledger_lines(row)]
    inside = sum(line.verdict == "explained" for line in lines)
    return f", but of {len(lines)} published changes only {inside} lie in theirs"


def _outlooks(link: Link, outlooks: Sequence[Outlook]) -> FittingTable:
    rows: list[dict[str, object]] = []
    for outlook in outlooks:
        served, batch = outlook.served, outlook.served.features.batch
        limited = " (memory)" if batch > 0.999 * outlook.capacity else ""
        rows.append({
            "concurrency": outlook.load.concurrency, "TPOT ms": _value(served.tpot, ".2f"),
            "output tok/s": _value(served.output), "mean TTFT ms": _value(served.ttft_mean),
            "median TTFT ms": _value(served.ttft), "tok/s/GPU": f"{served.output.value / link.gpus:.1f}",
            "batch": f"{batch:.1f}{limited}", "decode step ms": f"{served.decode_ms:.2f}",
            "stall ms": f"{served.stall_ms:.2f}", "prefill ms": f"{served.prefill_ms:.0f}",
        })  # fmt: skip
    return table_of(rows)


def _shares(outlook: Outlook) -> list[RenderableType]:
    shown = [share for share in outlook.shares if abs(share.share) >= NEGLIGIBLE]
    rows = [
        {"kernels": share.name, "share of TPOT": f"{100 * share.share:.1f} %",
         "decode ms": f"{share.decode_ms:.2f}", "stall ms": f"{share.stall_ms:.2f}", "calls": share.calls,
         "time from": share.origin}
        for share in shown
    ]  # fmt: skip
    others = f"all others: {100 - 100 * sum(share.share for share in shown):.1f} %"
    if any(share.share < 0 for share in shown):
        others += "; below 0: by the calibration, a step takes less than its kernels' times add up to"
    return [f"\nat concurrency {outlook.load.concurrency}:", table_of(rows), others]


def _changes(outlook: Outlook) -> dict[str, object]:
    by_name = {change.quantity: change for change in outlook.changes}
    shown = {name: by_name[quantity] for quantity, name in SHOWN.items()}
    row: dict[str, object] = {"concurrency": outlook.load.concurrency}
    row |= {f"{name} change": change_in_per_cent(change) for name, change in shown.items()}
    for name, change in shown.items():
        row[f"{name} {change.unit}"] = f"{change.before:.4g} -> {change.after:.4g}"
    return row


def _by_load(outlooks: Sequence[Outlook], cells: Sequence[Sequence[str]]) -> FittingTable:
    """A row for each op, a column for each load, the last load first. cells: by load, then by op"""
    by_load = dict(zip((str(outlook.load.concurrency) for outlook in outlooks), cells, strict=True))
    rows = []
    for i, need in enumerate(outlooks[-1].needs):
        row: dict[str, object] = {"op": need.name}
        row |= {load: column[i] for load, column in reversed(by_load.items())}
        rows.append(row)
    return table_of(rows)


# Validation


def validation(found: Validation) -> RenderableType:
    """All servers together, then each of them."""
    servers = found.servers
    notes = [
        # `inside` is the number of points in their intervals, of all points; then how wide the intervals are.
        ("a cell", "mean absolute error (bias); inside: points in their 90 % intervals, which are so wide"),
        ("constants", "those of all other machines and engines; what calibrates a server is not predicted; "
         "some kernel times of gfx942 (MI300X, MI325X) were fitted to MI325X's server"),
        *(("not in all", f"{server.name}: {server.left_out}") for server in servers if server.left_out),
        *(("times", f"of kernels: {where}") for where in dict.fromkeys(server.times for server in servers)),
    ]  # fmt: skip
    of_all = [row for drafts in (False, True) for row in _errors(found.together(drafts=drafts))]
    of_servers = [row for server in servers for row in _errors(server)]
    above: list[RenderableType] = [table_of(of_all), ""] if of_all else []
    return Group(*above, table_of(of_servers), "", printed_notes(notes))


def _errors(server: PredictedServer) -> Iterator[dict[str, object]]:
    """A row for each way to calibrate; the first one has the server's name."""
    name = server.name
    for mode in MODES:
        cells: dict[str, str] = {}
        for quantity in QUANTITIES:
            if errors := server.errors(mode, quantity):
                cells[quantity] = f"{100 * errors.mean:.1f} % ({100 * errors.bias:+.0f})"
                inside = f"{errors.covered}/{errors.points}"
                cells[f"{quantity} inside"] = f"{inside}, {100 * errors.width:.0f} %"
        if cells:
            yield {"server": name, "calibrated": CALIBRATED_ON[mode], **cells}
            name = ""


def validation_json(validation: Validation) -> str:
    def errors(server: PredictedServer) -> dict[str, dict[str, object]]:
        """By mode and quantity."""
        tables: dict[str, dict[str, object]] = {mode: {} for mode in MODES}
        for mode, table in tables.items():
            for quantity in QUANTITIES:
                if of_quantity := server.errors(mode, quantity):
                    table[quantity] = asdict(of_quantity)
        return tables

    def constants(names: Sequence[str], normal: Normal) -> dict[str, object]:
        return {"constants": names, "mean": normal.mean.tolist(), "covariance": normal.covariance.tolist()}

    document = {
        "servers": [
            {"server": server.name, "times": server.times, "left_out": server.left_out,
             "errors": errors(server), "points": [asdict(row) for row in server.rows]}
            for server in validation.servers
        ],
        "all": errors(validation.together(drafts=False)),
        "all_with_drafts": errors(validation.together(drafts=True)),
        "prior": {"TPOT": constants(TPOT_CONSTANTS, validation.prior.tpot),
                  "TTFT": constants(TTFT_CONSTANTS, validation.prior.ttft)},
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def _value(value: Value, form: str = ".0f") -> str:
    return ranged(value.value, value.low, value.high, form)
