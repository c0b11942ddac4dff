"""The parent's side of a child process: start it, ask it, give up on it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kernels
from harness.paths import ROOT, cache

# Freed memory stays in the process, as under the caching allocators that engines run with. Faulting it in
# anew at each call can be most of what an allocating call takes, and most of its noise.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
DEFAULTS = {
    # A worker that waits for its turn must not take a core from the one whose turn it is.
    "KMP_BLOCKTIME": "1",
    "HF_HUB_OFFLINE": "1",
    **ALLOCATOR,
}


_living: set[int] = set()


def worker_pids() -> list[int]:
    """The living workers of this process."""
    return sorted(_living)


class WorkerFailure(Exception):
    """A request that gave no answer. status: error, unsupported, crashed or timeout."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason

    @property
    def fatal(self) -> bool:
        """Whether the process is gone with it."""
        return self.status in ("crashed", "timeout")


class Worker:
    """One child process of a role (see worker.py), with its environment set before it starts; of the source
    tree in the folder `tree`, if that is not this one."""

    def __init__(
        self, role: str, environment: Mapping[str, str | None], log: Path, tree: str | None = None
    ) -> None:
        self.role = role
        self.log = log
        self.log_start = log.stat().st_size if log.exists() else 0
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "harness.worker", role, str(theirs.fileno())]
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=worker_environment(environment, tree),
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
        try:
            self.connection.send((request, arguments))
        except OSError:
            raise self._crashed(request) from None
        return self._answer(deadline, request)

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
        """Ends the process and whatever it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _living.discard(self.process.pid)


def worker_environment(extra: Mapping[str, str | None], tree: str | None = None) -> dict[str, str]:
    """Our defaults, over them the user's environment with the project first on the path, then `extra`, where
    None takes a variable away."""
    environment = dict(os.environ)
    path = [tree or str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    # Workers run in the project's folder, the user perhaps elsewhere.
    environment[kernels.PLUGINS] = os.pathsep.join(map(str, kernels.plugin_files()))
    whole = DEFAULTS | environment | dict(extra)
    return {name: value for name, value in whole.items() if value is not None}


def cache_environment(arm: str) -> dict[str, str]:
    """Compile caches of an arm's own: what one arm compiled must not serve another."""
    folder = arm
    if not re.fullmatch(r"\w{1,40}", arm):
        folder = f"{re.sub(r'[^A-Za-z0-9]+', '-', arm)[:40]}-{hashlib.sha256(arm.encode()).hexdigest()[:12]}"
    base = cache() / folder
    return {
        "TRITON_CACHE_DIR": str(base / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(base / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(base / "extensions"),
    }
