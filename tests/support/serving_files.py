"""What the tests of serving clients' files share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.serving import ServingRun, load
from tests.support.paths import SERVING_DATA

DATA = SERVING_DATA


def of(name: str) -> list[ServingRun]:
    return load(DATA / name)


def changed(tmp_path: Path, name: str, change: Callable[[Any], Any]) -> list[ServingRun]:
    """The runs of a JSON file after a change of its content, in place or returned."""
    content = json.loads((DATA / name).read_text())
    content = change(content) or content
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return load(path)


def written(tmp_path: Path, text: str, name: str = "log.txt", encoding: str = "utf-8") -> list[ServingRun]:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return load(path)


def shapes(run: ServingRun) -> dict[tuple[str, str, str], tuple[float, str, str]]:
    """(value, unit, scope) of each metric by name, statistic and kind of tokens; each is there once."""
    found = {}
    for one in run.metrics:
        key = (one.name, one.statistic, one.tokens)
        assert key not in found or found[key][2] != one.scope, key
        found[key if key not in found else (*key, one.scope)] = (one.value, one.unit, one.scope)
    return found


def rules(run: ServingRun) -> list[str]:
    """Of the findings that are wrong or suspect, in their order; the reader's come first."""
    return [one.rule for one in run.findings if one.severity != "note"]


def noted(run: ServingRun) -> list[str]:
    """Rules of the findings that are only to be known."""
    return [one.rule for one in run.findings if one.severity == "note"]


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value that is no object or list stands."""
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def place(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


# Runs of 160 prompts of 819 to 1024 tokens in and out, 16 in flight, as two clients write them

SGLANG_ROW: dict[str, Any] = {
    "backend": "sglang", "dataset_name": "random", "max_concurrency": 16, "duration": 60.0, "completed": 160,
    "num_prompts": 160, "random_input_len": 1024, "random_output_len": 1024, "random_range_ratio": 0.8,
    "request_rate": "inf", "total_input_tokens": 147_500, "total_output_tokens": 147_400,
    "total_output_tokens_retokenized": 147_400, "output_throughput": 2456.0, "mean_e2e_latency_ms": 9000.0,
    "mean_tpot_ms": 12.0, "mean_ttft_ms": 300.0,
}  # fmt: skip
VLLM_ROW: dict[str, Any] = {
    "date": "20260101-000000", "backend": "sglang", "endpoint_type": "sglang", "label": None,
    "model_id": "deepseek-ai/DeepSeek-R1", "tokenizer_id": "deepseek-ai/DeepSeek-R1", "num_prompts": 160,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 60.0, "completed": 160,
    "failed": 0, "total_input_tokens": 147_500, "total_output_tokens": 147_400, "request_throughput": 2.67,
    "output_throughput": 2456.0, "total_token_throughput": 4915.0, "mean_tpot_ms": 12.0,
    "mean_ttft_ms": 300.0,
}  # fmt: skip
