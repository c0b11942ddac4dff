"""The harness's side of a guarded process (guard.py): looked after, paused, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError
from harness.serving.live.process.log import Log

GUARD = Path(__file__).with_name("guard.py")
SWITCHED_S = 5.0  # most that a guard takes to stop or wake its processes


class Guarded:
    """A command whose whole tree of processes ends with this object, or with this process.

    log:   takes its stdout and stderr, appended; what it says there before it dies goes into the error
    stdin: a descriptor, which the command alone holds once it runs
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cwd: Path,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.command, self.log = list(command), log
        self.code: int | None = None
        self.pid: int | None = None
        self.paused = False
        self.switched = 0.0
        self._text = b""
        self._listening = threading.Lock()
        self._failed = ""
        orders, self._orders = os.pipe()
        self._words, words = os.pipe()
        self._log = Log(log)
        try:
            with log.open("ab") as sink:
                self.guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(orders), str(words), *command],
                    pass_fds=(orders, words),
                    stdin=stdin,
                    stdout=sink,
                    stderr=sink,
                    env=dict(environment),
                    cwd=cwd,
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
            self._listen(time.monotonic() + 30, lambda: self.pid is not None or self.code is not None)
        except BaseException:
            self.end(0)
            raise
        if self._failed:
            self.end(0)
            raise HarnessError(f"cannot start {self._failed}")

    def alive(self) -> bool:
        self._listen(until=time.monotonic())
        return self.code is None

    def wait(self, seconds: float) -> int | None:
        """Its exit code (negative: the signal), or None where it still runs after so long."""
        self._listen(until=time.monotonic() + seconds, wanted=lambda: self.code is not None)
        return self.code

    def pause(self) -> float:
        """Stops all its processes where they are (SIGSTOP): they take no CPU and keep their memory. When that
        was, by time.monotonic."""
        return self._switch("pause", True)

    def resume(self) -> float:
        """As `pause`."""
        return self._switch("resume", False)

    def _switch(self, order: str, paused: bool) -> float:
        before = self.switched
        self._order(order)
        until = time.monotonic() + SWITCHED_S
        self._listen(until, lambda: self.switched != before or self.code is not None)
        self.paused = paused
        return self.switched if self.switched != before else time.monotonic()

    def end(self, grace: float = 10.0) -> None:
        """Asks it to end, kills what is left after `grace` seconds, and comes back when nothing is left."""
        if self._orders < 0:
            return
        if self.alive():
            self._order(f"stop {grace:g}")
            self.wait(grace + 35)
        os.close(self._orders)
        os.close(self._words)
        self._orders = self._words = -1
        self.guard.wait(timeout=40)  # its pipe of orders is closed now: it ends in any case
        if self.code is None:
            self.code = self.guard.returncode

    def pids(self) -> list[int]:
        """Of the guard and all that stands under it."""
        if self.guard.poll() is not None:
            return []
        pids, queue = [], [self.guard.pid]
        while queue:
            pid = queue.pop()
            pids.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    queue += map(int, children.read_text().split())
        return pids

    def memory(self) -> int:
        """Bytes that its processes hold by themselves: the sum of proportional sets, or of resident ones."""
        return sum(map(_memory, self.pids()))

    def last_words(self) -> str:
        """See Log."""
        return self._log.last_words()

    def _order(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._orders, f"{line}\n".encode())

    def _listen(self, until: float, wanted: Callable[[], bool] = lambda: False) -> None:
        """One thread at a time: what it hears, another may have waited for."""
        with self._listening:
            while self._words >= 0 and not wanted():
                left = max(0.0, until - time.monotonic())
                ready, _, _ = select.select([self._words], [], [], left)
                if not ready or not self._hear():
                    return

    def _hear(self) -> bool:
        """Whether the guard is still there."""
        data = os.read(self._words, 4096)
        if not data:  # what it guarded died with it
            self.guard.wait()
            self.code = self.code if self.code is not None else self.guard.returncode
            return False
        self._text += data
        while b"\n" in self._text:
            line, self._text = self._text.split(b"\n", 1)
            self._heard(line.decode(errors="replace"))
        return True

    def _heard(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "started":
            self.pid = int(rest)
        elif word == "failed":
            self._failed, self.code = rest, 127
        elif word in ("paused", "resumed"):
            self.switched = float(rest)
        elif word == "ended" and self.code is None:
            self.code = int(rest)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _memory(pid: int) -> int:
    for file, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
            return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
    return 0


def how_it_ended(code: int) -> str:
    import signal

    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"
