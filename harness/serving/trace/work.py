"""The work of a trace: kernels with what launched them, or operators if there are no kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from harness.serving.names import COMMUNICATION
from harness.serving.trace.classify import rule_of
from harness.serving.trace.profilers import NONE, RecordedTrace


@dataclass(frozen=True)
class LaunchedWork:
    """Stretches of work, one in each row of the arrays. Times are in ns.

    name:   number in recorded.names
    op:     number of the operator that launched it; shapes: of its inputs
    calls:  1, or 0 for a stretch in which an operator goes on after another one inside it
    device: number in `devices`; stream: number of the stream or thread
    at:     when its launch was called; process: number of the process that called
    graph:  bool, whether a graph launched it

    op, shapes, at and process are NONE if unknown.
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
    """What ran on devices, with the call and the operator that launched it, if the trace has them."""
    work, launches, ops = recorded.work, recorded.launches, recorded.ops
    row, length = serial(recorded)
    _note_merged(recorded)
    launch = _find(launches.correlation, work.correlation[row])
    at, thread = _taken(launches.at, launch), _taken(launches.thread, launch)
    op = _around(recorded, thread, at)
    op = np.where(op == NONE, _find(ops.external, work.external[row]), op)
    at = np.where(launch == NONE, _taken(ops.start, op), at)
    thread = np.where(launch == NONE, _taken(ops.thread, op), thread)
    graph = _taken(launches.graph, launch) == 1
    op[graph] = NONE  # the operator that replays a graph is around all of it
    devices, device_of = recorded.streams.owners()
    stream, start = work.stream[row], work.start[row]
    return LaunchedWork(
        "gpu", devices, work.name[row], _taken(ops.name, op), _taken(ops.shapes, op),
        np.ones(len(row), dtype=np.int8), device_of[stream], stream, start, start + length, at,
        _process(recorded, thread), graph,
    )  # fmt: skip


def operators(recorded: RecordedTrace) -> LaunchedWork:
    """The operators of CPU threads, each without those inside it."""
    ops = recorded.ops
    known = ops.external != NONE
    once = ~_again(recorded, "operators", known, ops.thread, ops.start, ops.name, ops.external, ops.length)
    once &= ~_far(recorded, "operators", ops.start)
    row, start, end = own_time(ops.thread[once], ops.start[once], (ops.start + ops.length)[once])
    row = np.flatnonzero(once)[row]
    calls = np.zeros(len(row), dtype=np.int8)
    calls[np.unique(row, return_index=True)[1]] = 1
    thread = ops.thread[row]
    return LaunchedWork(
        "cpu", ["cpu"], ops.name[row], np.full(len(row), NONE), ops.shapes[row], calls,
        np.zeros(len(row), dtype=int), thread, start, end, ops.start[row], _process(recorded, thread),
        np.zeros(len(row), dtype=bool),
    )  # fmt: skip


def _note_merged(recorded: RecordedTrace) -> None:
    """Notes a file of several traces, in which the id of a launch is not unique."""
    launches = recorded.launches
    order = np.lexsort((launches.at, launches.correlation))
    order = order[launches.correlation[order] != NONE]
    process = _process(recorded, launches.thread)[order]
    same = np.diff(launches.correlation[order]) == 0
    shared = same & ((np.diff(launches.at[order]) > SAME_CALL_NS) | (np.diff(process) != 0))
    if shared.any():
        recorded.note(
            "merged",
            f"launches with the same id: {shared.sum()}; traces of several ranks or runs were merged into "
            "one file, and which step a kernel belongs to is unknown; take each one's own file",
        )


def _process(recorded: RecordedTrace, thread: np.ndarray) -> np.ndarray:
    return _taken(recorded.threads.owners()[1], thread)


def _find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The first row with each wanted id; NONE if the id is NONE or there is no such row."""
    order = np.argsort(keys, kind="stable")
    row = np.append(order, NONE)[np.searchsorted(keys[order], wanted)]
    return np.where((wanted != NONE) & (np.append(keys, NONE)[row] == wanted), row, NONE)


def _taken(column: np.ndarray, row: np.ndarray) -> np.ndarray:
    """column[row], and NONE for rows that are NONE."""
    taken = np.full(len(row), NONE, dtype=np.int64)
    taken[row != NONE] = column[row[row != NONE]]
    return taken


def _around(recorded: RecordedTrace, thread: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The innermost operator that runs on a thread at a moment; NONE if there is none."""
    ops = recorded.ops
    found = np.full(len(at), NONE)
    row, start, end = own_time(ops.thread, ops.start, ops.start + ops.length)
    thread_of = ops.thread[row]
    for number in np.intersect1d(thread, thread_of):
        launches, stretches = np.flatnonzero(thread == number), np.flatnonzero(thread_of == number)
        place = np.searchsorted(start[stretches], at[launches], side="right") - 1
        stretch = stretches[np.maximum(place, 0)]
        found[launches] = np.where((place >= 0) & (at[launches] <= end[stretch]), row[stretch], NONE)
    return found


