"""A trace as read: columns of numbers, with each name kept once, because a trace has millions of events.

Times are integers in nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from typing import Any, Literal

import numpy as np

from harness.serving.schema import Finding

NONE = -1


class Names(dict[Any, int]):
    """Values kept once each, with their numbers, which a column holds."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number

    def owners(self) -> tuple[list[Any], np.ndarray]:
        """Where the values are pairs: their first parts once each, and the number of each pair's."""
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
    """A trace as read, before anything is made of it.

    work:        what ran on devices: kernels, copies, fills
    launches:    calls that put work on a device; `graph`: 1 for the launch of a graph
    ops:         operators on CPU threads, nested by time
    spans:       annotations that mark steps
    threads:     (process, thread); streams: (device, stream)
    categories:  how many events of each category the file has, used or not
    lost:        what could not be taken, with how often and an example; truncated: the file breaks off
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
    """The distinct rows of columns of numbers from NONE on, and for each row which of them it is."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=NONE)) + 2) + (column - NONE)
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), of.reshape(-1)
