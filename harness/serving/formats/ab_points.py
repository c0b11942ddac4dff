"""Published points before and after a change, anchors and shares of traces, as a reader noted them: a list of
entries with `id`, `src` (where it was published), `hw`, `tool` and `change` in words.

Each side of each point is a run, `aiter-1930:c=4:before`. An entry's words are read where they are clear,
`8xMI300X TP8`, `bs64 in512 out32`, and stay in `extra`; `1k/1k` is 1000 or 1024 tokens, so its lengths stay
open. A statistic that nobody says is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.serving.fields import Fields
from harness.serving.formats.words import gpus_of, parallelism_of
from harness.serving.reading import Document, UnreadableError, objects
from harness.serving.schema import Finding, Metric, Mode, ServingRun, Workload

NAME = "notes.ab_points"
SIDES = ("before", "after")
BODIES = {*SIDES, "points", "shares_pct", "us_per_call"}
SIDE_METRICS: dict[str, tuple[float, dict[str, str]]] = {
    "prefill_s": (1e3, {"name": "prefill", "unit": "ms", "scope": "instance"}),
    "decode_median_ms": (
        1.0,
        {"name": "decode_step", "unit": "ms", "scope": "instance", "statistic": "median"},
    ),
    "total_tok_s": (1.0, {"name": "throughput", "unit": "tok/s", "scope": "instance", "tokens": "total"}),
    "out_tok_s": (1.0, {"name": "throughput", "unit": "tok/s", "scope": "instance", "tokens": "output"}),
}
ANCHOR_METRICS: dict[str, dict[str, str]] = {
    **{
        f"{name}_ms": {"name": name, "unit": "ms", "scope": "request", "statistic": "unknown"}
        for name in ("ttft", "tpot", "itl")
    },
    "out_tok_s_gpu": {"name": "throughput", "unit": "tok/s", "scope": "gpu", "tokens": "output"},
}
LATENCY = re.compile(r"\b(mean|median|p\d+) (TTFT|TPOT|ITL|E2E)\b")
BATCH = re.compile(r"bench_one_batch bs(\d+) (?:in(\d+) out(\d+)|(\d+)/(\d+))")
PARALLEL = re.compile(r"(\w+) (\d+) parallel (\d+)")
ENGINE = re.compile(r"\b(SGLang|vLLM)(?: (\d[\w.]*))?")
LENGTHS = re.compile(r"\b\d+k/\d+k\b")
LIMIT = re.compile(r"\bc(\d+)\b")
PRECISION = re.compile(r"\bFP[48]\b")
MODEL = re.compile(r"\bDeepSeek-\w+")


def recognises(document: Document) -> bool:
    rows = document.kind in ("json", "jsonl") and document.rows()
    return bool(rows) and all(
        isinstance(row, Mapping) and {"id", "src", "hw"} <= set(row) and bool(BODIES & set(row))
        for row in rows
    )


def runs(document: Document) -> list[ServingRun]:
    """Raises UnreadableError where `points` are no objects."""
    return [run for where, entry in objects(document) for run in _entry(where, entry)]


def _entry(where: str, values: Mapping[str, Any]) -> Iterator[ServingRun]:
    name = str(values["id"])
    points = values.get("points")
    if "points" in values and not (
        isinstance(points, list) and points and all(isinstance(p, Mapping) for p in points)
    ):
        raise UnreadableError(f"cannot read {where}: 'points' is to be a list of objects")
    for i, point in enumerate(points or ()):
        limit = point.get("c")
        place = f"c={limit}" if type(limit) is int and 0 < limit < 10**6 else f"points[{i}]"
        anchor = bool(set(ANCHOR_METRICS) & set(point))
        for side in ("",) if anchor else SIDES:
            row, inside = _fields(where, values), Fields(f"{where}: {place}", point)
            inside.findings = row.findings
            metrics = _anchor(inside) if anchor else _latency(inside, row, side)
            limit = inside.count("c")
            inside.taken.update(f"{one}_ms" for one in SIDES if not anchor)
            yield _run(row, ":".join(filter(None, (name, place, side))), side, metrics, limit, inside.rest())
    if set(SIDES) & set(values):
        for side in SIDES:
            row = _fields(where, values)
            if side not in values:
                row.leave_out(side, "is not there")
            row.taken.update(SIDES)
            inside = row.inside(side)
            yield _run(row, f"{name}:{side}", side, _side(inside), None, {})
    if {"shares_pct", "us_per_call"} & set(values):
        row = _fields(where, values)
        yield _run(row, name, "", _trace(row), None, {})


def _fields(where: str, values: Mapping[str, Any]) -> Fields:
    row = Fields(where, values)
    row.taken.add("points")
    return row


def _latency(point: Fields, row: Fields, side: str) -> list[Metric]:
    """A point's time, of which the entry's `tool` says what it is."""
    key = f"{side}_ms"
    said = LATENCY.search(row.kept("tool"))
    if key not in point.values:
        return []
    if not said:
        point.leave_out(key, "is of a latency that `tool` does not name")
        return []
    of = {"name": said[2].lower(), "unit": "ms", "scope": "request", "statistic": said[1]}
    return _one(point, key, 1.0, of)


def _anchor(point: Fields) -> list[Metric]:
    return [one for key, of in ANCHOR_METRICS.items() for one in _one(point, key, 1.0, of)]


def _side(side: Fields) -> list[Metric]:
    return [one for key, (scale, of) in SIDE_METRICS.items() for one in _one(side, key, scale, of)]


def _trace(row: Fields) -> list[Metric]:
    """Shares of a trace's kernel time, and times of one call."""
    shares, calls = row.inside("shares_pct"), row.inside("us_per_call")
    found = [
        one
        for key in shares.values
        for one in _one(shares, key, 1e-2, {"name": f"share of {key}", "unit": "1"})
    ]
    total = sum(one.value for one in found)
    if found and abs(total - 1) > 5e-4 * len(found):
        message = f"{row.where}: the shares add up to {total:.1%}"
        row.findings.append(
            Finding(rule="shares", severity="note", message=message, numbers={"total": total})
        )
    for key in calls.values:
        of = {"name": f"{key} per call", "unit": "ms", "statistic": "unknown"}
        found += _one(calls, key, 1e-3, of)
    of = {"name": "share of dense_gemm", "unit": "1"}
    return [*found, *_one(row, "dense_gemm_share_pct", 1e-2, of)]


