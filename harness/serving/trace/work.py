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
    """Stretches of work, one in each row of the arrays. op, shapes, at and process are NONE if unknown."""

    on: Literal["gpu", "cpu"]
    devices: Sequence[Any]
    name: np.ndarray  # number in RecordedTrace.names
    op: np.ndarray  # number of the operator that launched it
    shapes: np.ndarray  # number of that operator's input shapes
    calls: np.ndarray  # 1, or 0 for a stretch in which an operator goes on after another one inside it
    device: np.ndarray  # number in `devices`
    stream: np.ndarray  # number of the stream or thread
    start: np.ndarray  # ns
    end: np.ndarray
    at: np.ndarray  # when its launch was called, ns
    process: np.ndarray  # number of the process that called
    graph: np.ndarray  # bool, whether a graph launched it


SAME_CALL_NS = 10**7  # a call may be recorded at two levels of the runtime, one within the other


def kernel_work(recorded: RecordedTrace) -> LaunchedWork:
    """What ran on devices, with the call and the operator that launched it, if the trace has them."""
    work, launches, ops = recorded.work, recorded.launches, recorded.ops
    row, length = serial(recorded)
    _note_merged(recorded)
    launch = _row_of_id(launches.correlation, work.correlation[row])
    at, thread = _take(launches.at, launch), _take(launches.thread, launch)
    op = _innermost_operator(recorded, thread, at)
    op = np.where(op == NONE, _row_of_id(ops.external, work.external[row]), op)
    at = np.where(launch == NONE, _take(ops.start, op), at)
    thread = np.where(launch == NONE, _take(ops.thread, op), thread)
    graph = _take(launches.graph, launch) == 1
    op[graph] = NONE  # the operator that replays a graph is around all of it
    devices, device_of = recorded.streams.owners()
    stream, start = work.stream[row], work.start[row]
    return LaunchedWork(
        on="gpu", devices=devices, name=work.name[row], op=_take(ops.name, op), shapes=_take(ops.shapes, op),
        calls=np.ones(len(row), dtype=np.int8), device=device_of[stream], stream=stream,
        start=start, end=start + length, at=at, process=_process(recorded, thread), graph=graph,
    )  # fmt: skip


def operator_work(recorded: RecordedTrace) -> LaunchedWork:
    """The operators of CPU threads, each without those inside it."""
    ops = recorded.ops
    columns = (ops.thread, ops.start, ops.name, ops.external)
    # Two equal rows without an id may be an operator and, inside it, another of the same name.
    is_again = _repeats(*columns, order_by=ops.length) & (ops.external != NONE)
    _note_repeated(recorded, "operators", is_again)
    counts = ~is_again & ~_hours_away(recorded, "operators", ops.start)
    row, start, end = own_time(ops.thread[counts], ops.start[counts], (ops.start + ops.length)[counts])
    row = np.flatnonzero(counts)[row]
    calls = np.zeros(len(row), dtype=np.int8)
    _, first_stretch = np.unique(row, return_index=True)
    calls[first_stretch] = 1
    thread = ops.thread[row]
    return LaunchedWork(
        on="cpu", devices=["cpu"], name=ops.name[row], op=np.full(len(row), NONE), shapes=ops.shapes[row],
        calls=calls, device=np.zeros(len(row), dtype=int), stream=thread, start=start, end=end,
        at=ops.start[row], process=_process(recorded, thread), graph=np.zeros(len(row), dtype=bool),
    )  # fmt: skip


def _note_merged(recorded: RecordedTrace) -> None:
    """Notes a file of several traces, in which the id of a launch is not unique."""
    launches = recorded.launches
    order = np.lexsort((launches.at, launches.correlation))
    order = order[launches.correlation[order] != NONE]
    process = _process(recorded, launches.thread)[order]
    same_id = np.diff(launches.correlation[order]) == 0
    other_call = (np.diff(launches.at[order]) > SAME_CALL_NS) | (np.diff(process) != 0)
    shared = same_id & other_call
    if shared.any():
        recorded.note(
            "merged",
            f"launches with the same id: {shared.sum()}; traces of several ranks or runs were merged into "
            "one file, and which step a kernel belongs to is unknown; take each one's own file",
        )


