"""Workers in this process: what answers is a worker's own, and what each spares is two seconds of importing
torch. For tests of what a run makes of answers, not of processes that die or hang."""

import contextlib
import functools
import importlib
import io
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.cli import main
from harness.run import case, checks
from harness.timing.rounds import Policy
from harness.workers.process import WorkerFailure
from kernels.op import Unsupported
from kernels.platform import Platform

#: Python 3.11 cannot parse sources in two threads (its issue 106905), and references are asked for beside.
PROCESS = threading.Lock()


class WorkerHere:
    """Like `harness.workers.process.WorkerProcess`, which it stands for."""

    def __init__(
        self,
        serves: str,
        environment: Mapping[str, str | None],
        log: Path,
        tree: str | None = None,
        plugins: Collection[str] = (),
    ) -> None:
        module, name = serves.split(":")
        self.served = getattr(importlib.import_module(module), name)()
        self.facts: dict[str, Any] = {}
        self.log, self.alive, self.pid = log, True, os.getpid()

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        try:
            with PROCESS:
                return getattr(self.served, request)(**arguments)
        except WorkerFailure as failure:
            self.alive = not failure.fatal
            raise
        except Unsupported as error:
            raise WorkerFailure("unsupported", str(error)) from error
        except Exception as error:
            with self.log.open("a") as log:
                traceback.print_exc(file=log)
            raise WorkerFailure("error", kernels.describe_error(error)) from error

    def hello(self, platform: Platform, threads: int, deadline: float) -> None:
        device = {"kind": platform.kind, "device": platform.device, "planned": platform.identity}
        self.facts = self.ask("hello", deadline, threads=threads, **device)

    def pause(self) -> None:
        pass

    def kill(self) -> None:
        self.alive = False


def use_workers_here(patch: pytest.MonkeyPatch) -> None:
    """Runs of this process start no other. Their samples are shorter, their rounds few, and calls rotate over
    few sets of operands, as for a small cache: nobody looks at the times. One call is profiled, not ten."""
    patch.setattr("harness.workers.worker.WorkerProcess", WorkerHere)
    patch.setattr("harness.workers.process.WorkerProcess", WorkerHere)
    patch.setattr("harness.run.case.last_level", lambda *_: 1 << 18)
    for module in (case, checks):
        patch.setattr(module, "SAMPLE_S", 0.002)
    patch.setattr(case, "Policy", functools.partial(Policy, blocks=8, max_rounds=5))
    patch.setattr("harness.workers.child.profile.CALLS", 1)


@contextlib.contextmanager
def captured_here() -> Iterator[tuple[pytest.MonkeyPatch, io.StringIO, io.StringIO]]:
    """Meanwhile runs start no process; stdout and stderr are written to what it gives."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        use_workers_here(patch)
        yield patch, out, err


def run_here(
    *arguments: object, plugin: Path | None = None, command: str = "run"
) -> subprocess.CompletedProcess[str]:
    """`python -m harness run ...` or another command in this process, workers too, with a file's rows."""
    with captured_here() as (patch, out, err):
        patch.setattr(sys, "argv", ["harness", command, *map(str, arguments)])
        if plugin is not None:
            patch.setenv(kernels.PLUGINS, str(plugin))
        # As workers do, which are this process; `tune` sees to it.
        patch.setattr(kernels, "_imports_plugins", command != "tune")
        kernels.implementations.cache_clear()
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        finally:
            kernels.implementations.cache_clear()
    return subprocess.CompletedProcess(sys.argv, code or 0, out.getvalue(), err.getvalue())
