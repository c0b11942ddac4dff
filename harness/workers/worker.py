"""A worker: the process of several entries. If it dies, one entry fails, and the others get a new process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from harness.plan.entry import Entry
from harness.plan.memory import Rotation
from harness.workers.child import BENCH
from harness.workers.environment import cache_environment, thread_environment
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.platform import Platform
from shapes.case import Case

P = ParamSpec("P")
Answer = TypeVar("Answer")
Request = tuple[str, dict[str, Any]]  # the name of a request, and its arguments


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of requests in seconds: preparing may compile for minutes, a call may not."""

    prepare: float = 900.0
    call: float = 120.0


class Worker:
    """The process of the entries of one setting and runtime. A process that replaces it repeats the requests
    that made the operands what they are: `open`, `fresh` and `load`."""

    def __init__(
        self, entries: list[Entry], platform: Platform, threads: int, deadlines: Deadlines, log: Path
    ) -> None:
        self.entries = entries
        self.platform = platform
        self.threads = threads
        self.deadlines = deadlines
        self.log = log
        self.process: WorkerProcess | None = None
        self.operand_requests: list[Request] = []  # the requests that made the operands what they are
        self.prepared: set[str] = set()  # entries that are prepared in this process
        self.ended = False  # whether no new process may start

    @property
    def living(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.alive]

    def new_process(self) -> tuple[WorkerProcess, int]:
        """A process in the setting's environment, and its number of threads. Raises WorkerFailure."""
        setting = self.entries[0].setting
        impl = self.entries[0].impl  # another one of its runtime needs the same environment
        environment = (
            thread_environment(self.platform, self.threads, setting.variables)
            | cache_environment(setting.name)
            | impl.environment(self.platform)
            | setting.variables
        )
        process = WorkerProcess(BENCH, environment, self.log, setting.tree, [impl.plugin])
        return process, int(environment.get("OMP_NUM_THREADS") or self.threads)

    def start(self) -> WorkerProcess:
        """Starts a process and makes its device ready. Raises WorkerFailure, also once the worker ended."""
        if self.ended:
            raise WorkerFailure("error", "its case has ended")
        process, threads = self.new_process()
        self.process = process
        process.hello(self.platform, threads, self.deadlines.prepare)
        self.prepared.clear()
        for entry in self.entries:
            entry.pinned = process.facts["pinned"]
        return process

    def stop(self) -> None:
        """Kills the process. The next request starts a new one."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def end(self) -> None:
        """Kills the process for good: a thread that still asks, as after control-C, starts no new one."""
        self.ended = True
        self.stop()

    def pause(self) -> None:
        """Suspends the process (SIGSTOP) until the next request."""
        if self.process is not None:
            self.process.pause()

    def living_process(self) -> WorkerProcess:
        """The process, or a new one with the same operands if it has died. Raises WorkerFailure."""
        process = self.process
        if process is None or not process.alive:
            process = self.start()
            for request, arguments in self.operand_requests:
                self._apply(process, request, arguments)
        return process

    def open(self, case: Case, seeds: dict[str, Any], second_seeds: dict[str, Any] | None = None) -> int:
        """Makes one or two sets of operands; no entry is prepared on them yet. Returns the last digest."""
        return self._change_operands([], "open", case=case, seeds=seeds, second_seeds=second_seeds)

    def fresh(self, rotation: Rotation) -> None:
        """Moves the operands to fresh buffers; no entry is prepared on them yet."""
        # Only `open`, the first request, comes before it: an earlier `fresh` or `load` no longer holds.
        self._change_operands(self.operand_requests[:1], "fresh", mode=rotation.mode, copies=rotation.copies)

    def load(self, seeds: dict[str, Any], set_index: int = 0) -> None:
        """Loads new live operands for all prepared entries, on one of the sets."""
        self._change_operands(self.operand_requests, "load", seeds=seeds, set_index=set_index)

    def _change_operands(self, before: list[Request], request: str, **arguments: Any) -> Any:
        """Makes a request that changes the operands. before: the earlier requests that still hold"""
        self.operand_requests = before  # what a process that is started for this request repeats before it
        process = self.living_process()
        self.operand_requests = [*before, (request, arguments)]
        return self._apply(process, request, arguments)

    def _apply(self, process: WorkerProcess, request: str, arguments: dict[str, Any]) -> Any:
        if request != "load":
            self.prepared.clear()
        return process.ask(request, self.deadlines.prepare, **arguments)

    def prepare(self, entry: Entry) -> None:
        """Prepares an entry on the present operands, unless it is prepared already."""
        process = self.living_process()
        if entry.name not in self.prepared:
            answer = process.ask(
                "prepare",
                self.deadlines.prepare,
                entry=entry.name,
                impl=entry.impl.name,
                launch=entry.launch,
                call=not entry.interpreted,  # the interpreter is slow
                config=entry.config,
                plugin=bool(entry.impl.plugin),
            )
            entry.setup_s = max(entry.setup_s, answer["seconds"])
            entry.synchronises = answer["synchronises"]
            entry.source = answer["source"]
            self.prepared.add(entry.name)

    def request(self, request: str) -> Any:
        """The answer to a request that is about no entry. Raises WorkerFailure."""
        return self.living_process().ask(request, self.deadlines.call)

    def ask(self, entry: Entry, request: str, **arguments: Any) -> Any:
        """The answer to a request about an entry, which is prepared where need be. Raises WorkerFailure."""
        self.prepare(entry)
        deadline = self.deadlines.prepare if entry.interpreted else self.deadlines.call
        assert self.process is not None
        return self.process.ask(request, deadline, entry=entry.name, **arguments)


def attempt(
    entries: Iterable[Entry], action: Callable[P, Answer], *arguments: P.args, **keywords: P.kwargs
) -> Answer | None:
    """The action's result; None where it raises WorkerFailure, which is then the failure of the entries."""
    try:
        return action(*arguments, **keywords)
    except WorkerFailure as failure:
        for entry in entries:
            entry.fail(failure.status, failure.reason)
        return None
