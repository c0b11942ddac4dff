"""Log of a process: what it said before it died, for the line that says that it did."""

from __future__ import annotations

import contextlib
from pathlib import Path

LAST_WORDS = 200  # characters of the log in a message


class Log:
    """A file that is appended to; what stood in it before this object was made is not this one's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = path.stat().st_size if path.exists() else 0

    def last_words(self) -> str:
        """The last lines that say what went wrong, on one line, and where the log is."""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                file.seek(max(self.start, self.path.stat().st_size - 65536))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
            lines = [line for line in lines if line]
            errors = [i for i, line in enumerate(lines) if "Error" in line or "error:" in line]
            if lines:
                # The line after an error's name often says more than it.
                telling = " ".join(lines[errors[-1] :][:3]) if errors else lines[-1]
                return f"it said: {telling[:LAST_WORDS]!r} (log: {self.path})"
        return f"it said nothing (log: {self.path})"
