"""rocprofv3's results as JSON (`--output-format json`).

Format: ROCm/rocprofiler-sdk source/lib/output/generateJSON.cpp. Times are in nanoseconds.
A dispatch names its kernel by a number that `kernel_symbols`, before or after it, resolves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.serving.trace.columns import NONE, RecordedTrace
from harness.serving.trace.json_stream import Keys

ROOT = "rocprofiler-sdk-tool"
LATEST = 1 << 62  # ns
SUFFIX = re.compile(r"( \[clone [^\]]*\])?(\.kd)?( \[clone [^\]]*\])?$")


def enter(keys: Keys) -> bool:
    """Every list of records comes one by one, each record whole."""
    return len(keys) <= 3 or (len(keys) == 4 and keys[3] != "*")


def read(values: Iterator[tuple[Keys, Any]], into: RecordedTrace) -> None:
    """Fills `into`. found: what incremental.items gives of the file with `enter`. Raises what `found` does,
    with what came before kept."""
    tool = _Tool(into)
    try:
        for keys, value in values:
            if keys[:1] == (ROOT,) and len(keys) > 2:
                tool.take(keys[2:], value)
    finally:
        tool.finish()


class _Tool:
    """The processes of one file, in their order; a kernel's number is of its process."""

    def __init__(self, into: RecordedTrace) -> None:
        self.into = into
        self.process = 0
        self.kernels: dict[tuple[int, Any], str] = {}
        self.pid: Any = None
        self.gpus: set[str] = set()
        self.lost = 0

    def take(self, keys: Keys, value: Any) -> None:
        if keys == ("metadata", "pid"):
            if self.pid is not None:
                self.process += 1
            self.pid = value
        if not isinstance(value, Mapping):
            return
        if keys == ("kernel_symbols", "*"):
            self.kernels[self.process, _plain(value.get("kernel_id"))] = _name(value)
        elif keys == ("agents", "*"):
            self._agent(value)
        elif keys == ("buffer_records", "kernel_dispatch", "*"):
            self._dispatch(value)
        elif keys == ("buffer_records", "memory_copy", "*"):
            self._copy(value)
        if keys[0] == "buffer_records":
            self.into.categories[keys[-2]] += 1

    def _agent(self, agent: Mapping[str, Any]) -> None:
        name = agent.get("product_name") or agent.get("name")
        if agent.get("type") == 2 and name:
            self.into.device_names[self._device(_handle(agent.get("id")))] = str(name)
            self.gpus.add(self._device(_handle(agent.get("id"))))

    def _copy(self, record: Mapping[str, Any]) -> None:
        """Of the GPU that it goes to, else the one that it comes from: the other end may be the host."""
        ends = [self._device(_handle(record.get(key))) for key in ("dst_agent_id", "src_agent_id")]
        device = next((end for end in ends if end in self.gpus), ends[0])
        self._add(("copy", "Memcpy"), device, _handle(record.get("stream_id")), record)

    def _dispatch(self, record: Mapping[str, Any]) -> None:
        info = record.get("dispatch_info")
        info = info if isinstance(info, Mapping) else {}
        queue = _handle(info.get("queue_id"))
        self._add(
            ("kernel", self.process, _plain(info.get("kernel_id"))),
            self._device(_handle(info.get("agent_id"))),
            queue,
            record,
        )

    def _device(self, agent: Any) -> str:
        return f"agent {agent}" if self.process == 0 else f"process {self.process}, agent {agent}"

    def _add(self, name: Any, device: str, queue: Any, record: Mapping[str, Any]) -> None:
        start, end = record.get("start_timestamp"), record.get("end_timestamp")
        if start is None or end is None or not sensible(start, end):
            self.lost += 1
            return
        into = self.into
        into.work.add(
            into.names.number(name), into.streams.number((device, queue)),
            start, end - start, NONE, NONE,
        )  # fmt: skip

    def finish(self) -> None:
        """Puts names where numbers stand, and says what was lost."""
        into = self.into
        if self.lost:
            into.note("unreadable", f"records left out, as their start and end make no sense: {self.lost}")
        names = {
            name: self.kernels.get(name[1:], f"kernel_id {name[2]}") if name[0] == "kernel" else name[1]
            for name in into.names.all()
        }
        nameless = sum(name[0] == "kernel" and name[1:] not in self.kernels for name in names)
        if nameless:
            into.note("unreadable", f"kernels that are not among kernel_symbols, known by number: {nameless}")
        _rename(into, names)


def _rename(into: RecordedTrace, names: Mapping[Any, str]) -> None:
    """Several numbers may have one name."""
    unique = type(into.names)()
    to = [unique.number(names[old]) for old in into.names.all()]
    for row, old in enumerate(into.work.name.tolist()):
        into.work.put(row, "name", to[old])
    into.names = unique


def _name(symbol: Mapping[str, Any]) -> str:
    """Demangled where rocprof could, without what the linker appended."""
    for key in ("formatted_kernel_name", "demangled_kernel_name", "kernel_name"):
        name = symbol.get(key)
        if isinstance(name, str) and not name.isdigit() and name:
            return SUFFIX.sub("", name)
    return f"kernel_id {symbol.get('kernel_id')}"


def sensible(start: Any, end: Any) -> bool:
    """Of nanoseconds since the machine's start. A record without a time has 0 (rocm-systems issue 5811)."""
    return type(start) is int and type(end) is int and 0 < start <= end < LATEST


def _handle(value: Any) -> Any:
    return _plain(value.get("handle") if isinstance(value, Mapping) else value)


def _plain(value: Any) -> Any:
    """As a key: numbers and texts stay."""
    return value if isinstance(value, (int, str)) else str(value)
