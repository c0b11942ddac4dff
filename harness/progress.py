"""Progress on stderr: where a run is and how long it will take. In a terminal a line that changes, elsewhere
one for each case and stage."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from shapes.case import Case

BESIDE_S = 30.0
"""What a case takes beside its budget, before one has shown it."""


@dataclass
class _Place:
    """Of a run: its case, how many cases the budget reaches, the case's stage, when the run ought to end."""

    case: Case
    number: int
    cases: int
    ends: float
    stage: str = ""
    rounds: str = ""


class Progress:
    """The time left is estimated from the cases so far. Nothing is printed but when a method is called, and
    none is called during a sample: a thread that redrew a clock would take its time from what is measured.

    quiet: prints nothing
    file:  where it prints, stderr if none is named
    """

    def __init__(self, quiet: bool, file: TextIO | None = None) -> None:
        self.quiet = quiet
        self.file = file or sys.stderr
        self.live = not quiet and self.file.isatty() and os.environ.get("TERM") != "dumb"
        self.started = time.monotonic()
        self.done = 0
        self.place: _Place | None = None

    def case(self, case: Case, to_go: int, budget_s: float) -> None:
        """The next case begins; `to_go` counts it and those the budget reaches after it."""
        now = time.monotonic()
        per_case = (now - self.started) / self.done if self.done else budget_s + BESIDE_S
        self.done += 1
        ends = now + per_case * to_go
        self.place = _Place(case, self.done, self.done + to_go - 1, ends)
        self._tell(f"[{self.done}/{self.place.cases}] {case.key}; {self._left()}")

    def note(self, line: str) -> None:
        """What is to stay on the screen."""
        self.clear()
        if not self.quiet:
            print(line, file=self.file, flush=True)

    def say(self, stage: str) -> None:
        """A stage of the case begins."""
        if self.place:
            self.place.stage, self.place.rounds = stage, ""
        self._tell(f"    {time.monotonic() - self.started:5.0f} s  {stage}")

    def rounds(self, made: int, spent_s: float, budget_s: float) -> None:
        """So many rounds were made; for the line of a terminal only, and to be called between blocks."""
        if self.place:
            self.place.rounds = f", {made} rounds, {spent_s:.0f} of {budget_s:.0f} s"
        if self.live:
            self._draw()

    def clear(self) -> None:
        """Makes room for other output; the next call draws the line again."""
        if self.live:
            print("\r\x1b[K", end="", file=self.file, flush=True)

    def _tell(self, line: str) -> None:
        if self.live:
            self._draw()
        else:
            self.note(line)

    def _left(self) -> str:
        left_s = max(0.0, self.place.ends - time.monotonic()) if self.place else 0.0
        return f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"

    def _draw(self) -> None:
        """The case is cut where the line were longer than the terminal is wide."""
        if not self.place:
            return
        at = self.place
        end = f"  {at.stage}{at.rounds}; {self._left()}" if at.stage else f"  {self._left()}"
        what = f"[{at.number}/{at.cases}] {at.case.key}"
        room = max(len("[1/2] ..."), self._columns() - len(end) - 1)
        cut = what if len(what) <= room else what[: room - 3] + "..."
        self.clear()
        print(cut + end, end="", file=self.file, flush=True)

    def _columns(self) -> int:
        from rich.console import Console

        return Console(file=self.file).width