def own_time(
    thread: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operator, start and end of the stretches in which an operator of a thread runs and none inside it;
    int64 each, in the order of threads and time.

    An operator that begins inside another is inside it; if it ends after the other, the rest is its own. An
    operator that is never on its own has one stretch of no length. Stretches of a thread do not overlap.
    """
    found = np.fromiter(_stretches(thread, start, end), dtype=np.dtype((np.int64, 3)))
    return found[:, 0], found[:, 1], found[:, 2]


def _stretches(*columns: np.ndarray) -> Iterator[tuple[int, int, int]]:
    stack: list[tuple[int, int]] = []  # the operators that run: (operator, its end), the innermost last
    shown = bytearray(len(columns[0]))
    now, current = 0, NONE
    for op, thread, begin, end in chain(_ordered(*columns), [(NONE, NONE, 0, 0)]):  # the last one ends all
        while stack and (thread != current or stack[-1][1] <= begin):
            inner, until = stack.pop()
            if until > now or not shown[inner]:
                yield inner, now, max(until, now)
            now = max(now, until)
        if thread != current:
            current, now = thread, begin
        if stack and begin > now:
            outer, _ = stack[-1]
            yield outer, now, begin
            shown[outer] = True
        now = max(now, begin)
        stack.append((op, end))


def _ordered(*columns: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Row, thread, start and end as plain integers, outer before inner, in parts that save memory."""
    thread, start, end = columns
    order = np.lexsort((-end, start, thread))
    for first in range(0, len(order), 1 << 16):
        part = order[first : first + (1 << 16)]
        yield from zip(part.tolist(), *(column[part].tolist() for column in columns), strict=True)


# One stream is serial

NEIGHBOURS_NS = 10_000
"""How long a kernel may overlap the next one of its stream. Programmatic dependent launch lets that one begin
up to 4 us early, and roctracer rounds by 27 ns."""
ROUNDING_NS = 1_000  # by this much a kernel may seem to end before its predecessor
USUAL = 1.5  # times the median of its name: a longer kernel that runs over others has a wrong duration
UNUSUAL = 100  # times the median: for the last kernel of a stream, which no other follows
FOREVER = np.iinfo(np.int64).max // 2
FAR_NS = 3600 * 10**9  # from all others: no profiler records for hours
PIPELINED = 0.02  # of a stream's time: more overlap than this is noted
MERGED = 0.15  # of a stream's time: more overlap than this, without dependent launch, is wrong


def serial(recorded: RecordedTrace) -> tuple[np.ndarray, np.ndarray]:
    """The rows of recorded.work that count, and their lengths; int64 each.

    A stream runs one kernel after another. What contradicts that is noted and left out of the times: a kernel
    that is recorded twice counts once; one that begins hours from all others does not count; one that is
    longer than usual and runs over its successors counts until the next one starts.
    """
    work, names = recorded.work, list(recorded.names)
    again = _again(recorded, "kernels", work.length > 0, work.stream, work.start, work.name, work.length)
    rows = np.flatnonzero(~again)
    rows = rows[np.lexsort((work.start[rows], work.stream[rows]))]
    rows = rows[~_far(recorded, "kernels", work.start[rows])]
    start, length, stream = work.start[rows], work.length[rows].copy(), work.stream[rows]
    until = np.append(start[1:], 0) - start  # until the start of the next
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
        if wrong.any():
            recorded.note(
                "too long",
                f"{names[number][:60]} lasts up to {length[wrong].max() / 1e3:.0f} us (usual: "
                f"{usual / 1e3:.4g}), longer than one stream allows: {wrong.sum()} of its calls are counted "
                "up to the next kernel's start, or with the usual time where none follows",
            )
            length[wrong] = np.where(last[wrong], round(usual), until[wrong])
    for number in np.unique(stream):
        on = stream == number
        _note_overlap(recorded, number, start[on], length[on])
    order = np.argsort(rows, kind="stable")
    return rows[order], length[order]


def _far(recorded: RecordedTrace, what: str, start: np.ndarray) -> np.ndarray:
    """The few rows that begin hours from the others, as bool [n]."""
    far = np.abs(start - np.median(start)) > FAR_NS
    if far.any() and 10 * far.sum() <= len(far):
        recorded.note("far", f"{what} left out, as they begin hours before or after all others: {far.sum()}")
        return far
    return np.zeros(len(far), dtype=bool)


def _again(recorded: RecordedTrace, what: str, known: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """Rows in `known` that equal an earlier row in all columns but the last, the order; bool [n]."""
    order = np.lexsort(columns[::-1])
    again = np.zeros(len(order), dtype=bool)
    again[order[1:]] = np.logical_and.reduce([c[order][1:] == c[order][:-1] for c in columns[:-1]])
    again &= known
    if again.any():
        recorded.note(
            "twice",
            f"{what} recorded twice, with the same name and start: {again.sum()}; each counts once, but "
            "files or ranks were merged into this one",
        )
    return again


def _note_overlap(recorded: RecordedTrace, stream: int, start: np.ndarray, length: np.ndarray) -> None:
    """Notes overlap in one stream (kernels in the order of time) that dependent launch cannot make."""
    ended = np.maximum.accumulate(start + length)[:-1]  # the latest end so far
    overlap = np.clip(ended - start[1:], 0, length[1:])
    within = start[1:] + length[1:] < ended - ROUNDING_NS
    impossible = np.where(within, overlap, np.maximum(overlap - NEIGHBOURS_NS, 0))
    total = max(int(length.sum()), 1)
    wrong = impossible.sum() > MERGED * total
    if not wrong and overlap.sum() <= PIPELINED * total:
        return
    device, name = list(recorded.streams)[stream]
    why = "programmatic dependent launch does that for a few us a kernel; otherwise durations are wrong"
    if wrong:
        why = "ranks or processes were merged into one file, or branches of a graph; take each one's own file"
    recorded.note(
        "merged" if wrong else "overlap",
        f"kernels of stream {name} of device {device} overlap for {overlap.sum() / 1e3:.4g} us, "
        f"{overlap.sum() / total:.0%} of their time, but a stream runs one after another: {why}",
        "wrong" if wrong else "note",
    )
