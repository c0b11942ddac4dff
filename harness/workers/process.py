"""Child processes (workers, the judge's), from the parent's side: started, asked, killed."""

from __future__ import annotations

import contextlib
import os
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
from harness.workers.child import JUDGE
from harness.workers.environment import worker_environment
from kernels.platform import Platform

_living: set[int] = set()  # process ids of the workers that this process has started and not ended


def worker_pids() -> list[int]:
    return sorted(_living)


class WorkerFailure(Exception):
    """Why a request gave no answer."""

    def __init__(self, status: Status, reason: str) -> None:
        """status: error, unsupported, crashed or timeout"""
        super().__init__(reason)
        self.status = status
        self.reason = reason

    @property
    def fatal(self) -> bool:
        """Whether the process has ended, too."""
        return self.status in ("crashed", "timeout")


class WorkerProcess:
    """A child process that answers requests, with its environment set before it starts."""

    def __init__(
        self,
        serves: str,
        environment: Mapping[str, str | None],
        log: Path,
        tree: str | None = None,
        plugins: Collection[str] = (),
    ) -> None:
        """serves: `module:Class` of the object that answers; its public methods are the requests
        tree, plugins: see `worker_environment`
        """
        self.log = log
        self.facts: dict[str, Any] = {}  # what `hello` returned (see ready_device in child/device.py)
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
    def alive(self) -> bool:
        return self.process.poll() is None and not self.connection.closed

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        """Sends a request and waits at most `deadline` seconds for its answer; raises WorkerFailure."""
        doing = "prepare or its first call" if request == "prepare" else request
        # Lines that it printed during an earlier request do not explain a crash in this one.
        self.log_start = self.log.stat().st_size
        self._signal(signal.SIGCONT)
        try:
            self.connection.send((request, arguments))
        except OSError:
            raise self._crashed(doing) from None
        return self._answer(deadline, doing)

    def pause(self) -> None:
        """Suspends the process, with all its threads, until it is asked again, so that it takes no time from
        another worker's sample. A stopped worker also ends when its parent is killed."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        stops = number == signal.SIGSTOP
        if self.paused != stops and self.alive:
            self.paused = stops
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def hello(self, platform: Platform, threads: int, deadline: float) -> None:
        """Makes its device ready. Where that fails, the process is killed and WorkerFailure raised."""
        device = {"kind": platform.kind, "device": platform.device, "planned": platform.identity}
        try:
            self.facts = self.ask("hello", deadline, threads=threads, **device)
        except WorkerFailure:
            self.kill()
            raise

    def _answer(self, deadline: float, doing: str) -> Any:
        try:
            if not self.connection.poll(deadline):
                self.kill()
                raise WorkerFailure("timeout", f"no answer within {deadline:g} s while in {doing}")
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._crashed(doing) from None
        if kind == "crashed":
            self.kill()
        if kind not in ("ok", "ready"):
            raise WorkerFailure(kind, value)
        return value

    def _crashed(self, doing: str) -> WorkerFailure:
        """The failure of a process that has ended: how, and what it printed last. Kills what it started."""
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is not None and code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        line = self._last_line()[:120]
        words = f"; its last words: {line}" if line else ""
        return WorkerFailure("crashed", f"the worker {how} while in {doing}{words}")

    def _last_line(self) -> str:
        """The last line that it printed before Python's report of a fatal signal; empty without one."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            printed = log.read().decode(errors="replace").partition("Fatal Python error")[0]
        lines = printed.rstrip().splitlines()
        return lines[-1].strip() if lines else ""

    def kill(self) -> None:
        """Ends the process and all processes that it started. Does nothing the second time."""
        if self.process.pid not in _living:
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _living.discard(self.process.pid)


def start_judge(platform: Platform, threads: int, deadline: float, log: Path) -> WorkerProcess:
    """A process of child/judge.py whose device is ready within `deadline` seconds. Raises WorkerFailure."""
    # It is not timed, and it computes while other workers prepare: its threads are not bound and do not spin.
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    judge = WorkerProcess(JUDGE, environment if platform.kind == "cpu" else {}, log)
    judge.hello(platform, threads, deadline)
    return judge
