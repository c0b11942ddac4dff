"""Work of a trace: kernels, or operators where there are none, and what launched them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.serving.op_classes import COMMUNICATION
from harness.serving.trace.classify import rule_of
from harness.serving.trace.columns import NONE, RecordedTrace


@dataclass(frozen=True)
class LaunchedWork:
    """Stretches of work, a row each; ns from the trace's first event on.

    name:   number in recorded.names; op: number of the operator that launched it, NONE if unknown
    calls:  1, or 0 where a stretch goes on with an operator that was interrupted by one inside it
    device: number in `devices`; stream: number of the stream or thread
    at:     when its launch was called; process: number of the one that launched it, NONE if unknown
    graph:  bool: launched by a graph
    """

    on: Literal["gpu", "cpu"]
    devices: Sequence[Any]
    name: np.ndarray
    op: np.ndarray
    shapes: np.ndarray
    calls: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    start: np.ndarray
    end: np.ndarray
    at: np.ndarray
    process: np.ndarray
    graph: np.ndarray


SAME_CALL_NS = 10**7  # a call may be recorded at two levels of the runtime, one within the other


def kernels(recorded: RecordedTrace) -> LaunchedWork:
    """What ran on devices, each with the call and the operator that launched it, where the trace has them."""
    work, launches, ops = recorded.work, recorded.launches, recorded.ops
    rows, length = serial(recorded)
    n, name, stream, begin = len(rows), work.name[rows], work.stream[rows], work.start[rows]
    launch = _find(launches.correlation, work.correlation[rows])
    _note_merged(recorded)
    launched = launch != NONE
    at, thread = np.full(n, NONE), np.full(n, NONE)
    at[launched], thread[launched] = launches.at[launch[launched]], launches.thread[launch[launched]]
    graph = np.zeros(n, dtype=bool)
    graph[launched] = launches.graph[launch[launched]] != 0
    op = _around(recorded, thread, at)
    op = np.where(op == NONE, _find(ops.external, work.external[rows]), op)
    by_op = (op != NONE) & ~launched
    at[by_op], thread[by_op] = ops.start[op[by_op]], ops.thread[op[by_op]]
    op[graph] = NONE  # what replays a graph is around all of it
    streams = recorded.streams.all()
    devices = list(dict.fromkeys(device for device, _ in streams))
    device_of = np.array([devices.index(device) for device, _ in streams])
    return LaunchedWork(
        "gpu", devices, name, np.where(op == NONE, NONE, _at(ops.name, op)),
        np.where(op == NONE, NONE, _at(ops.shapes, op)), np.ones(n, dtype=np.int8), device_of[stream],
        stream, begin, begin + length, at, _process(recorded, thread), graph,
    )  # fmt: skip


def _note_merged(recorded: RecordedTrace) -> None:
    """The id of a launch is unique in its process, and each process has its own trace."""
    launches = recorded.launches
    known = launches.correlation != NONE
    calls = np.stack([launches.correlation[known], _process(recorded, launches.thread)[known],
                      launches.at[known] // SAME_CALL_NS])  # fmt: skip
    shared = len(np.unique(calls, axis=1).T) - len(np.unique(calls[0]))
    if shared:
        recorded.note(
            "merged",
            f"launches with the same id: {shared}; traces of several ranks or runs were merged into one "
            "file, and which step a kernel is of cannot be told; take each one's own file",
        )


def operators(recorded: RecordedTrace) -> LaunchedWork:
    """Operators of CPU threads, each without those inside it."""
    ops = recorded.ops
    again = _again(ops.thread, ops.start, ops.name, ops.external, ops.length) & (ops.external != NONE)
    _note_again(recorded, "operators", again)
    once = np.flatnonzero(~again)
    row, start, end = own_time(ops.thread[once], ops.start[once], (ops.start + ops.length)[once])
    row = once[row]
    calls = np.zeros(len(row), dtype=np.int8)
    calls[np.unique(row, return_index=True)[1]] = 1
    thread = ops.thread[row]
    return LaunchedWork(
        "cpu", ["cpu"], ops.name[row], np.full(len(row), NONE), ops.shapes[row], calls,
        np.zeros(len(row), dtype=int), thread, start, end, ops.start[row], _process(recorded, thread),
        np.zeros(len(row), dtype=bool),
    )  # fmt: skip


def _process(recorded: RecordedTrace, thread: np.ndarray) -> np.ndarray:
    processes = recorded.processes()
    of_thread = np.array([processes.index(process) for process, _ in recorded.threads.all()] or [NONE])
    return np.where(thread == NONE, NONE, of_thread[np.maximum(thread, 0)])


def _find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The row in which each wanted id stands first; NONE where it is none or stands nowhere."""
    if not len(keys):
        return np.full(len(wanted), NONE)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    index = order[place]
    return np.where((wanted != NONE) & (keys[index] == wanted), index, NONE)


