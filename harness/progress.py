"""Progress on stderr: one line per case and stage, with the time left."""

from __future__ import annotations

import sys
import time

from shapes.case import Case


class Progress:
    """Where a run is. The time left is estimated from the cases so far; quiet: prints nothing."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.started = time.monotonic()
        self.done = 0

    def case(self, case: Case, to_go: int, budget_s: float) -> None:
        """The next case begins; `to_go` counts it and those the budget reaches after it."""
        elapsed = time.monotonic() - self.started
        per_case = elapsed / self.done if self.done else budget_s + 30
        left = f"about {per_case * to_go / 60:.1f} min left" if self.done or to_go else ""
        self.done += 1
        self._line(f"[{self.done}/{self.done + to_go - 1}] {case.key}; {left}")

    def say(self, stage: str) -> None:
        """A stage of the case begins."""
        self._line(f"    {time.monotonic() - self.started:5.0f} s  {stage}")

    def _line(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)
