"""A trace's file, whichever profiler wrote it, read into columns; another one is refused by its name."""

from __future__ import annotations

import re
from pathlib import Path

from harness.serving.clients.files import UnreadableError
from harness.serving.trace import kineto, rocprof, tables
from harness.serving.trace.classify import trace_rules
from harness.serving.trace.columns import RecordedTrace
from harness.serving.trace.json_stream import JsonText, Truncated, items, opened

READ = (
    "wanted is a trace of torch.profiler (`traceEvents`) or rocprofv3 (`rocprofiler-sdk-tool`, or its kernel "
    "trace as CSV: Kernel_Name, Start_Timestamp, End_Timestamp), or the CSV of nsys stats' cuda_gpu_trace"
)
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")


def read(path: Path, *, partial: bool = False) -> RecordedTrace:
    """Reads a trace in memory that grows with the number of its events, by less than 100 bytes each, not with
    its size. partial: of a file that breaks off, what comes before. Raises UnreadableError."""
    text = opened(path)
    try:
        is_json = text.peek() in ("{", "[") and not CONTROL.search(text.head[:16])
        if not is_json:
            _require_text(text)
        recorded, start = RecordedTrace("torch"), text.head.decode("latin-1")
        try:
            if not is_json:
                tables.read(text, recorded)
            elif text.peek() == "{" and rocprof.ROOT in start:
                recorded.source = "rocprof"
                rocprof.read(items(text, rocprof.enter), recorded)
            else:
                kineto.read(items(text, kineto.enter), recorded)
        except Truncated:
            if not partial:
                raise
            recorded.truncated = True
            recorded.note("truncated", f"{path} breaks off: what its profiler wrote last is missing here")
    finally:
        text.close()
    if not (len(recorded.work) or len(recorded.ops)):
        raise _without_work(path, start, recorded)
    return recorded


def _require_text(text: JsonText) -> None:
    """Raises UnreadableError, which says what a file is that is no text."""
    head = text.head.decode("latin-1")
    if head.startswith(("\xff\xfe", "\xfe\xff")):  # UTF-16
        return
    kinds, ending = trace_rules()["binaries"], text.path.suffix.lower()
    fits = [row for row in kinds if re.match(row["pattern"], head, re.DOTALL)]
    if fits:
        row = next((row for row in kinds if ending in row["ending"]), fits[0])
        raise UnreadableError(f"cannot read {text.path}: it is {row['what']}; {row['instead']}")


def _without_work(path: Path, start: str, recorded: RecordedTrace) -> UnreadableError:
    """start: of the file."""
    for row in trace_rules()["texts"]:
        if re.search(row["pattern"], start, re.DOTALL | re.MULTILINE):
            return UnreadableError(f"cannot read {path}: it is {row['what']}; {row['instead']}")
    there = ", ".join(f"{count} {name}" for name, count in recorded.categories.most_common(5))
    events = f" (its events: {there})" if there else ""
    return UnreadableError(f"cannot read {path}: neither kernels nor operators are in it{events}; {READ}")