def _at(column: np.ndarray, row: np.ndarray) -> np.ndarray:
    return column[np.maximum(row, 0)] if len(column) else np.full(len(row), NONE)


def _around(recorded: RecordedTrace, thread: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The innermost operator that runs on a thread at a moment; NONE where there is none."""
    ops = recorded.ops
    operators = np.full(len(at), NONE)
    if not len(ops):
        return operators
    row, start, end = own_time(ops.thread, ops.start, ops.start + ops.length)
    stretch_thread = ops.thread[row]
    for number in np.unique(thread[thread != NONE]):
        launches, stretches = np.flatnonzero(thread == number), np.flatnonzero(stretch_thread == number)
        if not len(stretches):
            continue
        place = np.searchsorted(start[stretches], at[launches], side="right") - 1
        stretch = stretches[np.maximum(place, 0)]
        operators[launches] = np.where((place >= 0) & (at[launches] <= end[stretch]), row[stretch], NONE)
    return operators


# One stream is serial

NEIGHBOURS_NS = 10_000
"""So long kernels of one stream may overlap: programmatic dependent launch lets the next one begin up to 4 us
early, roctracer rounds by 27 ns."""
USUAL = 1.5  # times the median of its name: a longer kernel that runs over others has a wrong duration
UNUSUAL = 100  # times: for the last kernel of a stream, which no other follows
FOREVER = np.iinfo(np.int64).max // 2
FAR_NS = 3600 * 10**9  # from the others: no profiler records for hours
PIPELINED, MERGED = 0.02, 0.25
"""Parts of a stream's time that overlap: beyond the first it is said, beyond the second neighbours cannot."""


def serial(recorded: RecordedTrace) -> tuple[np.ndarray, np.ndarray]:
    """(rows of recorded.work that count, their lengths), int64 each. A stream runs one kernel after another:
    what cannot be so is noted, and not in the times.

    A kernel that stands twice counts once; one whose time is hours from all others does not count; one of
    more than its usual length that runs over its successors counts up to the next one's start.
    """
    work, names = recorded.work, recorded.names.all()
    again = _again(work.stream, work.start, work.name, work.length) & (work.length > 0)
    _note_again(recorded, "kernels", again)
    rows = np.flatnonzero(~again)
    rows = rows[np.lexsort((work.start[rows], work.stream[rows]))]
    far = np.abs(work.start[rows] - np.median(work.start[rows])) > FAR_NS
    if far.any() and 10 * far.sum() <= len(rows):
        recorded.note("far", f"kernels left out, as they begin hours before or after all others: {far.sum()}")
        rows = rows[~far]
    start, length, stream = work.start[rows], work.length[rows].copy(), work.stream[rows]
    until = np.append(start[1:], 0) - start  # to the start of the next
    until[np.append(stream[1:] != stream[:-1], True)] = FOREVER
    over, last = length > until + NEIGHBOURS_NS, until == FOREVER
    for number in np.unique(work.name[rows][over | last]):
        of_name = work.name[rows] == number
        many = of_name.sum() > 2
        others = length[of_name if many else of_name & ~over]
        usual = float(np.median(others)) if len(others) else 0.0
        wrong = of_name & over & (length > USUAL * usual)
        if many and rule_of(names[number]).op_class not in COMMUNICATION:  # which waits for other ranks
            wrong |= of_name & last & (length > UNUSUAL * usual)
        if not wrong.any():
            continue
        recorded.note(
            "too long",
            f"{names[number][:60]} lasts up to {length[wrong].max() / 1e3:.4g} us (usual: "
            f"{usual / 1e3:.4g}), longer than one stream allows: {wrong.sum()} of its calls are counted to "
            "the next kernel's start",
        )
        length[wrong] = np.where(last[wrong], round(usual), until[wrong])
    _note_overlap(recorded, start, length, stream)
    order = np.argsort(rows, kind="stable")
    return rows[order], length[order]


def _again(*columns: np.ndarray) -> np.ndarray:
    """bool [n]: rows that are the same as another one in all columns but the last, by which that one comes
    first."""
    order = np.lexsort(columns[::-1])
    again = np.zeros(len(order), dtype=bool)
    again[order[1:]] = np.logical_and.reduce([c[order][1:] == c[order][:-1] for c in columns[:-1]])
    return again


def _note_again(recorded: RecordedTrace, what: str, again: np.ndarray) -> None:
    if again.any():
        recorded.note(
            "twice",
            f"{what} that stand twice, of one name and start: {again.sum()}; counted once, but files or "
            "ranks were merged into this one",
        )


def _note_overlap(recorded: RecordedTrace, start: np.ndarray, length: np.ndarray, stream: np.ndarray) -> None:
    for number in np.unique(stream):
        on = stream == number
        begin, end = start[on], np.maximum.accumulate(start[on] + length[on])
        overlapped = np.maximum(end[:-1] - begin[1:], 0)
        overlapped = int(np.minimum(overlapped, length[on][1:]).sum())
        share = overlapped / max(int(length[on].sum()), 1)
        if share > PIPELINED:
            device, name = recorded.streams.all()[number]
            why = "programmatic dependent launch does that by a few us a kernel; else durations are wrong"
            if share > MERGED:
                why = (
                    "ranks or processes were merged into one file, or a graph's branches; take each one's own"
                )
            recorded.note(
                "merged" if share > MERGED else "overlap",
                f"kernels of stream {name} of device {device} overlap for {overlapped / 1e3:.4g} us, "
                f"{share:.0%} of their time, which one stream cannot: {why}",
                "wrong" if share > MERGED else "note",
            )


def own_time(
    thread: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(operator, start, end) of the stretches in which an operator of a thread runs and none inside it.

    One that begins inside another is inside it; where it ends after the other, the rest is its own. An
    operator that is never on its own has one stretch of no length. Stretches of a thread do not overlap.
    """
    rows, begins, ends = array("q"), array("q"), array("q")
    stack: list[tuple[int, int]] = []  # (operator, its end)
    shown = bytearray(len(start))
    now = 0

    def stretch(op: int, until: int) -> None:
        nonlocal now
        if until > now or not shown[op]:
            rows.append(op)
            begins.append(now)
            ends.append(max(until, now))
            shown[op] = True
        now = max(now, until)

    def close(until: float) -> None:
        while stack and stack[-1][1] <= until:
            stretch(*stack.pop())

    current = NONE
    for op, of, begin, end_of in _ordered(thread, start, end):
        if of != current:
            close(math.inf)
            current, now = of, begin
        close(begin)
        if stack:
            if begin > now:
                stretch(stack[-1][0], begin)
        else:
            now = max(now, begin)
        stack.append((op, end_of))
    close(math.inf)
    return tuple(np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, np.int64)
                 for column in (rows, begins, ends))  # type: ignore[return-value]  # fmt: skip


def _ordered(*columns: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """(row, thread, start, end), outer before inner, as plain integers; a part at a time, to save memory."""
    thread, start, end = columns
    order = np.lexsort((-end, start, thread))
    for first in range(0, len(order), 1 << 16):
        part = order[first : first + (1 << 16)]
        yield from zip(part.tolist(), *(column[part].tolist() for column in columns), strict=True)
