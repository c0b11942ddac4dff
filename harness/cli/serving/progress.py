"""Lines of progress of a long serving command, each with the seconds since it began."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def progress_to_stderr(quiet: bool) -> Callable[[str], None]:
    started = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

    return say
