"""Reads traces of profilers into columns. A file of another kind is refused with what it is.

torch.profiler: Chrome's trace events as JSON (pytorch/kineto libkineto/src/output_json.cpp). Times are in
microseconds, as integers, floats or text. The `correlation` of a kernel is that of the runtime call that
launched it. Its `External id`, in torch of 2024 and later, is that of the operator around the call.

rocprofv3: JSON (ROCm/rocprofiler-sdk source/lib/output/generateJSON.cpp). Times are in nanoseconds. A
           dispatch names its kernel by a number, which `kernel_symbols`, further up in the file, resolves.

Tables of kernels as CSV: of rocprofv3 (generateCSV.cpp, in the same folder), its predecessors, and nsys
stats.

Columns store each name once, because a trace has millions of events. Times are integers in nanoseconds, so
that sums are exact.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.errors import UnreadableError
from harness.json_stream import JsonText, Keys, Truncated, items
from harness.serving.schema import Finding
from harness.serving.trace.classify import step_rule, trace_rules

NONE = -1


class Names(dict[Any, int]):
    """Values that are stored once each. A column has their numbers."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number

    def owners(self) -> tuple[list[Any], np.ndarray]:
        """Of names (process, thread) the processes, of names (device, stream) the devices: each once; and for
        each name the place of its process or device in that list, int [n]."""
        owners = Names()
        numbers = np.array([owners[owner] for owner, _ in self], dtype=np.int64)
        return list(owners), numbers


class Columns:
    """Rows of integers; each column is an attribute, an array of its type code (`q`: int64, `i`, `b`)."""

    def __init__(self, **type_codes: str) -> None:
        self._columns = {name: array(code) for name, code in type_codes.items()}
        self._append = [column.append for column in self._columns.values()]

    def add(self, *row: int) -> None:
        for append, value in zip(self._append, row, strict=True):
            append(value)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getattr__(self, name: str) -> np.ndarray:
        return np.asarray(self._columns[name])


class RecordedTrace:
    """A trace as read.

    work:       what ran on devices: kernels, copies, fills
    launches:   calls that put work on a device; `graph` is 1 for the launch of a graph
    ops:        operators on CPU threads, nested by time
    spans:      annotations that mark steps
    threads:    (process, thread)
    streams:    (device, stream)
    categories: how many events of each category the file has, used or not
    lost:       what could not be read, with its count and an example
    truncated:  whether the file breaks off
    """

    def __init__(self) -> None:
        self.source: Literal["torch", "rocprof", "nsys"] = "torch"
        self.names, self.threads, self.streams, self.shapes = Names(), Names(), Names(), Names()
        self.work = Columns(name="i", stream="i", start="q", length="q", correlation="q", external="q")
        self.launches = Columns(correlation="q", at="q", thread="i", graph="b")
        self.ops = Columns(name="i", thread="i", start="q", length="q", external="q", shapes="i")
        self.spans = Columns(name="i", thread="i", start="q", length="q")
        self.device_names: dict[Hashable, str] = {}
        self.rank: int | None = None
        self.world_size: int | None = None
        self.categories = Counter[str]()
        self.lost: dict[str, tuple[int, str]] = {}
        self.findings: list[Finding] = []
        self.truncated = False

    def lose(self, what: str, example: Any) -> None:
        count, first = self.lost.get(what, (0, str(example)[:60]))
        self.lost[what] = count + 1, first

    def note(self, rule: str, message: str, severity: Literal["wrong", "note"] = "wrong") -> None:
        self.findings.append(Finding(rule=rule, severity=severity, message=message))


