"""A worker process, the parent's side: start it, ask it, kill it where it hangs."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.paths import ROOT
from harness.plan.entry import Status
from harness.workers.child.blob import Unpickler, send
from harness.workers.environment import worker_environment
from kernels.platform import Platform

_living: set[int] = set()


def worker_pids() -> list[int]:
    """The living workers of this process."""
    return sorted(_living)


class WorkerFailure(Exception):
    """A request that gave no answer. status: error, unsupported, crashed or timeout."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason

    @property
    def fatal(self) -> bool:
        """Whether the process is gone with it."""
        return self.status in ("crashed", "timeout")


class _Plain(Unpickler):
    """Reads plain values and blobs only: an answer cannot make this process run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


class WorkerProcess:
    """One child process, with its environment set before it starts; of the source tree in the folder `tree`,
    if that is not this one, importing no other plug-ins than `plugins`.

    serves: `module:Class` of the object that answers, whose public methods are the requests
    facts:  what it said of itself and its device (see child/device.py)
    """

    def __init__(
        self,
        serves: str,
        environment: Mapping[str, str | None],
        log: Path,
        tree: str | None = None,
        plugins: Collection[str] = (),
    ) -> None:
        self.log = log
        self.facts: dict[str, Any] = {}
        self.paused = False
        self.log_start = log.stat().st_size if log.exists() else 0
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "harness.workers.child.main", serves, str(theirs.fileno())]
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=worker_environment(environment, tree, plugins),
                cwd=tree or ROOT,
                start_new_session=True,
            )
        theirs.close()
        _living.add(self.process.pid)
        self.connection = Connection(ours.detach())
        self._answer(deadline=120, doing="starting")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self.connection.closed

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        """Sends a request and waits at most `deadline` seconds for its answer; raises WorkerFailure."""
        # What it says of an earlier request is not what this one died of.
        self.log_start = self.log.stat().st_size
        self._signal(signal.SIGCONT)
        try:
            send(self.connection, (request, arguments))
        except OSError:
            raise self._crashed(request) from None
        return self._answer(deadline, request)

    def pause(self) -> None:
        """Stops the process, whatever threads it has, until it is asked again: nobody works beside a rival's
        sample. A killed parent takes a stopped worker with it all the same."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        pauses = number == signal.SIGSTOP
        if self.paused != pauses and self.alive:
            self.paused = pauses
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def hello(self, platform: Platform, threads: int, deadline: float) -> None:
        """Readies the device. Raises WorkerFailure."""
        device = {"kind": platform.kind, "device": platform.device, "planned": platform.identity}
        self.facts = self.ask("hello", deadline, threads=threads, **device)

    def _answer(self, deadline: float, doing: str) -> Any:
        try:
            if not self.connection.poll(deadline):
                self.kill()
                raise WorkerFailure("timeout", f"no answer within {deadline:g} s while in {doing}")
            kind, value = _Plain(self.connection.recv_bytes(), self.connection).load()
        except (EOFError, OSError):
            raise self._crashed(doing) from None
        except pickle.UnpicklingError as error:
            self.kill()
            raise WorkerFailure("error", f"its answer to {doing} is no plain value: {error}") from None
        if kind == "crashed":
            self.kill()
        if kind not in ("ok", "ready"):
            raise WorkerFailure(kind, value)
        return value

    def _crashed(self, doing: str) -> WorkerFailure:
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is not None and code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return WorkerFailure("crashed", f"the worker {how} while in {doing}{self._last_words()}")

    def _last_words(self) -> str:
        """The last line of its log before Python's own report of a fatal signal."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            text = log.read().decode(errors="replace").split("Fatal Python error", 1)[0]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"; its last words: {lines[-1][:120]}" if lines else ""

    def kill(self) -> None:
        """Ends the process and whatever it started; nothing where that was done."""
        if self.process.pid not in _living:
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _living.discard(self.process.pid)
