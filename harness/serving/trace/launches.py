"""Kernels of a trace, or operators where there are none, and what launched them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.serving.trace.columns import NONE, RecordedTrace, groups
from harness.serving.trace.critical_path import own_time
from harness.serving.trace.steps import processes_of


@dataclass(frozen=True)
class LaunchedWork:
    """Stretches of work, a row each; ns from the trace's first event on.

    name:   number in recorded.names; op: number of the operator that launched it, NONE if unknown
    calls:  1, or 0 where a stretch goes on with an operator that was interrupted by one inside it
    device: number in `devices`; stream: number of the stream or thread
    at, process, graph: as in steps.Rows
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


def kernels(recorded: RecordedTrace) -> LaunchedWork:
    """What ran on devices, each with the call and the operator that launched it, where the trace has them."""
    rows, launches, ops = recorded.work, recorded.launches, recorded.ops
    n = len(rows)
    launch = _find(launches.correlation, rows.correlation)
    _note_merged(recorded)
    launched = launch != NONE
    at, thread = np.full(n, NONE), np.full(n, NONE)
    at[launched], thread[launched] = launches.at[launch[launched]], launches.thread[launch[launched]]
    graph = np.zeros(n, dtype=bool)
    graph[launched] = launches.graph[launch[launched]] != 0
    op = _around(recorded, thread, at)
    op = np.where(op == NONE, _find(ops.external, rows.external), op)
    by_op = (op != NONE) & ~launched
    at[by_op], thread[by_op] = ops.start[op[by_op]], ops.thread[op[by_op]]
    op[graph] = NONE  # what replays a graph is around all of it
    streams = recorded.streams.all()
    devices = list(dict.fromkeys(device for device, _ in streams))
    device_of = np.array([devices.index(device) for device, _ in streams])
    return LaunchedWork(
        "gpu", devices, rows.name, np.where(op == NONE, NONE, _at(ops.name, op)),
        np.where(op == NONE, NONE, _at(ops.shapes, op)), np.ones(n, dtype=np.int8), device_of[rows.stream],
        rows.stream, rows.start, rows.start + rows.length, at, _process(recorded, thread), graph,
    )  # fmt: skip


def _note_merged(recorded: RecordedTrace) -> None:
    """Ids of calls are unique in a process only."""
    launches = recorded.launches
    known = launches.correlation != NONE
    process = _process(recorded, launches.thread)
    pairs, _ = groups(launches.correlation[known], process[known])
    shared = len(pairs) - len(np.unique(launches.correlation[known]))
    if shared:
        recorded.note(
            "merged",
            f"launches of several processes with the same id: {shared}; ranks were merged into one file, and "
            "which step a kernel is of cannot be told; take each rank's own file",
        )


def operators(recorded: RecordedTrace) -> LaunchedWork:
    """Operators of CPU threads, each without those inside it."""
    ops = recorded.ops
    row, start, end = own_time(ops.thread, ops.start, ops.start + ops.length)
    calls = np.zeros(len(row), dtype=np.int8)
    calls[np.unique(row, return_index=True)[1]] = 1
    thread = ops.thread[row]
    return LaunchedWork(
        "cpu", ["cpu"], ops.name[row], np.full(len(row), NONE), ops.shapes[row], calls,
        np.zeros(len(row), dtype=int), thread, start, end, ops.start[row], _process(recorded, thread),
        np.zeros(len(row), dtype=bool),
    )  # fmt: skip


def _process(recorded: RecordedTrace, thread: np.ndarray) -> np.ndarray:
    processes = processes_of(recorded)
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
