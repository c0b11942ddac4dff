"""One reader for the files of all serving clients: a client's format is a table of its keys.

A table says by which keys a file is recognised, and where each metric, count and setting stands (`a.b` is key
b of the object under a). What no table says stands in the format's one `odd` function, which completes a
`Draft`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, UnreadableError, objects
from harness.serving.schema import (
    Metric,
    OfferedLoad,
    Parallelism,
    RequestSamples,
    Scope,
    ServingRun,
    Severity,
    Tokens,
    Totals,
)

STATISTIC = r"mean|median|std|min|max|p\d+(?:\.\d+)?"
MILLISECONDS = {
    "ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3,
}  # fmt: skip
UNITS: Mapping[str, Mapping[str, float]] = {
    "tok/s": dict.fromkeys(("tokens/sec", "tokens/sec/user", "tokens/s", "tok/s", "token/s"), 1.0),
    "req/s": dict.fromkeys(("requests/sec", "requests/s", "req/s"), 1.0),
    "tokens": {"tokens": 1.0},
    "1": {"requests": 1.0, "count": 1.0},
    "ms": MILLISECONDS,
    "s": {unit: scale / 1e3 for unit, scale in MILLISECONDS.items()},
}
"""The clients' spellings of each unit, as a multiple of it."""

BULK = ("generated_texts", "text_chunks", "start_times", "cached_tokens", "cached_tokens_details")
LONGEST = 64  # entries of a list that stays in `extra`
ENGINES = {
    "sglang": "sglang", "lmdeploy": "lmdeploy", "trt": "tensorrt-llm", "tensorrt": "tensorrt-llm",
    "tgi": "tgi",
}  # fmt: skip
"""Engines by the client's `backend`. `vllm` names none: it is OpenAI's protocol in every client, and
InferenceX and others give it whatever server answers."""


class Rule(Protocol):
    """How metrics are read from a row."""

    def read(self, row: Fields) -> list[Metric]: ...


@dataclass(frozen=True)
class One:
    """The metric under one key. scale: of the client's unit in `unit`."""

    path: str
    name: str
    unit: str
    tokens: Tokens = "none"
    statistic: str = "total"
    scope: Scope = "instance"
    scale: float = 1.0

    def read(self, row: Fields) -> list[Metric]:
        fields, key = row.at(self.path)
        return several(fields, {key: self.statistic}, self, self.scale)


@dataclass(frozen=True)
class Several:
    """The statistics of one metric in one object.

    statistics: the client's key of each to ours; None: every key that is named as ours are
    unit_inside: the client's unit stands in the object, under `unit`
    lone:       the statistic of an object that has one alone, whatever its key
    """

    path: str
    name: str
    unit: str = "ms"
    tokens: Tokens = "none"
    scope: Scope = "request"
    scale: float = 1.0
    statistics: Mapping[str, str] | None = None
    unit_inside: bool = False
    lone: str = ""

    def read(self, row: Fields) -> list[Metric]:
        fields, key = row.at(self.path)
        fields = fields.inside(key)
        scale = scale_inside(fields, self.unit) if self.unit_inside else self.scale
        if not fields.values or scale is None:
            return []
        own = {key: key for key in fields.values if re.fullmatch(STATISTIC, key)}
        metrics = several(fields, own if self.statistics is None else self.statistics, self, scale)
        if self.lone and len(metrics) == 1:
            return [metrics[0].model_copy(update={"statistic": self.lone})]
        return metrics


@dataclass(frozen=True)
class Latencies:
    """Latencies under keys such as `p99_ttft_ms`. names: the client's name of each to ours. InferenceX's copy
    of vLLM's client writes them in seconds, under keys without `_ms`."""

    names: Mapping[str, str]

    def read(self, row: Fields) -> list[Metric]:
        return self._under(row, "_ms", 1.0) or self.seconds(row)

    def seconds(self, row: Fields) -> list[Metric]:
        return self._under(row, "", 1e3)

    def _under(self, row: Fields, suffix: str, scale: float) -> list[Metric]:
        pattern = re.compile(rf"({STATISTIC})_({'|'.join(map(re.escape, self.names))}){suffix}")
        metrics = []
        for key in row.values:
            if match := pattern.fullmatch(key):
                metrics += One(key, self.names[match[2]], "ms", "none", match[1], "request", scale).read(row)
        return metrics


