"""Columns of a trace while it is read: numbers, and names once each; no objects per event.

Times are integers in nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from harness.serving.schema import Finding

NONE = -1


class Names:
    """Values once each, known by their number."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def all(self) -> list[Any]:
        return list(self.numbers)


class Columns:
    """Rows of integers, a column each: 8 bytes for a `q`, 4 for an `i`."""

    def __init__(self, **kinds: str) -> None:
        self._columns = {name: array(kind) for name, kind in kinds.items()}
        self._append = [column.append for column in self._columns.values()]

    def add(self, *row: int) -> int:
        """Appends a row in the order of the columns; returns its number."""
        for append, value in zip(self._append, row, strict=True):
            append(value)
        return len(self) - 1

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_"):
            raise AttributeError(name)
        column = self._columns[name]
        return np.frombuffer(column, dtype=column.typecode) if column else np.zeros(0, dtype=column.typecode)

    def put(self, row: int, name: str, value: int) -> None:
        self._columns[name][row] = value


def groups(*columns: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(each row of numbers that the columns have, once; which of them each row is)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:  # numbers from NONE on
        key = key * (int(column.max(initial=NONE)) + 2) + (column - NONE)
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), of.reshape(-1)


@dataclass
class RecordedTrace:
    """A trace as read, before anything is made of it.

    work:        what ran on devices: kernels, copies, fills
    launches:    calls that put work on a device; `graph`: a graph's launch
    ops:         operators on CPU threads, nested by time
    spans:       annotations that mark steps
    threads:     (process, thread); streams: (device, stream)
    categories:  how many events of each category the file has, used or not
    """

    source: Literal["torch", "rocprof", "nsys"]
    names: Names = field(default_factory=Names)
    threads: Names = field(default_factory=Names)
    streams: Names = field(default_factory=Names)
    shapes: Names = field(default_factory=Names)
    work: Columns = field(
        default_factory=lambda: Columns(
            name="i", stream="i", start="q", length="q", correlation="q", external="q"
        )
    )
    launches: Columns = field(
        default_factory=lambda: Columns(correlation="q", at="q", thread="i", graph="b", external="q")
    )
    ops: Columns = field(
        default_factory=lambda: Columns(name="i", thread="i", start="q", length="q", external="q", shapes="i")
    )
    spans: Columns = field(default_factory=lambda: Columns(name="i", thread="i", start="q", length="q"))
    device_names: dict[Hashable, str] = field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None
    categories: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    truncated: bool = False

    def processes(self) -> list[Any]:
        """Those that threads are of."""
        return list(dict.fromkeys(process for process, _ in self.threads.all()))

    def note(self, rule: str, message: str, severity: Literal["wrong", "note"] = "wrong") -> None:
        self.findings.append(Finding(rule=rule, severity=severity, message=message))
