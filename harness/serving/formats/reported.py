"""What clients of serving engines write alike: latency statistics, lists of requests, the load asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.reading import Fields, UnreadableError
from harness.serving.schema import Finding, Metric, Samples, ServingRun

STATISTIC = r"(?P<statistic>mean|median|std|min|max|p\d+(?:\.\d+)?)"
BULK = ("generated_texts", "text_chunks", "start_times", "cached_tokens", "cached_tokens_details")
LONGEST = 64  # entries of a list that stays in `extra`
ENGINES = {"sglang": "sglang", "vllm": "vllm", "lmdeploy": "lmdeploy", "trt": "tensorrt-llm", "tgi": "tgi"}


def latencies(row: Fields, names: Mapping[str, str]) -> list[Metric]:
    """Every `<statistic>_<client's name>_ms` of the row, each of a request.

    names: the client's name of a latency to this schema's
    """
    pattern = re.compile(rf"{STATISTIC}_(?P<name>{'|'.join(map(re.escape, names))})_ms")
    found = []
    for key in row.values:
        match = pattern.fullmatch(key)
        value = row.number(key) if match else None
        if value is not None:
            name, statistic = names[match["name"]], match["statistic"]
            found.append(Metric(name=name, value=value, unit="ms", scope="request", statistic=statistic))
    return found


def instance(row: Fields, key: str, name: str, unit: str, **kind: Any) -> list[Metric]:
    """The number under `key` as a metric of the whole engine: one, or none."""
    value = row.number(key)
    return [] if value is None else [Metric(name=name, value=value, unit=unit, scope="instance", **kind)]


def throughputs(row: Fields, keys: Mapping[str, str]) -> list[Metric]:
    """Those of the row, in tokens per second of the whole engine. keys: to the kind of tokens."""
    pairs = keys.items()
    return [m for key, kind in pairs for m in instance(row, key, "throughput", "tok/s", tokens=kind)]


def requests(row: Fields) -> tuple[Samples, int | None]:
    """What the client kept of each completed request, and how many failed (None: the row has no telling).

    Takes input_lens, output_lens (tokens); ttfts, latencies, itls (s); errors (texts). Both clients write 0
    tokens and 0 s for a request that failed: those are left out of the samples.
    """
    errors = row.take("errors")
    kept: dict[str, Sequence[Any]] = {
        "input_lens": row.numbers("input_lens", least=0, whole=True),
        "output_lens": row.numbers("output_lens", least=0, whole=True),
        "ttfts_ms": row.numbers("ttfts", scale=1e3, least=0),
        "e2es_ms": row.numbers("latencies", scale=1e3, least=0),
        "itls_ms": row.lists("itls", scale=1e3, least=0),
    }
    columns = [column for column in kept.values() if column]
    if isinstance(errors, list):
        columns.append(errors)
    if not columns:
        return Samples(), None
    if len(set(map(len, columns))) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in kept.items() if column)
        message = f"{row.where}: lists of unlike length ({sizes}, errors {len(errors or ())}); left out"
        row.findings.append(Finding(rule="unreadable", severity="wrong", message=message))
        return Samples(), None
    told = kept["output_lens"] or kept["e2es_ms"]
    failed = [bool(errors and errors[i]) or bool(told and not told[i]) for i in range(len(columns[0]))]
    whole = {
        name: tuple(one for one, lost in zip(column, failed, strict=True) if not lost)
        for name, column in kept.items()
        if column
    }
    return Samples(**whole), sum(failed) if told or isinstance(errors, list) else None


def request_rate(row: Fields) -> float | None:
    """Requests per second as asked for; 0: all at once. None where a trace gives the times, or not said."""
    if row.values.get("request_rate") in ("inf", "trace"):
        return 0.0 if row.take("request_rate") == "inf" else None
    return row.number("request_rate", infinite=0.0)


def engine(row: Fields) -> str:
    """The engine that the client's `backend` names; empty where that is a protocol (openai, openai-chat)."""
    return ENGINES.get(str(row.values.get("backend") or row.values.get("endpoint_type")).split("-")[0], "")


def without_bulk(row: Fields) -> tuple[str, ...]:
    """Takes texts and long lists out of the row's rest; a note that names them."""
    bulk = [
        (key, len(value))
        for key, value in row.values.items()
        if key not in row.taken and isinstance(value, list) and (key in BULK or len(value) > LONGEST)
    ]
    row.taken.update(key for key, _ in bulk)
    named = ", ".join(f"{key} ({count} entries)" for key, count in bulk)
    return (f"left out: {named}",) if bulk else ()


def measured(run: ServingRun, row: Fields, wanted: Sequence[str]) -> ServingRun:
    """The run, where it has any number that was measured; UnreadableError names those that are missing.
    Latencies of a run in which no request completed are zeros that nobody measured: left out."""
    if not run.metrics and run.totals.duration_s is None:
        missing = ", ".join(key for key in wanted if key not in row.values) or "all of them unreadable"
        raise UnreadableError(
            f"cannot read {row.where} as {run.client}: no number of a run in it ({missing})"
        )
    if run.totals.completed != 0:
        return run
    kept = tuple(one for one in run.metrics if one.unit != "ms")
    note = "no request completed: latencies, which nobody measured, left out"
    return run.model_copy(update={"metrics": kept, "notes": (*run.notes, note)})
