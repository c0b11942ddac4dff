"""A trace's file, whichever profiler wrote it, read into columns."""

from __future__ import annotations

from pathlib import Path

from harness.serving.clients.files import UnreadableError
from harness.serving.trace import kineto, rocprof
from harness.serving.trace.columns import RecordedTrace
from harness.serving.trace.json_stream import PIECE, JsonText, Truncated, items, opened


def read(path: Path, *, partial: bool = False) -> RecordedTrace:
    """Reads a trace in memory that grows with the number of its events, by less than 100 bytes each, not with
    its size. partial: of a file that breaks off, what comes before. Raises UnreadableError."""
    text = opened(path)
    try:
        recorded = RecordedTrace("rocprof" if _is_rocprof(text) else "torch")
        try:
            _fill(text, recorded)
        except Truncated:
            if not partial:
                raise
            recorded.truncated = True
            recorded.note("truncated", f"{path} breaks off: what its profiler wrote last is missing here")
        return recorded
    finally:
        text.close()


def _is_rocprof(text: JsonText) -> bool:
    text.peek()
    return rocprof.ROOT in text.text[:PIECE] if text.peek() == "{" else text.peek() != "["


def _fill(text: JsonText, recorded: RecordedTrace) -> None:
    if text.peek() not in ("{", "["):
        rocprof.read_csv(text, recorded)
        return
    format_ = rocprof if recorded.source == "rocprof" else kineto
    format_.read(items(text, format_.enter), recorded)
    if not (len(recorded.work) or len(recorded.ops)):
        raise UnreadableError(
            f"cannot read {text.path}: neither kernels nor operators are in it; wanted is a trace of "
            "torch.profiler (`traceEvents`) or rocprofv3 (`rocprofiler-sdk-tool`, or its kernel trace as CSV)"
        )
