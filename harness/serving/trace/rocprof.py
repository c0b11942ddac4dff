"""rocprofv3's results as JSON (`--output-format json`).

Format: ROCm/rocprofiler-sdk source/lib/output/generateJSON.cpp. Times are in nanoseconds.
A dispatch names its kernel by a number that `kernel_symbols`, which stand before it, resolve.
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
        self.nameless: set[tuple[int, Any]] = set()

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
        self._add("Memcpy", device, _handle(record.get("stream_id")), record)

    def _dispatch(self, record: Mapping[str, Any]) -> None:
        info = record.get("dispatch_info")
        info = info if isinstance(info, Mapping) else {}
        kernel = self.process, _plain(info.get("kernel_id"))
        if kernel not in self.kernels:
            self.nameless.add(kernel)
        name = self.kernels.get(kernel, f"kernel_id {kernel[1]}")
        self._add(name, self._device(_handle(info.get("agent_id"))), _handle(info.get("queue_id")), record)

    def _device(self, agent: Any) -> str:
        return f"agent {agent}" if self.process == 0 else f"process {self.process}, agent {agent}"

    def _add(self, name: str, device: str, queue: Any, record: Mapping[str, Any]) -> None:
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
        """Says what was lost."""
        if self.lost:
            self.into.note(
                "unreadable", f"records left out, as their start and end make no sense: {self.lost}"
            )
        if self.nameless:
            self.into.note(
                "unreadable",
                f"kernels that are not among kernel_symbols, known by number: {len(self.nameless)}",
            )


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