def several(
    fields: Fields, statistics: Mapping[str, str], of: One | Several, scale: float = 1.0
) -> list[Metric]:
    return [
        Metric(name=of.name, value=value, unit=of.unit, scope=of.scope, tokens=of.tokens, statistic=statistic)
        for key, statistic in statistics.items()
        if (value := fields.number(key, scale=scale)) is not None
    ]


def scale_inside(fields: Fields, unit: str) -> float | None:
    """Of the unit that stands in the object, to ours; None with a finding where it is another."""
    if not fields.values:
        return None
    given = fields.text("unit")
    if given not in UNITS[unit]:
        fields.leave_out("unit", f"is {given!r}, not one of {', '.join(UNITS[unit])}; its values")
    return UNITS[unit].get(given)


def keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


def rates(scope: Scope = "instance", **kinds: Tokens) -> tuple[One, ...]:
    """Throughputs in tok/s, each key with the kind of its tokens."""
    return tuple(One(key, "throughput", "tok/s", kind, scope=scope) for key, kind in kinds.items())


REQUESTS = One("request_throughput", "request_throughput", "req/s")
GOODPUT = tuple(One(key, "goodput", "req/s") for key in ("request_goodput", "request_goodput:"))
"""vLLM's old script, and what began as a copy of it, have a colon in the key."""

PEAKS = (
    One("max_output_tokens_per_s", "max_output_tokens_per_s", "tok/s", "output", "max"),
    One("max_concurrent_requests", "max_concurrent_requests", "1", statistic="max"),
)
"""Of single seconds: pieces of streams that came in one, and requests that touched one, which are more than
were ever in flight at once."""

