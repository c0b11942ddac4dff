"""Progress on stderr: the case and the time that is left, on a terminal in one line that changes. Elsewhere
each case and each stage gets a line, and a long stage one more each minute."""

from __future__ import annotations

import os
import sys
import time
from threading import Event, Thread
from typing import TextIO

from shapes.case import Case

BESIDE_S = 30.0  # the estimated seconds of a case beyond its budget, until the first case is measured
BEAT_S = 60.0  # seconds between the lines of a stage
MEASURING = "measuring"  # the stage in which something is timed


class Progress:
    """Shows progress, with the time that is left, estimated from the cases so far.

    During the stage MEASURING it prints only when a method is called, and no method is called during a
    sample, because a thread that redrew a clock would disturb the measurement. Other stages are not timed,
    and one request of theirs may take many minutes; so there a thread prints a line each minute.
    """

    def __init__(self, quiet: bool, file: TextIO | None = None) -> None:
        """quiet: print nothing; file: where to print; None means stderr."""
        self.quiet = quiet
        self.file = file or sys.stderr
        self.live = not quiet and self.file.isatty() and os.environ.get("TERM") != "dumb"
        # Moments are those of time.monotonic.
        self.started = time.monotonic()
        self.begun = 0  # the number of cases that have begun
        self.case_text = ""  # the present case, `[2/7] KEY`; empty before the first
        self.stage = ""  # the present stage of the case; empty before the first
        self.rounds_text = ""  # the rounds of this stage
        self.last_line = self.started  # the moment at which the last line was printed
        self.stage_is_over = Event()  # ends the thread of the present stage
        self.beating: Thread | None = None  # the thread that prints lines during the present stage
        self.expected_end = self.started  # the moment at which the run is expected to end

    def case(self, case: Case, to_go: int, budget_s: float) -> None:
        """Begins a case. to_go: how many cases the budget still suffices for, this one among them"""
        self._end_beat()
        now = time.monotonic()
        case_s = (now - self.started) / self.begun if self.begun else budget_s + BESIDE_S
        self.begun += 1
        self.expected_end = now + case_s * to_go
        self.case_text = f"[{self.begun}/{self.begun + to_go - 1}] {case.key}"
        self.stage = self.rounds_text = ""
        self._show(f"{self.case_text}; {self._left()}")

    def note(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self._erase()
        if not self.quiet:
            self.last_line = time.monotonic()
            print(line, file=self.file, flush=True)

    def say(self, stage: str) -> None:
        """Begins a stage of the case."""
        self._end_beat()
        self.stage = stage
        self.rounds_text = ""
        self._show(self._timed(stage))
        if stage != MEASURING and not self.quiet and not self.live:
            self.stage_is_over = Event()
            self.beating = Thread(target=self._beat, args=(self.stage_is_over, stage), daemon=True)
            self.beating.start()

    def rounds(self, made: int, spent_s: float, budget_s: float, between_blocks: bool = True) -> None:
        """Shows the rounds: on a terminal between blocks, elsewhere each minute. Never call it in a round."""
        self.rounds_text = f", {made} rounds, {spent_s:.0f} of {budget_s:.0f} s"
        if self.live and between_blocks:
            self._draw()
        elif not self.live and time.monotonic() - self.last_line >= BEAT_S:
            self.note(self._timed(f"still {self.stage}{self.rounds_text}"))

    def clear(self) -> None:
        """Clears the line before other output; the next call draws it again."""
        self._end_beat()
        self._erase()

    def _end_beat(self) -> None:
        self.stage_is_over.set()
        if self.beating:
            self.beating.join()
            self.beating = None

    def _beat(self, is_over: Event, stage: str) -> None:
        """Prints a line each minute until the stage is over."""
        while not is_over.wait(BEAT_S):
            self.note(self._timed(f"still {stage}"))

    def _timed(self, text: str) -> str:
        """A line with the seconds since the run began before the text."""
        return f"    {time.monotonic() - self.started:5.0f} s  {text}"

    def _erase(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=self.file, flush=True)

    def _show(self, line: str) -> None:
        """Draws the line of a terminal anew; elsewhere prints this line."""
        if self.live:
            self._draw()
        else:
            self.note(line)

    def _left(self) -> str:
        left_s = max(0.0, self.expected_end - time.monotonic())
        return f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"

    def _draw(self) -> None:
        """Draws the line. The text of the case is cut if the line is wider than the terminal."""
        from rich.console import Console

        if not self.case_text:
            return
        end = f"  {self.stage}{self.rounds_text}; {self._left()}" if self.stage else f"  {self._left()}"
        room = max(len("[1/2] ..."), Console(file=self.file).width - len(end) - 1)
        shown = self.case_text if len(self.case_text) <= room else self.case_text[: room - 3] + "..."
        self._erase()
        print(shown + end, end="", file=self.file, flush=True)