def _process(recorded: RecordedTrace, thread: np.ndarray) -> np.ndarray:
    """The number of the process of each thread; NONE for NONE."""
    return _take(recorded.threads.owners()[1], thread)


def _row_of_id(column: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """For each id the first row that has it in a column; NONE if the id is NONE or there is no such row."""
    if not len(column):
        return np.full(len(ids), NONE)
    order = np.argsort(column, kind="stable")
    place = np.searchsorted(column[order], ids)  # len(column) for an id above all others
    row = order[np.minimum(place, len(column) - 1)]
    return np.where((ids != NONE) & (column[row] == ids), row, NONE)


def _take(column: np.ndarray, row: np.ndarray) -> np.ndarray:
    """column[row], and NONE for rows that are NONE."""
    taken = np.full(len(row), NONE, dtype=np.int64)
    taken[row != NONE] = column[row[row != NONE]]
    return taken


def _innermost_operator(recorded: RecordedTrace, thread: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The innermost operator that runs on a thread at a moment; NONE if there is none."""
    ops = recorded.ops
    innermost = np.full(len(at), NONE)
    row, start, end = own_time(ops.thread, ops.start, ops.start + ops.length)
    stretch_thread = ops.thread[row]
    for number in np.intersect1d(thread, stretch_thread):
        moments, stretches = np.flatnonzero(thread == number), np.flatnonzero(stretch_thread == number)
        place = np.searchsorted(start[stretches], at[moments], side="right") - 1
        stretch = stretches[np.maximum(place, 0)]
        is_within = (place >= 0) & (at[moments] <= end[stretch])
        innermost[moments] = np.where(is_within, row[stretch], NONE)
    return innermost


def own_time(
    thread: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operator, start and end of the stretches in which an operator of a thread runs and none inside it;
    int64 each, in the order of threads and time.

    An operator that begins inside another is inside it; if it ends after the other, the rest is its own. An
    operator that is never on its own has one stretch of no length. Stretches of a thread do not overlap.
    """
    stretches = np.fromiter(_stretches(thread, start, end), dtype=np.dtype((np.int64, 3)))
    return stretches[:, 0], stretches[:, 1], stretches[:, 2]


def _stretches(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Operator, start and end of each stretch, as in `own_time`."""
    running: list[tuple[int, int]] = []  # the operators that run, with their ends; the innermost is the last
    has_stretch = bytearray(len(thread))
    now, current_thread = 0, NONE
    sentinel = (NONE, NONE, 0, 0)  # of no thread, so that all operators of the last thread end
    for op, op_thread, op_start, op_end in chain(_outer_first(thread, start, end), [sentinel]):
        while running and (op_thread != current_thread or running[-1][1] <= op_start):
            ended, until = running.pop()
            if until > now or not has_stretch[ended]:
                yield ended, now, max(until, now)
            now = max(now, until)
        if op_thread != current_thread:
            current_thread, now = op_thread, op_start
        if running and op_start > now:
            outer, _ = running[-1]
            yield outer, now, op_start
            has_stretch[outer] = True
        now = max(now, op_start)
        running.append((op, op_end))


def _outer_first(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Row, thread, start and end as plain integers, outer before inner, in parts that save memory."""
    order = np.lexsort((-end, start, thread))
    for first in range(0, len(order), 1 << 16):
        rows = order[first : first + (1 << 16)]
        columns = (rows, thread[rows], start[rows], end[rows])
        yield from zip(*(column.tolist() for column in columns), strict=True)


# One stream is serial

NEIGHBOURS_NS = 10_000
"""How long a kernel may overlap the next one of its stream. Programmatic dependent launch lets that one begin
up to 4 us early, and roctracer rounds by 27 ns."""
ROUNDING_NS = 1_000  # by this much a kernel may seem to end before its predecessor
TOO_LONG = 1.5  # times the median of its name: a longer kernel that runs over others has a wrong duration
LAST_TOO_LONG = 100  # times the median: for the last kernel of a stream, which no other follows
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
    work = recorded.work
    is_again = _repeats(work.stream, work.start, work.name, order_by=work.length) & (work.length > 0)
    _note_repeated(recorded, "kernels", is_again)
    rows = np.flatnonzero(~is_again)
    rows = rows[np.lexsort((work.start[rows], work.stream[rows]))]
    rows = rows[~_hours_away(recorded, "kernels", work.start[rows])]
    start, length, stream = work.start[rows], work.length[rows].copy(), work.stream[rows]
    _shorten(recorded, work.name[rows], stream, start, length)
    for number in np.unique(stream):
        on_stream = stream == number
        _note_overlap(recorded, number, start[on_stream], length[on_stream])
    order = np.argsort(rows, kind="stable")
    return rows[order], length[order]


def _shorten(
    recorded: RecordedTrace, name: np.ndarray, stream: np.ndarray, start: np.ndarray, length: np.ndarray
) -> None:
    """Corrects the lengths of kernels that are too long for their stream, in place. The rows are in the order
    of streams and time."""
    names = list(recorded.names)
    until_next = np.append(start[1:], 0) - start  # until the start of the next kernel
    until_next[np.append(stream[1:] != stream[:-1], True)] = FOREVER
    is_over, is_last = length > until_next + NEIGHBOURS_NS, until_next == FOREVER
    for number in np.unique(name[is_over | is_last]):
        of_name = name == number
        # One wrong length does not move the median of three or more. Of fewer only those that fit are usual.
        has_many = of_name.sum() > 2
        usual_lengths = length[of_name if has_many else of_name & ~is_over]
        usual = float(np.median(usual_lengths)) if len(usual_lengths) else 0.0
        wrong = of_name & is_over & (length > TOO_LONG * usual)
        # Communication may take long, because it waits for other ranks.
        if has_many and rule_of(names[number]).op_class not in COMMUNICATION:
            wrong |= of_name & is_last & (length > LAST_TOO_LONG * usual)
        if wrong.any():
            recorded.note(
                "too long",
                f"{names[number][:60]} lasts up to {length[wrong].max() / 1e3:.0f} us (usual: "
                f"{usual / 1e3:.4g}), longer than one stream allows: {wrong.sum()} of its calls are counted "
                "up to the next kernel's start, or with the usual time where none follows",
            )
            length[wrong] = np.where(is_last[wrong], round(usual), until_next[wrong])


def _hours_away(recorded: RecordedTrace, what: str, start: np.ndarray) -> np.ndarray:
    """The few rows that begin hours from the others, as bool [n]."""
    far = np.abs(start - np.median(start)) > FAR_NS
    if far.any() and 10 * far.sum() <= len(far):
        recorded.note("far", f"{what} left out, as they begin hours before or after all others: {far.sum()}")
        return far
    return np.zeros(len(far), dtype=bool)


def _repeats(*columns: np.ndarray, order_by: np.ndarray) -> np.ndarray:
    """The rows that equal another one in all columns, bool [n], except the first by `order_by`."""
    order = np.lexsort((order_by, *reversed(columns)))
    equals_previous = [column[order][1:] == column[order][:-1] for column in columns]
    again = np.zeros(len(order), dtype=bool)
    again[order[1:]] = np.all(equals_previous, axis=0)
    return again


def _note_repeated(recorded: RecordedTrace, what: str, again: np.ndarray) -> None:
    if again.any():
        recorded.note(
            "twice",
            f"{what} recorded twice, with the same name and start: {again.sum()}; each counts once, but "
            "files or ranks were merged into this one",
        )


def _note_overlap(recorded: RecordedTrace, stream: int, start: np.ndarray, length: np.ndarray) -> None:
    """Notes much overlap among a stream's kernels, given in the order of time. By programmatic dependent
    launch a kernel begins up to NEIGHBOURS_NS before its predecessor ends, but it does not end before it."""
    latest_end = np.maximum.accumulate(start + length)[:-1]  # of all kernels before each
    overlap = np.clip(latest_end - start[1:], 0, length[1:])
    ends_first = start[1:] + length[1:] < latest_end - ROUNDING_NS
    impossible = np.where(ends_first, overlap, np.maximum(overlap - NEIGHBOURS_NS, 0))
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
