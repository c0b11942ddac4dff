"""Files of serving clients: reading them, changed ones too, and what a test looks at in a run."""

import copy
import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.serving import ServingRun, load
from harness.serving.clients.files import read
from tests.support.paths import SERVING_DATA

DATA = SERVING_DATA
GONE = object()
FILES = sorted(
    path
    for path in DATA.iterdir()
    if path.suffix in (".json", ".jsonl", ".csv", ".txt") and path.name != "moai_console.txt"  # a document's
)


def of(name: str) -> list[ServingRun]:
    return load(DATA / name)


def content_of(name: str) -> Any:
    """The JSON in a file; of several rows the first."""
    document = read(DATA / name)
    return document.content[0][1] if document.kind == "jsonl" else document.content


def place(content: Any, path: tuple[Any, ...], value: Any) -> None:
    """Puts it there; GONE takes away what is."""
    for key in path[:-1]:
        content = content[key]
    if value is GONE:
        del content[path[-1]]
    else:
        content[path[-1]] = value


def changed(name: str, changes: dict[str, Any]) -> Any:
    """The content of a JSON file with other values at places (keys joined by `/`) or functions of the old."""
    content = copy.deepcopy(content_of(name))
    for where, value in changes.items():
        path = tuple(int(key) if key.isdigit() else key for key in where.split("/"))
        if callable(value):
            value = value(functools.reduce(lambda part, key: part[key], path, content))
        place(content, path, value)
    return content


def written(tmp_path: Path, text: str, name: str = "log.txt") -> list[ServingRun]:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return load(path)


def shapes(run: ServingRun) -> dict[tuple[str, str, str, str], tuple[float, str]]:
    """(value, unit) of each metric by name, statistic, kind of tokens and scope."""
    return {(m.name, m.statistic, m.tokens, m.scope): (m.value, m.unit) for m in run.metrics}


def rules(run: ServingRun) -> list[str]:
    """Of the findings that are wrong or suspect, in their order; the reader's come first."""
    return [one.rule for one in run.findings if one.severity != "note"]


def look(run: ServingRun, what: str) -> Any:
    """What a row of a table expects: `gpus`, `workload.concurrency`, `rules`, `notes` and `findings` (all as
    one text), `ttft mean` or `throughput total output` (value of a metric), `scope throughput output`."""
    if what == "rules":
        return rules(run)
    if what in ("notes", "findings"):
        return "\n".join(getattr(one, "message", one) for one in getattr(run, what))
    head, *more = what.split()
    if head == "scope":
        metric = run.metric(more[0], tokens=more[1])
        return metric and metric.scope
    if more or ("." not in what and what not in ServingRun.model_fields):
        return run.value(head, *more)
    found: Any = run
    for key in what.split("."):
        found = found.get(key) if isinstance(found, dict) else getattr(found, key)
    return found


NESTED = ("parallelism", "workload", "totals")
ELSEWHERE = ("id", "source", "metrics", "findings", "notes", "extra")


def as_lines(run: ServingRun) -> Iterator[str]:
    """All that was read, but what is not said; numbers with nine digits."""
    document = run.model_dump(exclude_defaults=True)
    groups = defaultdict(list)
    for one in run.metrics:
        kind = " ".join(filter(None, (one.name, one.unit, one.scope, one.tokens, one.label, one.derived)))
        groups[kind].append(f"{one.statistic} {one.value:.9g}")
    samples = {k: f"{len(v)} from {v[0]} to {v[-1]}" for k, v in document.pop("samples", {}).items()}
    yield run.id
    for key in sorted(document, key=NESTED.__contains__):
        value = document[key]
        if key in NESTED:
            number = {k: f"{v:.9g}" if isinstance(v, float) else v for k, v in value.items()}
            value = ", ".join(f"{k} {v}" for k, v in number.items())
        if key not in ELSEWHERE:
            yield f"  {key}: {value if isinstance(value, str) else json.dumps(value)}"
    yield from (f"  {kind}: {', '.join(values)}" for kind, values in groups.items())
    yield from (f"  each request's {key}: {value}" for key, value in samples.items())
    if run.extra:
        yield f"  extra: {', '.join(run.extra)}"
    yield from (f"  note: {note}" for note in run.notes)
    yield from (f"  finding: {one.severity} {one.rule}: {one.message}" for one in run.findings)


# Runs of 160 prompts of 819 to 1024 tokens in and out, 16 in flight, as two clients write them

SGLANG_ROW: dict[str, Any] = {
    "backend": "sglang", "dataset_name": "random", "max_concurrency": 16, "duration": 114.0, "completed": 160,
    "num_prompts": 160, "random_input_len": 1024, "random_output_len": 1024, "random_range_ratio": 0.8,
    "request_rate": "inf", "total_input_tokens": 147_500, "total_output_tokens": 147_400,
    "total_output_tokens_retokenized": 147_400, "output_throughput": 1293.0, "mean_e2e_latency_ms": 11_340.0,
    "mean_tpot_ms": 12.0, "mean_ttft_ms": 300.0,
}  # fmt: skip
VLLM_ROW: dict[str, Any] = {
    "date": "20260101-000000", "backend": "sglang", "endpoint_type": "sglang", "label": None,
    "model_id": "deepseek-ai/DeepSeek-R1", "tokenizer_id": "deepseek-ai/DeepSeek-R1", "num_prompts": 160,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 114.0, "completed": 160,
    "failed": 0, "total_input_tokens": 147_500, "total_output_tokens": 147_400, "request_throughput": 1.4035,
    "output_throughput": 1293.0, "total_token_throughput": 2586.8, "mean_tpot_ms": 12.0,
    "mean_ttft_ms": 300.0,
}  # fmt: skip