def groups(*columns: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The distinct rows of columns of numbers (NONE or more), and for each row its place among them."""
    key = np.zeros(len(columns[0]), dtype=np.int64)  # the numbers of a row as the digits of one number
    for column in columns:
        base = int(column.max(initial=NONE)) - NONE + 1
        key = key * base + (column - NONE)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), group.reshape(-1)


READABLE = (
    "wanted is a trace of torch.profiler (`traceEvents`) or rocprofv3 (`rocprofiler-sdk-tool`, or its kernel "
    "trace as CSV), or the CSV of nsys stats' cuda_gpu_trace"
)
CONTROL_BYTE = re.compile(rb"[\0-\x08\x0e-\x1f]")  # which no text has
ROCPROF = "rocprofiler-sdk-tool"


def read(path: Path, *, partial: bool = False) -> RecordedTrace:
    """Reads a trace, in less than 100 bytes of memory for each event, however large the file is. Raises
    UnreadableError. partial: whether what there is of a file that breaks off is read"""
    missing = "; what its profiler wrote last is missing, and shares would be wrong"
    text, into = JsonText(path, f"{missing} (--partial takes what there is)"), RecordedTrace()
    head = text.head.decode("latin-1")
    is_utf_16 = head.startswith(("\xff\xfe", "\xfe\xff"))
    try:
        first = text.peek()
        if first in ("{", "[") and (is_utf_16 or not CONTROL_BYTE.search(text.head[:16])):
            if first == "{" and ROCPROF in head:
                _read_rocprof(text, into)
            else:
                _read_torch(text, into)
        elif first:
            if not is_utf_16:
                _refuse_binary(path, head)
            _read_table(text, into)
    except Truncated:
        if not partial:
            raise
        into.truncated = True
        into.note("truncated", f"{path} breaks off: what its profiler wrote last is missing here")
    finally:
        text.close()
    for what, (count, example) in into.lost.items():
        into.note("unreadable", f"{'once' if count == 1 else f'{count} times'}: {what}; e.g. {example}")
    if not (len(into.work) or len(into.ops)):
        raise UnreadableError(f"cannot read {path}: {_what_else(head, into) if first else 'it is empty'}")
    return into


def _refuse_binary(path: Path, head: str) -> None:
    """Raises UnreadableError if the head is that of a known binary file, whose kind its name may tell."""
    kinds, ending = trace_rules()["binaries"], path.suffix.lower()
    fitting = [kind for kind in kinds if re.match(kind["pattern"], head, re.DOTALL)]
    if fitting:
        kind = next((kind for kind in kinds if ending in kind["ending"]), fitting[0])
        raise UnreadableError(f"cannot read {path}: it is {kind['what']}; {kind['instead']}")


def _what_else(head: str, into: RecordedTrace) -> str:
    """What a text is that has no kernels and operators."""
    for kind in trace_rules()["texts"]:
        if re.search(kind["pattern"], head, re.DOTALL | re.MULTILINE):
            return f"it is {kind['what']}; {kind['instead']}"
    events = ", ".join(f"{count} {name}" for name, count in into.categories.most_common(5))
    its_events = f" (its events: {events})" if events else ""
    return f"neither kernels nor operators are in it{its_events}; {READABLE}"


def _key(value: Any) -> Any:
    """A process, thread, device, stream or kernel as a key, which rocprofv3 may have in an object."""
    if isinstance(value, Mapping):
        value = value.get("handle")
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, (int, str)) else str(value)


# torch.profiler

LONGEST_NS = 10**15  # eleven days; nothing lasts longer
LATEST_US = 4e15  # the year 2096; no time is later
KIND = {category: kind for kind, categories in trace_rules()["events"].items() for category in categories}


def _read_torch(text: JsonText, into: RecordedTrace) -> None:
    """Reads the events one by one, from `traceEvents` or a bare list, and all else as whole values."""
    taken_apart = ((), ("traceEvents",))
    for keys, value in items(text, lambda keys: keys in taken_apart):
        if keys in (("*",), ("traceEvents", "*")):  # an item of either list
            _take_event(value, into)
        elif keys == ("deviceProperties",) and isinstance(value, list):
            for device in value:
                if isinstance(device, Mapping) and device.get("name"):
                    into.device_names[_key(device.get("id"))] = str(device["name"])
        elif keys == ("distributedInfo",) and isinstance(value, Mapping):
            rank, world_size = value.get("rank"), value.get("world_size")
            into.rank = rank if type(rank) is int else None
            into.world_size = world_size if type(world_size) is int else None


def _take_event(event: Any, into: RecordedTrace) -> None:
    if not isinstance(event, dict):
        into.lose("an entry of traceEvents is no object", event)
        return
    category, phase, name = str(event.get("cat")), event.get("ph"), str(event.get("name"))
    into.categories[category if "cat" in event else f"ph {phase}"] += 1
    kind = KIND.get(category) or KIND.get(category.lower())
    if kind and phase == "B":
        into.lose(f"a {category} event begins and ends apart (ph B, E): left out", name)
    if not kind or phase != "X":
        return
    start, length = _ns(event.get("ts")), _ns(event.get("dur"))
    if start is None:
        into.lose(f"a {category} event has no time: left out", name)
        return
    if length is None or not 0 <= length <= LONGEST_NS:
        into.lose(f"a {category} event has no duration: counted with none", name)
        length = 0
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    correlation, external = _id(args.get("correlation")), _id(args.get("External id"))
    if kind == "work":  # pid is the device; in merged files only pid tells devices apart
        device, stream = event.get("pid", args.get("device")), args.get("stream", event.get("tid"))
        stream = into.streams[_key(device), _key(stream)]
        into.work.add(into.names[name], stream, start, length, correlation, external)
        return
    thread = into.threads[_key(event.get("pid")), _key(event.get("tid"))]
    if kind == "launch":
        into.launches.add(correlation, start, thread, "GraphLaunch" in name)
    elif step_rule(name):  # torch before 2022 has its steps among operators
        into.spans.add(into.names[name], thread, start, length)
    elif kind == "op":
        dims = args.get("Input Dims")
        shapes = into.shapes[str(dims)] if dims else NONE
        into.ops.add(into.names[name], thread, start, length, external, shapes)


def _ns(microseconds: Any) -> int | None:
    """Nanoseconds, or None for what is no time. The fraction is converted apart, because the product of a
    large time and 1000 would round it."""
    try:
        number = Decimal(microseconds) if isinstance(microseconds, str) else microseconds
        if not -LATEST_US <= number <= LATEST_US:
            return None
    except (InvalidOperation, TypeError):
        return None
    whole = int(number)
    return whole * 1000 + round((number - whole) * 1000)


def _id(value: Any) -> int:
    """A correlation or external id; NONE for what is none."""
    value = _key(value)
    return value if isinstance(value, int) and 0 <= value < 2**63 else NONE


# rocprofv3

LATEST_NS = 1 << 62
GPU_AGENT = 2  # the type of an agent that is a GPU (rocprofiler_agent_type_t)
BAD_TIMES = "start and end of a kernel or copy make no sense: left out"
SUFFIX = re.compile(r"( \[clone [^\]]*\])?(\.kd)?( \[clone [^\]]*\])?$")  # the linker appends it to a name


def _read_rocprof(text: JsonText, into: RecordedTrace) -> None:
    """Reads the records of each list one by one."""
    into.source = "rocprof"
    process = _RocprofProcess(into, -1)
    # Records are items of (ROCPROF, "*", "agents") or of (ROCPROF, "*", "buffer_records", "kernel_dispatch"),
    # for example. What contains records is entered; the records themselves are whole values.
    for keys, value in items(text, lambda keys: len(keys) < 4 or (len(keys) == 4 and keys[3] != "*")):
        if keys == (ROCPROF, "*", "metadata", "pid"):
            process = _RocprofProcess(into, process.number + 1)
        if keys[:1] == (ROCPROF,) and len(keys) > 2:
            process.take(keys[2:], value)


class _RocprofProcess:
    """One process of a file, which has its own numbers of kernels."""

    def __init__(self, into: RecordedTrace, number: int) -> None:
        self.into, self.number = into, number
        self.kernels: dict[Any, str] = {}

    def take(self, keys: Keys, value: Any) -> None:
        if not isinstance(value, Mapping):
            return
        if keys[0] == "buffer_records":
            self.into.categories[keys[-2]] += 1
        if keys == ("kernel_symbols", "*"):
            self.kernels[_key(value.get("kernel_id"))] = _symbol(value)
        elif keys == ("agents", "*"):
            name = value.get("product_name") or value.get("name")
            if value.get("type") == GPU_AGENT and name:
                self.into.device_names[self._device(value.get("id"))] = str(name)
        elif keys == ("buffer_records", "kernel_dispatch", "*"):
            info = value.get("dispatch_info")
            info = info if isinstance(info, Mapping) else {}
            kernel = _key(info.get("kernel_id"))
            name = self.kernels.get(kernel, f"kernel_id {kernel}")
            if kernel not in self.kernels:
                self.into.lose("a kernel is not among kernel_symbols: it is known by its number", name)
            self._add(name, self._device(info.get("agent_id")), info.get("queue_id"), value)
        elif keys == ("buffer_records", "memory_copy", "*"):
            # The GPU that it goes to, or else the one that it comes from: the other end may be the host.
            ends = [self._device(value.get(key)) for key in ("dst_agent_id", "src_agent_id")]
            device = next((end for end in ends if end in self.into.device_names), ends[0])
            self._add("Memcpy", device, value.get("stream_id"), value)

    def _device(self, agent: Any) -> str:
        process = f"process {self.number}, " if self.number > 0 else ""
        return f"{process}agent {_key(agent)}"

    def _add(self, name: str, device: str, queue: Any, record: Mapping[str, Any]) -> None:
        start, end = record.get("start_timestamp"), record.get("end_timestamp")
        if type(start) is int and type(end) is int and _are_times(start, end):
            stream = self.into.streams[device, _key(queue)]
            self.into.work.add(self.into.names[name], stream, start, end - start, NONE, NONE)
        else:
            self.into.lose(BAD_TIMES, name)


def _symbol(symbol: Mapping[str, Any]) -> str:
    """The name of a kernel, demangled if rocprof could do so."""
    for key in ("formatted_kernel_name", "demangled_kernel_name", "kernel_name"):
        name = symbol.get(key)
        if isinstance(name, str) and name and not name.isdecimal():
            return SUFFIX.sub("", name)
    return f"kernel_id {symbol.get('kernel_id')}"


def _are_times(start: int, end: int) -> bool:
    return 0 < start <= end < LATEST_NS  # a record without a time has 0 (rocm-systems issue 5811)


# Tables of kernels as CSV

UNIT = re.compile(r" \((ns|us|μs|ms|s)\)$")
NS = {"ns": 1, "us": 1000, "μs": 1000, "ms": 10**6, "s": 10**9}
LINES_BEFORE = 30  # that nsys stats may print before the table


def _read_table(text: JsonText, into: RecordedTrace) -> None:
    """Reads a table of kernels; nothing if there is none. Raises Truncated if the last row breaks off."""
    lines = text.lines()
    header = next(filter(None, map(_header, islice(lines, LINES_BEFORE))), None)
    if header is None:
        return
    delimiter, columns, ns = header
    into.source = "nsys" if "length" in columns else "rocprof"
    rows, last_is_kernel = csv.reader(lines, delimiter=delimiter), True
    try:
        for row in filter(any, rows):
            last_is_kernel = _take_row(row, columns, ns, into)
            if not last_is_kernel:
                into.lose(BAD_TIMES, delimiter.join(row))
    except csv.Error as error:
        raise UnreadableError(f"cannot read {text.path}, line {rows.line_num}: {error}") from None
    if not last_is_kernel and not text.text.endswith("\n"):
        raise text.truncated()


def _header(line: str) -> tuple[str, dict[str, int], int] | None:
    """The delimiter, the place of each field, and the ns of a unit of time; None for a line that is no header
    of kernels' names and times."""
    known_columns: dict[str, list[str]] = trace_rules()["columns"]
    for delimiter in (",", "\t", ";"):
        cells = next(csv.reader([line], delimiter=delimiter), [])
        names = [cell.strip().lower().replace("µ", "μ") for cell in cells]
        plain = [UNIT.sub("", name) for name in names]
        columns: dict[str, int] = {}
        for field, known in known_columns.items():  # of several known names of a field the first counts
            places = [plain.index(name) for name in known if name in plain]
            if places:
                columns[field] = places[0]
        if {"name", "start"} <= columns.keys() and columns.keys() & {"end", "length"}:
            unit = UNIT.search(names[columns["start"]])
            if unit or "end" in columns:
                return delimiter, columns, NS[unit[1]] if unit else 1
    return None


def _take_row(row: list[str], columns: Mapping[str, int], ns: int, into: RecordedTrace) -> bool:
    """Takes the kernel of a row; False if the row has none."""
    if len(row) <= max(columns.values()):
        return False
    cell = {field: row[column].strip() for field, column in columns.items()}
    try:
        if "length" in cell:
            start, length = round(float(cell["start"]) * ns), round(float(cell["length"]) * ns)
        else:
            start, length = int(cell["start"]), int(cell["end"]) - int(cell["start"])
    except (ValueError, OverflowError):
        return False
    if not _are_times(start, start + length):
        return False
    queue = tuple(cell[field] for field in ("queue", "stream") if field in cell)
    stream = into.streams[cell.get("device", "0"), queue]
    into.work.add(into.names[SUFFIX.sub("", cell["name"])], stream, start, length, NONE, NONE)
    into.categories["kernels"] += 1
    return True
