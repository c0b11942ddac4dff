"""What formats/guidellm.toml cannot express: a report holds several runs, and the CSV has lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import UnreadableError
from harness.serving.clients.fields import Fields, real
from harness.serving.clients.files import Document, objects
from harness.serving.clients.format import Draft, formats
from harness.serving.schema import RequestSamples

STATUS = "successful"
STATUSES = (STATUS, "incomplete", "errored")
LIMITED = ("concurrent", "throughput")  # strategies whose number is of requests in flight, and not a rate
EXACT = 1e-3  # relative: between a sum and the mean times the count
SAMPLED = ("prompt_tokens", "output_tokens", "time_to_first_token_ms", "request_latency")


def benchmarks(document: Document) -> list[Fields]:
    """The benchmarks of a report as rows; each also has the report's version."""
    rows = []
    for report in objects(document):
        version = report.inside("metadata").text("guidellm_version")
        added = {"guidellm_version": version} if version else {}
        listed = report.values.get("benchmarks")
        for i, row in enumerate(listed if isinstance(listed, list) else ()):
            if not isinstance(row, Mapping):
                raise UnreadableError(f"cannot read {report.where}: benchmarks[{i}] is no object")
            rows.append(Fields(f"{report.where}: benchmarks[{i}]", {**row, **added}))
    return rows


def groups(document: Document) -> list[Fields]:
    """The CSV's rows as objects: the column `a / b / c` is key c of `a / b`."""
    names, rows = formats()["guidellm.csv"].more["percentiles"], []
    for row in objects(document):
        content: dict[str, dict[str, Any]] = {}
        for column, value in row.values.items():
            group, _, key = column.rpartition(" / ")
            if key == "Percentiles":
                listed = row.numbers(column)
                if listed and len(listed) != len(names):
                    row.leave_out(column, f"has {len(listed)} entries, not {len(names)}")
                    listed = ()
                value = dict(zip(names, listed, strict=False))
            content.setdefault(group, {})[key] = value
        rows.append(Fields(row.where, content, as_text=True, findings=row.findings))
    return rows


def strategy_and_tokens(draft: Draft) -> None:
    """Completes a run of the CSV, which has no sums of tokens: they are the mean times the requests."""
    row, totals, completed = draft.row, draft.totals, draft.totals["completed"]
    for side in ("input", "output"):
        mean = draft.value(f"{side}_len", tokens=side)
        totals[f"{side}_tokens"] = None if mean is None or completed is None else round(completed * mean)
    strategy, _, level = row.inside("Benchmark").text("Strategy").partition("@")  # as `concurrent@8`
    # As a field, so that a level that is no number is a finding of the row.
    fields = Fields(row.where, {"Benchmark / Strategy": level}, as_text=True, findings=row.findings)
    number = None if level == "unlimited" else fields.number("Benchmark / Strategy")
    _complete(draft, strategy, row.inside("Request Counts").count("Incomplete"))
    draft.load["concurrency" if strategy in LIMITED else "request_rate"] = number


def counts_and_config(draft: Draft) -> None:
    """Completes a run of the JSON."""
    row = draft.row
    numbers = row.inside("metrics")
    numbers.take("text")  # the same again, by words and characters
    counted = (numbers if "request_totals" in numbers.values else row).inside("request_totals")
    completed, incomplete, errored = (counted.count(status) for status in STATUSES)
    draft.totals |= {"completed": completed, "failed": errored}
    for side, key in (("input", "prompt_token_count"), ("output", "output_token_count")):
        draft.totals[f"{side}_tokens"] = numbers.inside(key).inside(STATUS).count("total_sum")
    _examine_sums(draft)
    # `config` came with 0.4; before it there were `args`, `worker` and `request_loader`.
    config = row.inside("config" if "config" in row.values else "args")
    strategy = config.inside("strategy")
    backend = config.inside("backend") if "backend" in config.values else row.inside("worker")
    draft.about["model"] = backend.text("model") or backend.text("backend_model")
    _complete(draft, strategy.text("type_"), incomplete)
    streams = strategy.number("streams" if "streams" in strategy.values else "max_concurrency")
    draft.load["concurrency"] = draft.load.get("concurrency", streams)
    if "rate" in strategy.values:
        draft.load["request_rate"] = strategy.number("rate")
    draft.samples = _samples(row)


def _complete(draft: Draft, strategy: str, incomplete: int | None) -> None:
    """Completes a run of either file: the load of a strategy that has no number, the rates, and the notes.
    incomplete: the number of requests that had not ended when the benchmark did"""
    if strategy == "synchronous":
        draft.load["concurrency"] = 1.0
    if strategy == "throughput":
        draft.load["request_rate"] = 0.0
    _derived_rates(draft)
    draft.notes += [
        "`inter_token_latency_ms` is each request's mean after its first token: here `tpot`; "
        "`time_per_output_token` divides by all tokens and is another quantity",
        "of successful requests only",
    ]
    if (errored := draft.totals["failed"]) or incomplete:
        draft.notes[-1] += f"; {incomplete or 0} incomplete and {errored or 0} errored are in no number"


def _examine_sums(draft: Draft) -> None:
    """Checks that the sum of each distribution is its mean times its count."""
    for path, rule in draft.format.metrics.items():
        outer, key = draft.row.at(path)
        fields = outer.inside(key)
        count = fields.number("count")
        mean, total = real(fields.values.get("mean")), real(fields.values.get("total_sum"))
        if rule.scope != "request" or not count or mean is None or total is None:
            continue
        if abs(mean * count - total) > EXACT * abs(total) + 0.5:
            fields.find("samples", "wrong", f"total_sum is {total:g}, not {count:g} x {mean:g}")


def _derived_rates(draft: Draft) -> None:
    """Throughputs as counts over the duration, before the statistics."""
    totals, duration, statistics = draft.totals, draft.totals["duration_s"], draft.metrics
    counts = {"output": totals["output_tokens"], "input": totals["input_tokens"]}
    counts["total"] = None if None in counts.values() else sum(counts.values())
    draft.metrics = []
    for kind, count in counts.items():
        if duration and count is not None:
            how = f"{kind} tokens of successful requests / duration"
            draft.add("throughput", count / duration, "tok/s", tokens=kind, derived=how)
    if duration and totals["completed"] is not None:
        how = "successful requests / duration"
        draft.add("request_throughput", totals["completed"] / duration, "req/s", derived=how)
    draft.metrics += statistics


def _samples(row: Fields) -> RequestSamples:
    """The successful requests that the report kept; empty lists if one of them lacks the number."""
    kept = row.take("requests")
    requests = kept.get(STATUS) if isinstance(kept, Mapping) else None
    if not isinstance(requests, list) or not all(isinstance(request, Mapping) for request in requests):
        return RequestSamples()
    in_all = [key for key in SAMPLED if all(key in request for request in requests)]
    lists = {key: [request[key] for request in requests] for key in in_all}
    columns = Fields(f"{row.where}: requests", lists, findings=row.findings)
    return RequestSamples(
        input_lens=columns.counts("prompt_tokens"),
        output_lens=columns.counts("output_tokens"),
        ttfts_ms=columns.numbers("time_to_first_token_ms"),
        e2es_ms=columns.numbers("request_latency", scale=1e3),
    )
