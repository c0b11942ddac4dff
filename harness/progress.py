"""Progress on stderr: which case a run measures and how long the run will take. A terminal shows one line
that changes; elsewhere each case and each stage gets a line, and a stage that lasts one more each minute."""

from __future__ import annotations

import os
import sys
import time
from threading import Event, Thread
from typing import TextIO

from shapes.case import Case

BESIDE_S = 30.0
"""An estimate of the seconds that a case takes besides its budget, until the first case has shown it."""


BEAT_S = 60.0  # between the lines of a stage
MEASURING = "measuring"


class Progress:
    """Estimates the time that is left from the cases so far. While something is measured it prints only when
    a method is called, and no method is called during a sample: a thread that redrew a clock would disturb
    what is measured. Preparing and checking are not timed, and one request of theirs may take many minutes;
    so a thread waits beside them. It ends before `say` begins to measure."""

    def __init__(self, quiet: bool, file: TextIO | None = None) -> None:
        """quiet: print nothing; file: where to print; None means stderr."""
        self.quiet = quiet
        self.file = file or sys.stderr
        self.live = not quiet and self.file.isatty() and os.environ.get("TERM") != "dumb"
        self.started = time.monotonic()
        self.done = 0
        """The number of cases that have begun."""
        self.what = ""
        """The case: `[2/7] KEY`; empty before the first."""
        self.stage = ""
        self.made = ""
        """The rounds of this stage."""
        self.told = self.started
        """When the last line was printed, by time.monotonic."""
        self.over = Event()
        """Ends the thread of the present stage."""
        self.beating: Thread | None = None
        self.ends = self.started
        """When the run is expected to end, by time.monotonic."""

    def case(self, case: Case, to_go: int, budget_s: float) -> None:
        """Begins a case. `to_go` counts it and the later cases that the budget suffices for."""
        self._end_beat()
        now = time.monotonic()
        per_case = (now - self.started) / self.done if self.done else budget_s + BESIDE_S
        self.done += 1
        self.ends = now + per_case * to_go
        self.what = f"[{self.done}/{self.done + to_go - 1}] {case.key}"
        self.stage = self.made = ""
        self._tell(f"{self.what}; {self._left()}")

    def note(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self._erase()
        if not self.quiet:
            self.told = time.monotonic()
            print(line, file=self.file, flush=True)

    def say(self, stage: str) -> None:
        self._end_beat()
        self.stage, self.made = stage, ""
        self._tell(self._stage(stage))
        if stage != MEASURING and not (self.quiet or self.live):
            self.over = Event()
            self.beating = Thread(target=self._beat, args=(self.over, stage), daemon=True)
            self.beating.start()

    def rounds(self, made: int, spent_s: float, budget_s: float, between_blocks: bool = True) -> None:
        """Shows the number of rounds in the line of a terminal between blocks, and elsewhere each minute. It
        must be called between rounds."""
        self.made = f", {made} rounds, {spent_s:.0f} of {budget_s:.0f} s"
        if self.live and between_blocks:
            self._draw()
        elif not self.live and time.monotonic() - self.told >= BEAT_S:
            self.note(self._stage(f"still {self.stage}{self.made}"))

    def clear(self) -> None:
        """Clears the line before other output; the next call draws it again."""
        self._end_beat()
        self._erase()

    def _end_beat(self) -> None:
        self.over.set()
        if self.beating:
            self.beating.join()
            self.beating = None

    def _beat(self, over: Event, stage: str) -> None:
        while not over.wait(BEAT_S):
            self.note(self._stage(f"still {stage}"))

    def _stage(self, what: str) -> str:
        return f"    {time.monotonic() - self.started:5.0f} s  {what}"

    def _erase(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=self.file, flush=True)

    def _tell(self, line: str) -> None:
        if self.live:
            self._draw()
        else:
            self.note(line)

    def _left(self) -> str:
        left_s = max(0.0, self.ends - time.monotonic())
        return f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"

    def _draw(self) -> None:
        """Draws the line. The text of the case is cut if the line is wider than the terminal."""
        from rich.console import Console

        if self.what:
            end = f"  {self.stage}{self.made}; {self._left()}" if self.stage else f"  {self._left()}"
            room = max(len("[1/2] ..."), Console(file=self.file).width - len(end) - 1)
            cut = self.what if len(self.what) <= room else self.what[: room - 3] + "..."
            self._erase()
            print(cut + end, end="", file=self.file, flush=True)
