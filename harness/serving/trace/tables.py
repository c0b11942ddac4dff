"""Tables of kernels as CSV: rocprofv3's and its predecessors' kernel traces, and nsys stats' cuda_gpu_trace.

Formats: ROCm/rocprofiler-sdk source/lib/output/generateCSV.cpp; nsys stats --help-reports cuda_gpu_trace.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from itertools import islice

from harness.serving.clients.files import UnreadableError
from harness.serving.trace.columns import NONE, RecordedTrace
from harness.serving.trace.json_stream import JsonText
from harness.serving.trace.rocprof import SUFFIX, sensible

COLUMNS = {
    "name": ("kernel_name", "kernelname", "name"),
    "start": ("start_timestamp", "beginns", "start"),
    "end": ("end_timestamp", "endns"),
    "length": ("duration",),
    "device": ("agent_id", "gpu_id", "gpu-id", "device"),
    "queue": ("queue_id", "queue-id"),
    "stream": ("stream_id", "strm"),
}
"""Of each field its columns, in small letters and without a unit: of rocprof 3, 2 and 1, and of nsys."""
UNIT = re.compile(r" \((ns|us|μs|ms|s)\)$")
NS = {"ns": 1, "us": 1000, "μs": 1000, "ms": 10**6, "s": 10**9}
BEFORE = 30  # lines that nsys stats may print before the table


@dataclass(frozen=True)
class TableHeader:
    """delimiter: of cells; columns: the place of each field that is there; ns: of its unit of time"""

    delimiter: str
    columns: dict[str, int]
    ns: int


def read(text: JsonText, into: RecordedTrace) -> None:
    """Fills `into`, with nothing where there is no such table. Raises UnreadableError, or Truncated where the
    last row breaks off."""
    lines = text.lines()
    header = next(filter(None, map(_header, islice(lines, BEFORE))), None)
    if header is None:
        return
    into.source = "nsys" if "length" in header.columns else "rocprof"
    rows = csv.reader(lines, delimiter=header.delimiter)
    lost, bad = 0, False
    try:
        for row in filter(any, rows):
            bad = not _kernel(row, header, into)
            lost += bad
    except csv.Error as error:
        raise UnreadableError(f"cannot read {text.path}, line {rows.line_num}: {error}") from None
    if lost:
        into.note("unreadable", f"rows left out, as their start and end make no sense: {lost}")
    if bad and not text.text.endswith("\n"):
        raise text.truncated()


def _kernel(row: list[str], header: TableHeader, into: RecordedTrace) -> bool:
    """Whether the row is one, and was taken."""
    if len(row) <= max(header.columns.values()):
        return False
    cell = {field: row[column].strip() for field, column in header.columns.items()}
    try:
        if "length" in cell:
            start, length = (round(float(cell[field]) * header.ns) for field in ("start", "length"))
        else:
            start = int(cell["start"])
            length = int(cell["end"]) - start
    except ValueError:
        return False
    if not sensible(start, start + length):
        return False
    stream = tuple(cell[field] for field in ("queue", "stream") if field in cell)
    into.work.add(
        into.names.number(SUFFIX.sub("", cell["name"])),
        into.streams.number((cell.get("device", "0"), stream)),
        start, length, NONE, NONE,
    )  # fmt: skip
    into.categories["kernels"] += 1
    return True


def _header(line: str) -> TableHeader | None:
    """Of a line that names a kernel's name and times."""
    for delimiter in (",", "\t", ";"):
        names = [
            name.strip().lower().replace("µ", "μ")
            for name in next(csv.reader([line], delimiter=delimiter), [])
        ]
        plain = [UNIT.sub("", name) for name in names]
        columns = {
            field: plain.index(name)
            for field, known in COLUMNS.items()
            for name in reversed(known)
            if name in plain
        }
        if {"name", "start"} <= columns.keys() and columns.keys() & {"end", "length"}:
            unit = UNIT.search(names[columns["start"]])
            if unit or "end" in columns:
                return TableHeader(delimiter, columns, NS[unit[1]] if unit else 1)
    return None
