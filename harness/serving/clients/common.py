"""Metrics, lists of single requests and the load as several clients' files hold them: metrics under one key
a statistic or in an object each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.clients.files import UnreadableError
from harness.serving.schema import Metric, RequestSamples, Scope, ServingRun, Tokens

STATISTIC = r"mean|median|std|min|max|p\d+(?:\.\d+)?"
MILLISECONDS = {
    "ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3,
}  # fmt: skip
BULK = ("generated_texts", "text_chunks", "start_times", "cached_tokens", "cached_tokens_details")
LONGEST = 64  # entries of a list that stays in `extra`
ENGINES = {
    "sglang": "sglang",
    "lmdeploy": "lmdeploy",
    "trt": "tensorrt-llm",
    "tensorrt": "tensorrt-llm",
    "tgi": "tgi",
}
"""Engines by the client's `backend`. `vllm` names none: it is OpenAI's protocol in every client, and
InferenceX and others give it whatever server answers."""


def of_keys(
    row: Fields, names: Mapping[str, str], *, suffix: str = "_ms", scale: float = 1.0
) -> list[Metric]:
    """Latencies in ms under keys such as `p99_ttft_ms`.

    names: the client's name of each to ours; suffix: what follows it; scale: the unit in ms
    """
    pattern = re.compile(rf"({STATISTIC})_({'|'.join(map(re.escape, names))}){re.escape(suffix)}")
    metrics = []
    for key in row.values:
        if (match := pattern.fullmatch(key)) and (value := row.number(key, scale=scale)) is not None:
            name = names[match[2]]
            metrics.append(Metric(name=name, value=value, unit="ms", scope="request", statistic=match[1]))
    return metrics


def of_object(
    fields: Fields,
    statistics: Mapping[str, str],
    name: str,
    unit: str = "ms",
    *,
    scale: float = 1.0,
    scope: Scope = "request",
    tokens: Tokens = "none",
) -> list[Metric]:
    """The statistics of one metric, each under its own key of an object.

    statistics: the client's key of each to ours; scale: the client's unit in `unit`
    """
    return [
        Metric(name=name, value=value, unit=unit, scope=scope, tokens=tokens, statistic=statistic)
        for key, statistic in statistics.items()
        if (value := fields.number(key, scale=scale)) is not None
    ]


def single(
    fields: Fields,
    key: str,
    name: str,
    unit: str,
    scope: Scope = "instance",
    tokens: Tokens = "none",
    statistic: str = "total",
) -> list[Metric]:
    """The metric under `key`, as a list of one or none."""
    return of_object(fields, {key: statistic}, name, unit, scope=scope, tokens=tokens)


def throughputs(row: Fields, keys: Mapping[str, Tokens]) -> list[Metric]:
    """Those of the row, in tokens per second of the whole engine. keys: to the kind of tokens."""
    pairs = keys.items()
    return [metric for key, kind in pairs for metric in single(row, key, "throughput", "tok/s", tokens=kind)]


def goodput(row: Fields) -> list[Metric]:
    """vLLM's old script, and what began as a copy of it, have a colon in the key."""
    keys = ("request_goodput", "request_goodput:")
    return [metric for key in keys for metric in single(row, key, "goodput", "req/s")]


def peaks(row: Fields) -> list[Metric]:
    """Of single seconds: pieces of streams that came in one, and requests that touched one, which are more
    than were ever in flight at once."""
    return [
        *_largest(row, "max_output_tokens_per_s", "tok/s", "output"),
        *_largest(row, "max_concurrent_requests", "1", "none"),
    ]


def _largest(row: Fields, key: str, unit: str, tokens: Tokens) -> list[Metric]:
    return single(row, key, key, unit, tokens=tokens, statistic="max")


def requests(row: Fields, e2es: str = "latencies") -> tuple[RequestSamples, int | None]:
    """What the client kept of each completed request, and how many failed (None: the row has no telling).

    Takes input_lens, output_lens (tokens); ttfts, itls and, under the key `e2es`, end-to-end times (s);
    errors (texts). The clients write 0 tokens and 0 s for a request that failed: those are left out of the
    samples. start_times (s) and generated_texts stay among what `without_bulk` names.
    """
    errors = _errors(row)
    kept: dict[str, Sequence[Any]] = {
        "input_lens": row.counts("input_lens"),
        "output_lens": row.counts("output_lens"),
        "ttfts_ms": row.numbers("ttfts", scale=1e3, least=0),
        "e2es_ms": row.numbers(e2es, scale=1e3, least=0),
        "itls_ms": row.lists("itls", scale=1e3, least=0),
    }
    columns = [column for column in kept.values() if column]
    if errors is not None:
        columns.append(errors)
    if not columns:
        return RequestSamples(), None
    if len(set(map(len, columns))) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in kept.items() if column)
        row.leave_out(
            "ttfts", f"and the like are lists of unlike length ({sizes}, errors {len(errors or ())})"
        )
        return RequestSamples(), None
    answered = kept["output_lens"] or kept["e2es_ms"]
    failed = [
        bool(errors and errors[i]) or bool(answered and not answered[i]) for i in range(len(columns[0]))
    ]
    beside = {"starts_s": _starts(row), "texts": _texts(row)}
    kept |= {name: column for name, column in beside.items() if len(column) == len(failed)}
    whole = {
        name: tuple(value for value, has_failed in zip(column, failed, strict=True) if not has_failed)
        for name, column in kept.items()
        if column
    }
    return RequestSamples(**whole), sum(failed) if answered or errors is not None else None


def _starts(row: Fields) -> tuple[float, ...]:
    return Fields(row.where, row.values).numbers(
        "start_times"
    )  # of its own: the row's keep theirs in the rest


def _texts(row: Fields) -> tuple[str, ...]:
    texts = row.values.get("generated_texts")
    return tuple(texts) if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else ()


def _errors(row: Fields) -> list[Any] | None:
    errors = row.take("errors")
    if errors is not None and not isinstance(errors, list):
        row.leave_out("errors", "is not a list")
        return None
    return errors


def mean_of_range(longest: float | None, ratio: float | None) -> float | None:
    """Mean of whole lengths uniform from `ratio` times the longest (at least 1) to the longest, as SGLang's
    client draws them. None where either is not said, or the ratio is over 1."""
    if longest is None or ratio is None or ratio > 1:
        return None
    return (max(int(longest * ratio), 1) + longest) / 2


def request_rate(row: Fields) -> float | None:
    """Requests per second as asked for; 0: all at once. None where a trace gives the times, or not said."""
    return None if row.values.get("request_rate") == "trace" else row.number("request_rate", infinite=0.0)


def ramp_up(row: Fields) -> str:
    """How the request rate grows, as `ramp_up_strategy` and its ends have it; empty where it does not."""
    strategy = row.text("ramp_up_strategy")
    begin, end = (row.number(f"ramp_up_{name}_rps") for name in ("start", "end"))
    return f"{strategy} from {begin:g} to {end:g} requests a second" if begin and end else strategy


def protocol(row: Fields) -> str:
    return str(row.values.get("backend") or row.values.get("endpoint_type") or "")


def engine(spoken: str) -> str:
    """The engine that a protocol names; empty where all engines speak it."""
    return ENGINES.get(spoken.split("-")[0], "")


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
    kept = tuple(metric for metric in run.metrics if metric.unit != "ms")
    note = "no request completed: latencies, which nobody measured, left out"
    return run.model_copy(update={"metrics": kept, "notes": (*run.notes, note)})
