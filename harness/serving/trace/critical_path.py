"""The critical path over intervals of time: what of a sum of durations is exposed on it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import numpy as np

from harness.serving.trace.columns import NONE


class Timeline:
    """The moments at which anything of one device begins or ends, and what runs between them.

    start, end: int64 [n], ns
    """

    def __init__(self, start: np.ndarray, end: np.ndarray) -> None:
        self.moments = np.unique(np.concatenate([start, end]))
        self.lengths = np.diff(self.moments)
        self._first = np.searchsorted(self.moments, start)
        self._last = np.searchsorted(self.moments, end)

    def running(self, which: np.ndarray) -> np.ndarray:
        """How many of the intervals `which` (bool [n]) run from each moment to the next: [moments - 1]."""
        size = len(self.moments)
        begun = np.bincount(self._first[which], minlength=size)
        ended = np.bincount(self._last[which], minlength=size)
        return np.cumsum(begun - ended)[:-1]

    def covered(self, which: np.ndarray) -> int:
        """Length of the union of the intervals `which`, ns."""
        return int(self.lengths[self.running(which) > 0].sum())

    def exposed(self, communicates: np.ndarray) -> np.ndarray:
        """What each interval has of the time on the critical path: float64 [n], ns; their sum is the union.

        Time in which anything computes belongs to what computes, in equal parts where several do; the rest to
        what communicates. So communication has what no computation covers.
        """
        computing, communicating = self.running(~communicates), self.running(communicates)
        compute = self._part(computing, computing > 0)
        communicate = self._part(communicating, (computing == 0) & (communicating > 0))
        part = np.where(communicates, communicate[self._last] - communicate[self._first], 0.0)
        part[~communicates] = (compute[self._last] - compute[self._first])[~communicates]
        return part

    def _part(self, running: np.ndarray, when: np.ndarray) -> np.ndarray:
        """One interval's part of the time up to each moment: [moments]."""
        each = np.where(when, self.lengths / np.maximum(running, 1), 0.0)
        return np.concatenate([[0.0], np.cumsum(each)])

    def alone(self, groups: np.ndarray) -> dict[int, int]:
        """For each group (int [n]), the time in which nothing of another runs, ns: what would surely be
        gained if it took none."""
        numbers = np.unique(groups)
        present = np.zeros(len(self.lengths), dtype=np.int16)
        for number in numbers:
            present += self.running(groups == number) > 0
        return {
            int(n): int(self.lengths[(self.running(groups == n) > 0) & (present == 1)].sum()) for n in numbers
        }


def gaps(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(after, length) of each stretch in which nothing runs: the number of the interval that begins next,
    and ns. start, end: int64 [n]."""
    order = np.argsort(start, kind="stable")
    length = start[order][1:] - np.maximum.accumulate(end[order])[:-1]
    after = np.flatnonzero(length > 0)
    return order[after + 1], length[after]


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