ACCEPTED = One("accept_length", "accept_length", "1", statistic="mean")
SERVED = ("duration", "completed", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")
COUNTS = {
    "duration_s": "duration", "completed": "completed", "failed": "failed",
    "input_tokens": "total_input_tokens", "output_tokens": "total_output_tokens",
}  # fmt: skip
LOAD = {"concurrency": "max_concurrency", "request_rate": "request_rate", "num_prompts": "num_prompts"}
BURSTS = {"burstiness": "burstiness", "ramp_up": "ramp_up_strategy"}
AT_ONCE = {"request_rate": 0.0}


@dataclass
class Draft:
    """A run as its table gave it, which the format's `odd` function completes. about: further fields of
    it."""

    row: Fields
    about: dict[str, Any]
    load: dict[str, Any]
    totals: dict[str, Any]
    parallelism: dict[str, Any]
    metrics: list[Metric]
    samples: RequestSamples
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def value(
        self, name: str, statistic: str = "mean", tokens: str = "none", scope: str = ""
    ) -> float | None:
        for one in self.metrics:
            if (one.name, one.statistic, one.tokens) == (name, statistic, tokens) and scope in (
                "",
                one.scope,
            ):
                return one.value
        return None

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """A metric of the instance, where there is a value."""
        if value is not None:
            self.metrics.append(Metric(name=name, value=value, unit=unit, **{"scope": "instance", **more}))

    def find(self, rule: str, severity: Severity, message: str, **numbers: float) -> None:
        self.row.find(rule, severity, f"{self.row.where}: {message}", **numbers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A client's file as data. Paths are those of `Fields.at`.

    own:       keys that only this client writes, `at_least` of which a row of it has; all of `needs`, none of
               `not_with`; of a nested file `is_one` tells instead
    complete:  a CSV without one of `own` is refused
    about:     texts: field of ServingRun to path; fixed: fields that are the same in all its files
    load, totals, parallelism: fields of OfferedLoad, Totals, Parallelism to path
    duration_scale: of the file's unit in s
    requests:  the key of single requests' end-to-end times; empty: the client keeps no lists
    spoken:    the client's `backend` is a protocol
    wanted:    what is named where a row has no number of a run
    rows:      the rows of a document where they are not its objects
    """

    name: str
    own: frozenset[str] = frozenset()
    at_least: int = 3
    needs: frozenset[str] = frozenset()
    not_with: frozenset[str] = frozenset()
    is_one: Callable[[Mapping[str, Any]], bool] | None = None
    complete: bool = False
    metrics: Sequence[Rule] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, str] = field(default_factory=dict)
    fixed_load: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, str] = field(default_factory=dict)
    parallelism: Mapping[str, str] = field(default_factory=dict)
    duration_scale: float = 1.0
    requests: str = ""
    spoken: bool = False
    notes: tuple[str, ...] = ()
    wanted: Sequence[str] = SERVED
    odd: Callable[[Draft], None] | None = None
    rows: Callable[[Document], list[Fields]] = objects

    def recognises(self, document: Document) -> bool:
        return any(map(self._has, document.candidates()))

    def _has(self, row: Mapping[str, Any]) -> bool:
        if self.is_one is not None:
            return self.is_one(row)
        keys = set(row)
        return len(self.own & keys) >= self.at_least and self.needs <= keys and not self.not_with & keys

    def runs(self, document: Document) -> list[ServingRun]:
        lacking = ", ".join(sorted(self.own - {*document.header})) if self.complete else ""
        if lacking:
            raise UnreadableError(f"cannot read {document.path} as {self.name}: no column {lacking}")
        return [self.run(row) for row in self.rows(document)]

    def run(self, row: Fields) -> ServingRun:
        samples, failed = requests(row, self.requests) if self.requests else (RequestSamples(), None)
        draft = Draft(
            row,
            about={"client": self.name, **self.fixed, **_each(row, self.about, {}, Fields.text)},
            load={**self.fixed_load, **_each(row, self.load, LOADS, Fields.number)},
            totals=_each(row, self.totals, {"duration_s": Fields.number}, Fields.count),
            parallelism=_each(row, self.parallelism, {}, Fields.count),
            metrics=[metric for rule in self.metrics for metric in rule.read(row)],
            samples=samples,
        )
        if draft.totals.get("duration_s") is not None:
            draft.totals["duration_s"] *= self.duration_scale
        if self.requests:
            draft.notes += without_bulk(row)
            draft.totals["failed"] = failed if draft.totals["failed"] is None else draft.totals["failed"]
        if self.spoken:
            said = str(row.values.get("backend") or row.values.get("endpoint_type") or "")
            draft.about = {"protocol": said, "engine": engine(said), **draft.about}
        if self.odd is not None:
            self.odd(draft)
        run = ServingRun(
            **{"id": row.where, "source": row.where, **draft.about},
            workload=OfferedLoad(**draft.load),
            totals=Totals(**draft.totals),
            parallelism=Parallelism(**draft.parallelism),
            metrics=tuple(draft.metrics),
            samples=draft.samples,
            extra=row.rest() | draft.extra,
            notes=(*draft.notes, *self.notes),
            findings=tuple(row.findings),
        )
        return _measured(run, row, self.wanted)


Reader = Callable[[Fields, str], Any]


def _each(
    row: Fields, table: Mapping[str, str], special: Mapping[str, Reader], usual: Reader
) -> dict[str, Any]:
    return {ours: special.get(ours, usual)(*row.at(path)) for ours, path in table.items()}


def request_rate(row: Fields, key: str) -> float | None:
    """Requests per second as asked for; 0: all at once. None where a trace gives the times, or not said."""
    return None if row.values.get(key) == "trace" else row.number(key, infinite=0.0)


def ramp_up(row: Fields, key: str = "ramp_up_strategy") -> str:
    """How the request rate grows, as the strategy and its ends have it; empty where it does not."""
    strategy = row.text(key)
    begin, end = (row.number(f"ramp_up_{name}_rps") for name in ("start", "end"))
    return f"{strategy} from {begin:g} to {end:g} requests a second" if begin and end else strategy


LOADS: Mapping[str, Reader] = {
    "dataset": Fields.text, "num_prompts": Fields.count, "request_rate": request_rate, "ramp_up": ramp_up,
}  # fmt: skip


def engine(protocol: str) -> str:
    """The engine that a protocol names; empty where all engines speak it."""
    return ENGINES.get(protocol.split("-")[0], "")


def mean_of_range(longest: float | None, ratio: float | None) -> float | None:
    """Mean of whole lengths uniform from `ratio` times the longest (at least 1) to the longest, as SGLang's
    client draws them. None where either is not said, or the ratio is over 1."""
    if longest is None or ratio is None or ratio > 1:
        return None
    return (max(int(longest * ratio), 1) + longest) / 2


def requests(row: Fields, e2es: str) -> tuple[RequestSamples, int | None]:
    """What the client kept of each completed request, and how many failed (None: the row does not tell).

    Takes input_lens, output_lens (tokens); ttfts, itls and, under the key `e2es`, end-to-end times (s);
    errors (texts). The clients write 0 tokens and 0 s for a request that failed: those are left out.
    """
    errors = row.take("errors")
    if errors is not None and not isinstance(errors, list):
        row.leave_out("errors", "is not a list")
        errors = None
    kept: dict[str, Sequence[Any]] = {
        "input_lens": row.counts("input_lens"),
        "output_lens": row.counts("output_lens"),
        "ttfts_ms": row.numbers("ttfts", scale=1e3, least=0),
        "e2es_ms": row.numbers(e2es, scale=1e3, least=0),
        "itls_ms": row.lists("itls", scale=1e3, least=0),
    }
    sizes = {name: len(column) for name, column in kept.items() if column}
    if errors is not None:
        sizes["errors"] = len(errors)
    if len({*sizes.values()}) > 1:
        why = ", ".join(f"{name} {size}" for name, size in sizes.items())
        row.leave_out("ttfts", f"and the like are lists of unlike length ({why})")
    if len({*sizes.values()}) != 1:
        return RequestSamples(), None
    answered = kept["output_lens"] or kept["e2es_ms"]
    count = next(iter(sizes.values()))
    failed = [bool(errors and errors[i]) or bool(answered and not answered[i]) for i in range(count)]
    whole = {
        name: tuple(value for value, has_failed in zip(column, failed, strict=True) if not has_failed)
        for name, column in kept.items()
        if column
    }
    return RequestSamples(**whole), sum(failed) if answered or errors is not None else None


def without_bulk(row: Fields) -> list[str]:
    """Takes texts and long lists out of the row's rest; a note that names them."""
    bulk = {
        key: len(value)
        for key, value in row.values.items()
        if key not in row.taken and isinstance(value, list) and (key in BULK or len(value) > LONGEST)
    }
    row.taken.update(bulk)
    named = ", ".join(f"{key} ({count} entries)" for key, count in bulk.items())
    return [f"left out: {named}"] if bulk else []


def _measured(run: ServingRun, row: Fields, wanted: Sequence[str]) -> ServingRun:
    """The run, where it has any number that was measured; UnreadableError names those that are missing.
    Latencies of a run in which no request completed were not measured: left out, and so is what they say."""
    if not run.metrics and run.totals.duration_s is None:
        missing = ", ".join(key for key in wanted if key not in row.values) or "all of them unreadable"
        why = f"no number of a run in it ({missing})"
        raise UnreadableError(f"cannot read {row.where} as {run.client}: {why}")
    if run.totals.completed != 0:
        return run
    kept = tuple(metric for metric in run.metrics if metric.unit != "ms")
    findings = tuple(finding for finding in run.findings if finding.rule != "unreadable")
    note = "no request completed: latencies, which nobody measured, left out"
    return run.model_copy(update={"metrics": kept, "notes": (*run.notes, note), "findings": findings})