def _one(fields: Fields, key: str, scale: float, of: Mapping[str, Any]) -> list[Metric]:
    value = fields.number(key, scale=scale)
    return [] if value is None else [Metric(value=value, **of)]


def _run(
    row: Fields, name: str, side: str, metrics: list[Metric], limit: int | None, rest: dict[str, Any]
) -> ServingRun:
    hw, tool, change, kind = (row.kept(key) for key in ("hw", "tool", "change", "kind"))
    gpus, hardware = gpus_of(hw)
    notes = []
    if not hardware:
        notes.append(f"hw {hw!r} names no GPU")
    if lengths := LENGTHS.search(hw):
        notes.append(f"lengths {lengths[0]} may be of 1000 or of 1024 tokens: left open")
    engine = ENGINE.search(hw)
    precision, model = PRECISION.search(hw), MODEL.search(hw)
    row.text("id")
    return ServingRun(
        id=name,
        client=f"ab_points.{'change' if side else 'trace' if kind.startswith('trace') else 'anchor'}",
        source=row.text("src") or row.where,
        label=": ".join(one for one in (side, change or kind) if one),
        model=model[0] if model else "",
        precision=precision[0].lower() if precision else "",
        hardware=hardware,
        gpus=gpus,
        engine=engine[1].lower() if engine else "sglang" if "sglang" in tool else "",
        version=(engine[2] or "") if engine else "",
        parallelism=parallelism_of(hw),
        mode=_mode(tool),
        workload=_workload(hw, tool, limit),
        metrics=tuple(metrics),
        extra=row.rest() | rest,
        notes=tuple(notes),
        findings=tuple(row.findings),
    )


def _mode(tool: str) -> Mode:
    if "bench_one_batch" in tool:
        return "offline"
    return "online" if tool.startswith("serving") else "unknown"


def _workload(hw: str, tool: str, limit: int | None) -> Workload:
    """`bs64 in512 out32`, `bs4 2048/256`: one batch; `gsm8k 2000 parallel 2000`: so many questions, and so
    many of them at a time."""
    if batch := BATCH.search(tool):
        size, into, out = (int(one) for one in batch.groups() if one)
        return Workload(input_len=into, output_len=out, num_prompts=size, concurrency=size, request_rate=0.0)
    if several := PARALLEL.fullmatch(tool):
        return Workload(dataset=several[1], num_prompts=int(several[2]), concurrency=int(several[3]))
    said = LIMIT.search(hw)
    dataset = tool if tool == "gsm8k" else ""
    return Workload(dataset=dataset, concurrency=limit or (int(said[1]) if said else None))
