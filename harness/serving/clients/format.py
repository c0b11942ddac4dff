"""One reader for the files of all serving clients.

formats/*.toml has a table for each client. It tells by which keys a file is recognised, and where each
metric, count and setting is (`a.b` is key b of the object under a). What a table cannot express is done by
the format's one function `completed_by`, which completes a `Draft`. The tables are checked when they are
loaded. A new client needs a table and an example in tests/data/serving.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from harness.errors import UnreadableError
from harness.files import read_toml
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.schema import (
    Metric,
    OfferedLoad,
    Parallelism,
    RequestSamples,
    Scope,
    ServingRun,
    StrictRecord,
    Tokens,
    Totals,
    first,
)

FILES = ("aiperf", "guidellm", "inference_perf", "inferencex", "trtllm", "sglang", "vllm", "dstack")
"""In the order in which a file is tried: clients that began as a copy of vLLM's write its keys and others."""

STATISTIC = r"mean|median|std|min|max|p\d+(?:\.\d+)?"
BULK = ("generated_texts", "text_chunks", "cached_tokens", "cached_tokens_details")  # never in `extra`
LONGEST = 64  # entries of the longest list that stays in `extra`
SERVED = ("duration", "completed", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")
"""Keys of measured numbers that most clients of servers write."""


class Rule(StrictRecord):
    """How a metric is read, from the number under a key or from the object there."""

    name: str = ""
    unit: Literal["ms", "tok/s", "req/s", "tokens", "1"] = "ms"
    tokens: Tokens = "none"
    scope: Scope = "instance"
    statistic: str = ""  # of a number (default: `total`), or of an object with a single statistic
    scale: float = 1.0  # the factor from the client's unit to `unit`
    object: bool = False  # whether the key holds an object of statistics
    latencies: dict[str, str] = Field(default_factory=dict)
    """From the client's names of latencies to ours, for a key such as `{statistic}_{latency}_ms`. The same
    keys without `_ms` are in seconds (InferenceX's copy of vLLM's client)."""

    @model_validator(mode="after")
    def _has_name(self) -> Rule:
        if bool(self.name) == bool(self.latencies):
            raise ValueError("a metric has either a name or latencies")
        return self

    def read(
        self, row: Fields, path: str, statistics: Mapping[str, str] | None = None, unit_inside: bool = False
    ) -> list[Metric]:
        """The metrics under a key; none, with a finding, where the key holds no such number.

        row, path:   the client's object, and where the key is in it (see `Fields.at`)
        statistics:  from the client's key of each statistic to ours (default: keys named as ours)
        unit_inside: whether the object has the client's unit under `unit`
        """
        if self.latencies:
            return self.read_latencies(row, path) or self.read_latencies(row, path.removesuffix("_ms"), 1e3)
        fields, key = row.at(path)
        if not self.object:
            return self._metrics(fields, {key: self.statistic or "total"}, self.scale)
        fields = fields.inside(key)
        scale = scale_inside(fields, self.unit) if unit_inside else self.scale
        if scale is None:
            return []
        if not statistics:
            statistics = {key: key for key in fields.values if re.fullmatch(STATISTIC, key)}
        metrics = self._metrics(fields, statistics, scale)
        if fields.values.get("count") == 0 and not any(metric.value for metric in metrics):
            return []  # statistics of no request are written as zeros
        if self.statistic and len(metrics) == 1:
            return [metrics[0].model_copy(update={"statistic": self.statistic})]
        return metrics

    def read_latencies(self, row: Fields, path: str, scale: float = 1.0) -> list[Metric]:
        """The metrics of all keys of a row that the pattern `path` matches, for example
        `{statistic}_{latency}_ms`. scale: the factor to ms"""
        names = "|".join(map(re.escape, self.latencies))
        pattern = path.format(statistic=f"({STATISTIC})", latency=f"({names})")
        metrics = []
        for key in row.values:
            if match := re.fullmatch(pattern, key):
                rule = Rule(name=self.latencies[match[2]], scope="request")
                metrics += rule._metrics(row, {key: match[1]}, scale)
        return metrics

    def _metrics(self, fields: Fields, statistics: Mapping[str, str], scale: float) -> list[Metric]:
        """The metrics at the paths of `statistics`, which gives the statistic of each path."""
        about: dict[str, Any] = self.model_dump(include={"name", "unit", "scope", "tokens"})
        metrics = []
        for path, statistic in statistics.items():
            inner, key = fields.at(path)
            value = inner.number(key, scale=scale)
            if value is not None:
                metrics.append(Metric(value=value, statistic=statistic, **about))
        return metrics


def scale_inside(fields: Fields, unit: str) -> float | None:
    """The factor from the object's own unit to this one; None, with a finding, for a unit of another kind."""
    if not fields.values:
        return None
    spelling = fields.text("unit")
    scales = units(unit)
    if spelling not in scales:
        fields.leave_out("unit", f"is {spelling!r}, not one of {', '.join(scales)}; its values")
    return scales.get(spelling)


@dataclass
class Draft:
    """A run as its format's tables give it, before `Format.completed_by` completes it."""

    row: Fields
    about: dict[str, Any]  # fields of ServingRun that are no records, such as its engine
    load: dict[str, Any]
    totals: dict[str, Any]
    parallelism: dict[str, Any]
    metrics: list[Metric]
    samples: RequestSamples
    format: Format
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # beside the fields of the row that nothing takes

    def value(
        self, name: str, statistic: str = "mean", tokens: str = "none", scope: str = ""
    ) -> float | None:
        """The value of the first such metric; None if there is none."""
        metric = first(self.metrics, name=name, statistic=statistic, tokens=tokens, scope=scope)
        return metric.value if metric else None

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """Adds a metric of the instance, if it has a value."""
        if value is not None:
            self.metrics.append(Metric(name=name, value=value, unit=unit, **{"scope": "instance", **more}))


class Format(StrictRecord):
    """A client's file as data. Paths are those of `Fields.at`."""

    name: str
    own: frozenset[str] = frozenset()  # keys of this client, by which it is recognised: see `has`
    at_least: int = 3  # keys of `own` that a row has
    needs: frozenset[str] = frozenset()  # keys that a row has, all of them
    one_of: frozenset[str] = frozenset()  # keys of which a row has at least one
    not_with: frozenset[str] = frozenset()  # keys that no row has
    needs_all_columns: bool = False  # whether a CSV that lacks a key of `own` is refused
    about: dict[str, str] = Field(default_factory=dict)  # texts: from field of ServingRun to path
    fixed: dict[str, Any] = Field(default_factory=dict)  # fields of ServingRun that all its files have
    load: dict[str, str] = Field(default_factory=dict)  # from field of OfferedLoad to path
    fixed_load: dict[str, Any] = Field(default_factory=dict)  # as `fixed`
    totals: dict[str, str] = Field(default_factory=dict)
    parallelism: dict[str, str] = Field(default_factory=dict)
    duration_scale: float = 1.0  # the factor from the file's durations to seconds
    metrics: dict[str, Rule] = Field(default_factory=dict)  # by path
    statistics: dict[str, str] = Field(default_factory=dict)  # from the client's names in objects to ours
    units_inside: bool = False  # whether these objects have their unit
    requests: str = ""  # the key of single requests' end-to-end times; empty: the client keeps no lists
    says_protocol: bool = False  # whether the client's `backend` names the protocol that it speaks
    notes: tuple[str, ...] = ()  # those of all its runs
    wanted: tuple[str, ...] = SERVED  # keys that the message names if a row has no measured number
    more: dict[str, Any] = Field(default_factory=dict)  # further tables, for the two functions below
    # Functions of this package, in a table as `module.function`.
    completed_by: Callable[[Draft], None] | None = None
    rows: Callable[[Document], list[Fields]] = objects

    @field_validator("completed_by", "rows", mode="before")
    @classmethod
    def _function(cls, name: str) -> Any:
        return pkgutil.resolve_name(f"harness.serving.clients.{name}")

    @model_validator(mode="after")
    def _fields_are_known(self) -> Format:
        tables: list[tuple[Mapping[str, Any], type[StrictRecord]]] = [
            (self.about | self.fixed, ServingRun),
            (self.load | self.fixed_load, OfferedLoad),
            (self.totals, Totals),
            (self.parallelism, Parallelism),
        ]
        for table, record in tables:
            if unknown := sorted(set(table) - set(record.model_fields)):
                raise ValueError(f"{', '.join(unknown)}: no field of {record.__name__}")
        return self

    def recognises(self, document: Document) -> bool:
        return any(self._is_row(row) for row in document.candidates())

    def _is_row(self, row: Mapping[str, Any]) -> bool:
        return (
            len(self.keys_in(row)) >= max(self.at_least, 1)
            and all(has(row, key) for key in self.needs)
            and (not self.one_of or any(has(row, key) for key in self.one_of))
            and not any(has(row, key) for key in self.not_with)
        )

    def keys_in(self, row: Mapping[str, Any]) -> list[str]:
        """The keys of its own that the row has."""
        return sorted(key for key in self.own if has(row, key))

    def runs(self, document: Document) -> list[ServingRun]:
        lacking = ", ".join(sorted(self.own - {*document.header})) if self.needs_all_columns else ""
        if lacking:
            raise UnreadableError(f"cannot read {document.path} as {self.name}: no column {lacking}")
        return [self.run(row) for row in self.rows(document)]

    def run(self, row: Fields) -> ServingRun:
        samples, failed = requests(row, self.requests) if self.requests else (RequestSamples(), None)
        draft = Draft(
            row,
            about={"client": self.name, **self.fixed, **read_table(row, self.about, Fields.text)},
            load=self.fixed_load | read_table(row, self.load),
            totals=read_table(row, self.totals, Fields.count),
            parallelism=read_table(row, self.parallelism, Fields.count),
            metrics=[
                metric
                for path, rule in self.metrics.items()
                for metric in rule.read(row, path, self.statistics, self.units_inside)
            ],
            samples=samples,
            format=self,
        )
        if draft.totals.get("duration_s") is not None:
            draft.totals["duration_s"] *= self.duration_scale
        if self.requests:
            draft.notes += without_bulk(row)
            if draft.totals["failed"] is None:
                draft.totals["failed"] = failed
        if self.says_protocol:
            protocol = str(row.values.get("backend") or row.values.get("endpoint_type") or "")
            draft.about = {"protocol": protocol, "engine": engine(protocol), **draft.about}
        if self.completed_by is not None:
            self.completed_by(draft)
        run = ServingRun(
            **{"id": row.where, "source": row.where, **draft.about},
            workload=OfferedLoad(**draft.load),
            totals=Totals(**draft.totals),
            parallelism=Parallelism(**draft.parallelism),
            metrics=tuple(dict.fromkeys(draft.metrics)),  # some clients write a number twice
            samples=draft.samples,
            extra=row.rest() | draft.extra,
            notes=(*draft.notes, *self.notes),
            findings=tuple(row.findings),
        )
        if not run.metrics and run.totals.duration_s is None:
            missing = ", ".join(key for key in self.wanted if key not in row.values)
            why = f"no number of a run in it ({missing or 'all of them unreadable'})"
            raise UnreadableError(f"cannot read {row.where} as {run.client}: {why}")
        return without_latencies(run) if run.totals.completed == 0 else run


@functools.cache
def formats() -> dict[str, Format]:
    """All formats by name, in the order in which a file is tried."""
    found = {name: Format(name=name, **table) for file in FILES for name, table in table_file(file).items()}
    console = pkgutil.resolve_name("harness.serving.clients.console.Console")  # it imports this module
    return found | {"console": console(name="console", **table_file("console")["console"])}


@functools.cache
def table_file(name: str) -> dict[str, Any]:
    """The content of a file of formats/."""
    return read_toml(Path(__file__).with_name("formats") / f"{name}.toml")


def has(value: Any, path: str) -> bool:
    """Whether an object, or one in a list, has the key `path`; for `a.b`: key b in the value under a."""
    if isinstance(value, list):
        return any(has(item, path) for item in value)
    if not isinstance(value, Mapping):
        return False
    if path in value:
        return True
    outer, _, inner = path.partition(".")
    return bool(inner) and outer in value and has(value[outer], inner)


Reader = Callable[[Fields, str], Any]


def read_table(row: Fields, table: Mapping[str, str], usual: Reader = Fields.number) -> dict[str, Any]:
    """Fields of a record, by name, read from their paths. SPECIAL has the readers of some; `usual` reads the
    others."""
    return {name: SPECIAL.get(name, usual)(*row.at(path)) for name, path in table.items()}


def request_rate(row: Fields, key: str) -> float | None:
    """The requested rate in requests per second; 0: all at once; None: not said, or by a trace."""
    return None if row.values.get(key) == "trace" else row.number(key, infinite=0.0)


def ramp_up(row: Fields, key: str) -> str:
    """How the request rate grows: the strategy and both ends; empty if it does not grow."""
    strategy = row.text(key)
    first_rate = row.number("ramp_up_start_rps")
    last_rate = row.number("ramp_up_end_rps")
    if not (first_rate and last_rate):
        return strategy
    return f"{strategy} from {first_rate:g} to {last_rate:g} requests a second"


SPECIAL: Mapping[str, Reader] = {
    "dataset": Fields.text,
    "num_prompts": Fields.count,
    "request_rate": request_rate,
    "ramp_up": ramp_up,
    "duration_s": Fields.number,  # the other totals are counts
}


def engine(protocol: str) -> str:
    """The engine that a protocol names; empty if all engines speak it."""
    return str(table_file("units")["engines"].get(protocol.split("-")[0], ""))


def units(unit: str) -> dict[str, float]:
    """The clients' spellings of a unit, each with its multiple of the unit."""
    scales: dict[str, dict[str, float]] = table_file("units")["units"]
    if unit == "s":
        return {spelling: scale / 1e3 for spelling, scale in scales["ms"].items()}
    return scales[unit]


def mean_length(longest: float | None, ratio: float | None) -> float | None:
    """Mean of whole lengths uniform from `ratio` times the longest (at least 1) to the longest, as SGLang's
    client draws them. None if either is not said, or the ratio is over 1."""
    if longest is None or ratio is None or ratio > 1:
        return None
    return (max(int(longest * ratio), 1) + longest) / 2


def requests(row: Fields, e2es: str) -> tuple[RequestSamples, int | None]:
    """What the client kept of each completed request, and how many failed (None: not said).

    Takes input_lens, output_lens (tokens); ttfts, itls and, under the key `e2es`, end-to-end times (s);
    errors (texts). The clients write 0 tokens and 0 s for a request that failed; those are left out.
    """
    errors = row.take("errors")
    if errors is not None and not isinstance(errors, list):
        row.leave_out("errors", "is not a list")
        errors = None
    columns: dict[str, Sequence[Any]] = {
        "input_lens": row.counts("input_lens"),
        "output_lens": row.counts("output_lens"),
        "ttfts_ms": row.numbers("ttfts", scale=1e3),
        "e2es_ms": row.numbers(e2es, scale=1e3),
        "itls_ms": row.lists("itls", scale=1e3),
        "starts_s": row.numbers("start_times"),
    }
    columns = {name: column for name, column in columns.items() if column}
    sizes = {name: len(column) for name, column in columns.items()}
    if errors is not None:
        sizes["errors"] = len(errors)
    if not sizes:
        return RequestSamples(), None
    if len(set(sizes.values())) > 1:
        why = ", ".join(f"{name} {size}" for name, size in sizes.items())
        row.leave_out("ttfts", f"and the like are lists of unlike length ({why})")
        return RequestSamples(), None
    answers = columns.get("output_lens") or columns.get("e2es_ms")  # 0 where a request failed
    completed = []  # the places of the requests that did not fail
    count = max(sizes.values())
    for i in range(count):
        if not (errors and errors[i]) and (answers is None or answers[i]):
            completed.append(i)
    samples = {name: tuple(column[i] for i in completed) for name, column in columns.items()}
    is_known = answers is not None or errors is not None
    return RequestSamples(**samples), count - len(completed) if is_known else None


def without_bulk(row: Fields) -> list[str]:
    """Removes texts and long lists from the row's rest. Returns a note that names them."""
    removed = []
    for key, value in row.values.items():
        if isinstance(value, list) and key not in row.taken and (key in BULK or len(value) > LONGEST):
            removed.append(f"{key} ({len(value)} entries)")
            row.taken.add(key)
    return [f"left out: {', '.join(removed)}"] if removed else []


def without_latencies(run: ServingRun) -> ServingRun:
    """A run in which no request completed, without its latencies and what could not be read of them."""
    kept = tuple(metric for metric in run.metrics if metric.unit != "ms")
    findings = tuple(finding for finding in run.findings if finding.rule != "unreadable")
    note = "no request completed: latencies, which nobody measured, left out"
    return run.model_copy(update={"metrics": kept, "notes": (*run.notes, note), "findings": findings})
