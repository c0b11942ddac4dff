"""Client processes: one for each run, or one forked from a process that stays.

Both begin runs from several threads at once, and know who can say what an ended run used.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from harness.errors import HarnessError
from harness.serving.live.process.guarded import Guarded, how_it_ended
from harness.serving.live.process.log import Log

GUARD_S = 40.0  # most that a guard takes to end what its command left
END_S = 5.0  # for a run to be killed


class ClientFailed(HarnessError):
    """It ended without a result: one line with its last words."""


class ClientRun(Protocol):
    """One run of a client. It has ended when its context has."""

    def wait(self, seconds: float) -> int | None:
        """Its exit code (negative: the signal), or None where it still runs after so long."""

    def last_words(self) -> str: ...

    def __enter__(self) -> ClientRun: ...

    def __exit__(self, *_: object) -> None: ...


class Processes(Protocol):
    def begin(self, command: Sequence[str], log: Path) -> ClientRun: ...

    def pids(self) -> list[int]:
        """Of all that run, and of those that can say what the ended ones used."""

    def close(self) -> None:
        """Ends all there is."""


class Separate:
    """A guarded process for each run; it ends with the run's context."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self._lock = threading.Lock()
        self._runs: list[Guarded] = []

    def begin(self, command: Sequence[str], log: Path) -> ClientRun:
        run = Guarded(command, self.environment, log, self.folder)
        with self._lock:
            self._runs = [*(run for run in self._runs if run.pids()), run]
        return run

    def pids(self) -> list[int]:
        return [pid for run in self._runs for pid in run.pids()]

    def close(self) -> None:
        pass


class Forked:
    """A program that takes orders as bench_serve.py does. It is started for the first run, and again for the
    one after its death; what a run used is its own then, as that of a child that has ended.

    log: takes what it says itself
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        self._start = lambda: _Staying(program, environment, log, folder)
        self._lock = threading.Lock()
        self._staying: _Staying | None = None

    def begin(self, command: Sequence[str], log: Path) -> ClientRun:
        """command: the run's arguments. Raises ClientFailed where the program has just died."""
        with self._lock:
            if self._staying is None or not self._staying.listens():
                self._end()
                self._staying = self._start()
            return self._staying.begin(command, log)

    def pids(self) -> list[int]:
        staying = self._staying
        return staying.process.pids() if staying else []

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._staying is not None:
            self._staying.end()
            self._staying = None


class _Staying:
    """The program from its start to its end."""

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = Guarded(program, environment, log, folder, stdin=theirs.fileno())

    def listens(self) -> bool:
        """It says nothing here: what can be read is the end."""
        return self._orders.fileno() >= 0 and not select.select([self._orders], [], [], 0)[0]

    def begin(self, arguments: Sequence[str], log: Path) -> ClientRun:
        output = Log(log)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as sink:
            try:
                order = json.dumps(list(arguments)).encode()
                socket.send_fds(self._orders, [order], [sink.fileno(), theirs.fileno()])
            except OSError:
                ours.close()
                raise self.died() from None
        return _ForkedRun(self, ours, output)

    def died(self) -> ClientFailed:
        """Its last words; nothing is left of it then."""
        with self._lock:
            code = self.process.wait(GUARD_S)
            self.process.end(0)
        how = "is gone" if code is None else how_it_ended(code)
        return ClientFailed(f"the process that runs are forked from {how}; {self.process.last_words()}")

    def end(self) -> None:
        with self._lock:
            self.process.end()
        self._orders.close()


class _ForkedRun:
    def __init__(self, staying: _Staying, channel: socket.socket, log: Log) -> None:
        self._staying, self._channel, self._log = staying, channel, log
        self._code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Raises ClientFailed where the process that it was forked from died."""
        if self._code is None:
            self._channel.settimeout(seconds)
            try:
                text = self._channel.recv(64)
            except TimeoutError:
                return None
            if not text:
                raise self._staying.died()
            self._code = int(text)
        return self._code

    def last_words(self) -> str:
        return self._log.last_words()

    def __enter__(self) -> ClientRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it where it still runs, and the process that it was forked from where that does not help."""
        with self._channel:
            if self._code is None:
                with contextlib.suppress(ClientFailed, OSError):
                    self._channel.shutdown(socket.SHUT_WR)
                    if self.wait(END_S) is None:
                        self._staying.end()
