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

import numpy as np

from harness.serving.trace.classify import marks_step
from harness.serving.trace.columns import NONE, Columns, RecordedTrace
from harness.serving.trace.json_stream import Keys

LONGEST_US = 1e12  # eleven days: beyond it a time is no time
MOST_SHAPES = 100_000  # different ones; the rest are not kept
PAIRED = ("work", "ops", "spans")
END = len(PAIRED)
WORK = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")  # the last two: of torch before 2022
LAUNCH = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver")

Taker = Callable[[Mapping[str, Any], Mapping[str, Any], int, int], "tuple[int, int] | None"]


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
        self.base: int | None = None  # us
        self.lost: Counter[str] = Counter()
        self.example: dict[str, str] = {}
        self.pairs = Columns(thread="i", at="q", kind="b", row="i")
        self.takers = {
            **dict.fromkeys(WORK, self._work),
            **dict.fromkeys(LAUNCH, self._launch),
            **dict.fromkeys(("cpu_op", "operator"), self._op),
            "user_annotation": self._span,
        }

    def take(self, event: Any) -> None:
        if not isinstance(event, dict):
            self._lose("an entry of traceEvents is no object", str(event)[:40])
            return
        category, phase = str(event.get("cat")), event.get("ph")
        taker = self.takers.get(category) or self.takers.get(category.lower())
        self.into.categories[category if "cat" in event else f"ph {phase}"] += 1
        if phase == "X" and taker:
            self._complete(event, taker)
        elif phase in ("B", "E"):
            self._half(event, taker if phase == "B" else None)

    def _complete(self, event: Mapping[str, Any], taker: Taker) -> None:
        start = self._start(event)
        if start is None:
            return
        length = self._ns(event.get("dur"))
        if length is None or length < 0:
            self._lose(
                f"a {event['cat']} event has no duration: counted with none", str(event.get("name"))[:60]
            )
            length = 0
        taker(event, _args(event), start, length)

    def _half(self, event: Mapping[str, Any], taker: Taker | None) -> None:
        """One of a pair that begins and ends; those of other categories nest between them and count too."""
        at = self._start(event)
        if at is None:
            return
        columns, row = (taker(event, _args(event), at, 0) if taker else None) or (NONE, NONE)
        kind = END if event["ph"] == "E" else columns
        self.pairs.add(self._thread(event), at, kind, row)

    def _start(self, event: Mapping[str, Any]) -> int | None:
        value = event.get("ts")
        if self.base is None:
            whole = _number(value)
            self.base = int(whole) if whole is not None and math.isfinite(whole) else None
        start = self._ns(value, self.base) if self.base is not None else None
        if start is None:
            self._lose(f"a {event.get('cat')} event has no time: left out", str(event.get("name"))[:60])
        return start

    def _work(
        self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int
    ) -> tuple[int, int]:
        into = self.into
        device = event.get(
            "pid", args.get("device")
        )  # Kineto's are one; where ranks were merged, pid differs
        stream = args.get("stream", event.get("tid"))
        row = into.work.add(
            into.names.number(str(event.get("name"))),
            into.streams.number((_plain(device), _plain(stream))),
            start, length, _id(args.get("correlation")), _id(args.get("External id")),
        )  # fmt: skip
        return PAIRED.index("work"), row

    def _launch(self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int) -> None:
        into = self.into
        graph = "GraphLaunch" in str(event.get("name"))
        into.launches.add(
            _id(args.get("correlation")), start, self._thread(event), graph, _id(args.get("External id"))
        )
        return  # when it ended does not matter

    def _op(
        self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int
    ) -> tuple[int, int] | None:
        into = self.into
        if marks_step(str(event.get("name"))):  # torch before 2022 has its steps among operators
            return self._span(event, args, start, length)
        shapes = NONE
        dims = args.get("Input Dims")
        if dims and (len(into.shapes) < MOST_SHAPES or str(dims) in into.shapes.numbers):
            shapes = into.shapes.number(str(dims))
        row = into.ops.add(
            into.names.number(str(event.get("name"))), self._thread(event), start, length,
            _id(args.get("External id")), shapes,
        )  # fmt: skip
        return PAIRED.index("ops"), row

    def _span(
        self, event: Mapping[str, Any], args: Mapping[str, Any], start: int, length: int
    ) -> tuple[int, int] | None:
        name = str(event.get("name"))
        if not marks_step(name):
            return None
        into = self.into
        return PAIRED.index("spans"), into.spans.add(
            into.names.number(name), self._thread(event), start, length
        )

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self.into.threads.number((_plain(event.get("pid")), _plain(event.get("tid"))))

    def finish(self) -> None:
        """Pairs B with E, thread by thread in the order of time, and says what was lost."""
        into, pairs = self.into, self.pairs
        stacks: dict[int, list[tuple[int, int, int]]] = {}
        for i in np.lexsort((pairs.at,)):
            thread, at, kind, row = (
                int(column[i]) for column in (pairs.thread, pairs.at, pairs.kind, pairs.row)
            )
            stack = stacks.setdefault(thread, [])
            if kind != END:
                stack.append((at, kind, row))
            elif stack:
                begun, kind, row = stack.pop()
                if kind != NONE:
                    getattr(into, PAIRED[kind]).put(row, "length", at - begun)
        for _, kind, _ in (entry for stack in stacks.values() for entry in stack if entry[1] != NONE):
            self._lose("an event begins and never ends: counted with no duration", f"of {PAIRED[kind]}")
        if len(into.shapes) >= MOST_SHAPES:
            into.note(
                "shapes", f"more than {MOST_SHAPES} different shapes: further ones are left out", "note"
            )
        for what, count in self.lost.items():
            into.note("unreadable", f"{count} times: {what}; e.g. {self.example[what]}")
        self.lost.clear()

    def _lose(self, what: str, example: str) -> None:
        self.lost[what] += 1
        self.example.setdefault(what, example)

    def _ns(self, value: Any, base: int = 0) -> int | None:
        """Nanoseconds from the base. A float of an absolute time loses them when it is multiplied: the base
        is taken off before."""
        number = _number(value)
        if number is None or not math.isfinite(number) or not -LONGEST_US <= number - base <= LONGEST_US:
            return None
        return round((number - base) * 1000)


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


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
