"""What the tables of formats/trtllm.toml cannot express, and the reports that trtllm-bench prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.serving.clients.console_text import plain, unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.format import Draft, formats
from harness.serving.schema import ServingRun

SAME = 1e-3  # between a mean and the same mean elsewhere
WHOLE = 1e-3  # how far total / per GPU, printed with four decimals, may be from a whole number
ROUNDED = 5e-5  # of a mean that is printed with four decimals
MARK = re.compile(r"(?:Total Output|(?<!Output )(?<!Total )\bToken) Throughput \(tokens/sec\)")
HEADER = re.compile(r"^= (PYTORCH BACKEND|ENGINE DETAILS)\b")
STATISTIC_LINE = re.compile(r"\[(TPOT|TTFT|GTPS|Latency)\] (\w+)\s*:\s*(\S.*)$")


def report(draft: Draft) -> None:
    """Completes the run of a report: means, accept length, counts, precision and GPUs."""
    row, totals, about = draft.row, draft.totals, draft.about
    is_printed = row.as_text  # the numbers of a report as JSON are no texts
    _take_means(draft)
    if totals["duration_s"] is None:
        totals["duration_s"] = row.inside("performance").number("total_latency_s")
    requests, count = row.inside("request_info"), totals["completed"]
    for side in ("input", "output"):
        mean = requests.number(f"avg_{side}_length")
        is_too_rough = is_printed and (count or 0) * ROUNDED >= 0.5
        totals[f"{side}_tokens"] = None
        if mean is not None and count and not is_too_rough:
            totals[f"{side}_tokens"] = round(mean * count)
    if draft.load["output_len"] is None:
        draft.load["output_len"] = row.inside("dataset").number("avg_osl")
    engine = row.inside("engine")
    cache = engine.text("kv_cache_dtype")
    about["precision"] = about["precision"] or engine.text("dtype")
    about["precision"] += f", {cache} cache" if cache else ""
    about["gpus"] = row.inside("world_info").count("world_size")
    if is_printed:
        about["client"] += ".console"
        about["gpus"] = about["gpus"] or _gpus(draft)


def _take_means(draft: Draft) -> None:
    """Means that stand apart from their distribution, which has to agree with them, and the accept length."""
    row = draft.row
    for name, path in draft.format.more["means"].items():
        fields, key = row.at(path)
        alone, known = fields.number(key), draft.value(name)
        if alone is not None and known is None:
            draft.add(name, alone, "ms", scope="request", statistic="mean")
        elif alone is not None and known is not None and not math.isclose(alone, known, rel_tol=SAME):
            what = f"{key!r} is {alone:g}, but the average of its distribution {known:g}"
            fields.find("mean", "wrong", what)
    for section in ("decoding_stats", "performance", "request_info"):
        # In spite of its name it is the accept length.
        length = row.inside(section).number("global_acceptance_rate")
        if length and not draft.value("accept_length"):
            draft.add("accept_length", length, "1", statistic="mean")


def _gpus(draft: Draft) -> int | None:
    """The number of GPUs by two throughputs; None if they do not make a whole number."""
    whole = draft.value("throughput", "total", "output", "instance")
    per_gpu = draft.value("throughput", "total", "output", "gpu")
    if not whole or not per_gpu:
        return None
    ratio = whole / per_gpu
    if round(ratio) < 1 or abs(ratio - round(ratio)) > WHOLE:
        message = f"{whole:g} tok/s in all and {per_gpu:g} of a GPU make {ratio:.4g} GPUs"
        draft.row.find("denominator", "suspect", message)
        return None
    draft.notes.append(f"GPUs: Total Output Throughput / Per GPU Output Throughput = {ratio:.4f}")
    return round(ratio)


def reports(document: Document) -> list[ServingRun]:
    """The runs of the reports in a text. A first section, or a line that repeats, begins a new one."""
    if not MARK.search(document.text):
        return []
    rows = [Fields(f"{document.path}:{line}", row, as_text=True) for line, row in _reports(document)]
    return [formats()["trtllm-bench"].run(row) for row in rows]


def _reports(document: Document) -> Iterator[tuple[int, dict[str, Any]]]:
    """First line and content, as in the JSON, of each report."""
    start = 0
    values: dict[str, str] = {}  # by path
    lines = plain(document.text)
    for number, line in enumerate(lines, 1):
        path, value = _read(line)
        if number == len(lines) and not line[-1:].isspace():
            # A number that may be cut through becomes a text, which is left out with a finding.
            value += " (where the text ends, maybe cut through)"
        if path in values or (HEADER.match(unprefixed(line)) and _is_report(values)):
            if _is_report(values):
                yield start, _nested(values)
            start, values = 0, {}
        if path:
            start = start or number
            values[path] = value
    if _is_report(values):
        yield start, _nested(values)


def _is_report(values: Mapping[str, str]) -> bool:
    return any(path.startswith("performance.") for path in values)


def _nested(values: Mapping[str, str]) -> dict[str, Any]:
    """The values by path as nested objects."""
    content: dict[str, Any] = {}
    for path, value in values.items():
        *outer, key = path.split(".")
        inner = content
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return content


def _read(line: str) -> tuple[str, str]:
    """Path in the JSON and value of a line of the report; both are empty if it is no such line."""
    labels = formats()["trtllm-bench"].more
    if match := STATISTIC_LINE.search(line.rstrip()):
        return f"{labels['distributions'][match[1].upper()]}.{match[2].lower()}", match[3]
    parts = unprefixed(line).split(":")
    for i in range(1, len(parts)):  # a label may have a colon
        path = labels["printed"].get(" ".join(":".join(parts[:i]).split()), "")
        value = ":".join(parts[i:]).strip()
        if path and value and value != "None":
            return path, value
    return "", ""


def failed(draft: Draft) -> None:
    """The failed requests, if there is no list of requests: those asked for that did not complete."""
    sent, completed = draft.load["num_prompts"], draft.totals["completed"]
    if draft.totals["failed"] is None and sent is not None and completed is not None and completed <= sent:
        draft.totals["failed"] = sent - completed
