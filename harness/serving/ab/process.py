"""A guarded process (guard.py) as its parent sees it, and the log that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError

GUARD = Path(__file__).with_name("guard.py")
ENDED_S = 100.0  # most that a guard needs beyond the time that it gives its command
LAST_WORDS = 200  # characters of the log in a message


class Guarded:
    """A command whose whole tree of processes ends with this object, or with this process.

    log:   takes its stdout and stderr; what the command says there before it dies goes into the error
    keep:  a descriptor that stays open as long as anything of the command may be left
    grace: seconds between SIGTERM and SIGKILL; stop: a command that ends it, run before SIGTERM
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        keep: int,
        grace: float = 5.0,
        stop: Sequence[str] = (),
    ) -> None:
        self.log, self.grace, self.stop = log, grace, stop
        self.pid = 0
        self.code: int | None = None
        self._text, self._read, self._failed = b"", 0, ""
        orders, self._orders = os.pipe()
        self._words, words = os.pipe()
        fixed = [str(orders), str(words), str(keep), f"{grace:g}", json.dumps(list(stop))]
        try:
            with log.open("ab") as sink:
                self.guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), *fixed, *command],
                    pass_fds=(orders, words, keep),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env=dict(environment),
                    cwd=log.parent,
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._orders)
            os.close(self._words)
            raise
        finally:
            os.close(orders)
            os.close(words)
        try:
            while not self.pid and self.code is None:
                self._hear(60.0)
            if self._failed:
                raise HarnessError(f"cannot start {self._failed}")
        except BaseException:
            self.end()
            raise

    def wait(self, seconds: float = 0.0) -> int | None:
        """Its exit code (negative: the signal), or None where it still runs after so long."""
        until = time.monotonic() + seconds
        while self.code is None and self._hear(max(0.0, until - time.monotonic())):
            pass
        return self.code

    def end(self) -> None:
        """Comes back when nothing of it is left."""
        if self._orders < 0:
            return
        os.close(self._orders)
        self._orders = -1
        self.wait(self.grace * (2 if self.stop else 1) + ENDED_S)
        os.close(self._words)
        self.guard.wait(timeout=ENDED_S)

    def pids(self) -> list[int]:
        """Of all that stands under the guard."""
        pids, queue = [], [self.guard.pid]
        while queue:
            pid = queue.pop()
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    queue += map(int, children.read_text().split())
            pids.append(pid)
        return pids[1:]

    def said(self, pattern: re.Pattern[str]) -> str:
        """The first line of its log that matches, among those that no call has looked at; empty: none."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._read += end
            for line in data[:end].decode(errors="replace").splitlines():
                if pattern.search(line):
                    return line.strip()[:LAST_WORDS]
        return ""

    def last_words(self) -> str:
        """The last lines of the log that say what went wrong, on one line, and where the log is."""
        lines: list[str] = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 65536))
            lines = [
                line for line in map(str.strip, file.read().decode(errors="replace").splitlines()) if line
            ]
        errors = [i for i, line in enumerate(lines) if "Error" in line or "error:" in line]
        if not lines:
            return f"it said nothing (log: {self.log})"
        # The line after an error's name often says more than it.
        telling = " ".join(lines[errors[-1] :][:3]) if errors else lines[-1]
        return f"it said: {telling[:LAST_WORDS]!r} (log: {self.log})"

    def how_it_ended(self) -> str:
        code = self.code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
        return f"died of signal {-code}"

    def _hear(self, seconds: float) -> bool:
        """Whether the guard said something in that time."""
        if not select.select([self._words], [], [], seconds)[0]:
            return False
        data = os.read(self._words, 4096)
        if not data:  # the guard was killed, and what it guarded with it
            self.guard.wait()
            self.code = self.guard.returncode if self.code is None else self.code
            return False
        self._text += data
        while b"\n" in self._text:
            line, self._text = self._text.split(b"\n", 1)
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "started":
                self.pid = int(rest)
            elif word == "failed":
                self._failed, self.code = rest, 127
            else:
                self.code = int(rest)
        return True

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
