"""torch.profiler's trace: Chrome's trace-event JSON as Kineto writes it.

Format: pytorch/kineto libkineto/src/output_json.cpp; the kinds of events are those of Chrome's trace events.
`ts` and `dur` are in microseconds, as integers, floats or text. A kernel's `correlation` is that of the
runtime call that launched it (the id of its `ac2g` flow too, so that flows are not needed); its `External id`
that of the operator around that call, in torch of 2024 and later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from harness.serving.trace.classify import marks_step
from harness.serving.trace.columns import NONE, RecordedTrace
from harness.serving.trace.json_stream import Keys

LONGEST_NS = 10**15  # eleven days: beyond it a duration is none
LATEST_US = 4e15  # of the year 2096: beyond it a time is no time
MOST_SHAPES = 100_000  # different ones; the rest are not kept
WORK = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "kernel_dispatch", "memory_copy")
"""Categories of work on devices; memcpy, memset: of torch before 2022; the last two: of rocprofv3's Perfetto
trace, converted to JSON."""
LAUNCH = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver")

Taker = Callable[[Mapping[str, Any], Mapping[str, Any], int, int], None]


def enter(keys: Keys) -> bool:
    """The events come one by one; whatever else the file has comes whole."""
    return keys in ((), ("traceEvents",))


def read(values: Iterator[tuple[Keys, Any]], into: RecordedTrace) -> None:
    """Fills `into`. found: what incremental.items gives of the file with `enter`; a bare list of events, as
    Chrome allows, gives them at ("*",). Raises what `found` does, with what came before kept."""
    events = Events(into)
    try:
        for keys, value in values:
            if keys[-1:] == ("*",):
                events.take(value)
            elif keys == ("deviceProperties",):
                _devices(value, into)
            elif keys == ("distributedInfo",) and isinstance(value, Mapping):
                into.rank, into.world_size = _count(value.get("rank")), _count(value.get("world_size"))
    finally:
        events.finish()


def _devices(value: Any, into: RecordedTrace) -> None:
    for device in value if isinstance(value, list) else ():
        if isinstance(device, Mapping) and device.get("name"):
            into.device_names[_plain(device.get("id"))] = str(device["name"])


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Events:
    """Takes events in any order and puts those that count into columns."""

    def __init__(self, into: RecordedTrace) -> None:
        self.into = into
        self.lost: Counter[str] = Counter()
        self.example: dict[str, str] = {}
        self.takers = {
            **dict.fromkeys(WORK, self._work),
            **dict.fromkeys(LAUNCH, self._launch),
            **dict.fromkeys(("cpu_op", "operator"), self._op),
            "user_annotation": self._span,
        }

    def take(self, event: Any) -> None:
        if not isinstance(event, dict):
            self._lose("an entry of traceEvents is no object", event)
            return
        category, phase = str(event.get("cat")), event.get("ph")
        taker = self.takers.get(category) or self.takers.get(category.lower())
        self.into.categories[category if "cat" in event else f"ph {phase}"] += 1
        if phase == "X" and taker:
            self._complete(event, taker)
        elif phase == "B" and taker:
            self._lose(f"a {category} event begins and ends apart (ph B, E): left out", event.get("name"))

    def _complete(self, event: Mapping[str, Any], taker: Taker) -> None:
        start, length, args = _ns(event.get("ts")), _ns(event.get("dur")), event.get("args")
        if start is None:
            self._lose(f"a {event['cat']} event has no time: left out", event.get("name"))
            return
        if length is None or not 0 <= length <= LONGEST_NS:
            self._lose(f"a {event['cat']} event has no duration: counted with none", event.get("name"))
            length = 0
        taker(event, args if isinstance(args, dict) else {}, start, length)

    def _work(self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int) -> None:
        device = event.get(
            "pid", args.get("device")
        )  # Kineto's are one; where ranks were merged, pid differs
        stream = args.get("stream", event.get("tid"))
        self.into.work.add(
            self._name(event), self.into.streams.number((_plain(device), _plain(stream))),
            start, length, _id(args.get("correlation")), _id(args.get("External id")),
        )  # fmt: skip

    def _launch(self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int) -> None:
        graph = "GraphLaunch" in str(event.get("name"))
        correlation, external = _id(args.get("correlation")), _id(args.get("External id"))
        self.into.launches.add(correlation, start, self._thread(event), graph, external)

    def _op(self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int) -> None:
        into = self.into
        if marks_step(str(event.get("name"))):  # torch before 2022 has its steps among operators
            self._span(event, args, start, length)
            return
        shapes = NONE
        dims = args.get("Input Dims")
        if dims and (len(into.shapes) < MOST_SHAPES or str(dims) in into.shapes.numbers):
            shapes = into.shapes.number(str(dims))
        external = _id(args.get("External id"))
        into.ops.add(self._name(event), self._thread(event), start, length, external, shapes)

    def _span(self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int) -> None:
        if marks_step(str(event.get("name"))):
            self.into.spans.add(self._name(event), self._thread(event), start, length)

    def _name(self, event: Mapping[str, Any]) -> int:
        return self.into.names.number(str(event.get("name")))

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self.into.threads.number((_plain(event.get("pid")), _plain(event.get("tid"))))

    def finish(self) -> None:
        """Says what was lost."""
        if len(self.into.shapes) >= MOST_SHAPES:
            self.into.note("shapes", f"more than {MOST_SHAPES} shapes: further ones are left out", "note")
        for what, count in self.lost.items():
            self.into.note("unreadable", f"{count} times: {what}; e.g. {self.example[what]}")

    def _lose(self, what: str, example: Any) -> None:
        self.lost[what] += 1
        self.example.setdefault(what, str(example)[:60])


def _ns(microseconds: Any) -> int | None:
    """Whole and broken microseconds apart: a product of the absolute time would lose nanoseconds."""
    number = _number(microseconds)
    if number is None or not math.isfinite(number) or not -LATEST_US <= number <= LATEST_US:
        return None
    whole = int(number)
    return whole * 1000 + round((number - whole) * 1000)


def _number(value: Any) -> int | float | Decimal | None:
    if isinstance(value, str):
        try:
            return Decimal(value)
        except InvalidOperation:
            return None
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def _id(value: Any) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < 2**63 else NONE


def _plain(value: Any) -> Any:
    """A process, thread, device or stream, as a key: numbers stay, the rest is text."""
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, (int, str)) else str(value)
