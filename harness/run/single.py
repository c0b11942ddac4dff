"""One implementation on one case, without a run: `check`, and benchmarks for tools that make their rounds
themselves, such as pytest-benchmark. The implementation is checked, sampled, and checked again. A kernel that
only the calling process knows is measured in that process, by the same Bench that workers run."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.devices import last_level
from harness.errors import UsageError
from harness.files import explained
from harness.machine.cpu_threads import default_threads
from harness.machine.device import choose_device
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.plan import select
from harness.plan.entry import Entry, entry_of
from harness.plan.memory import Memory, rotation
from harness.plan.settings import Setting, parse_setting
from harness.run.checks import REFERENCE_S, SAMPLE_S, CaseChecks
from harness.run.device import own_device
from harness.run.folder import note_useless_folders
from harness.run.plan import Request
from harness.timing.rounds import is_given_up
from harness.workers.child.bench import Bench
from harness.workers.environment import worker_threads
from harness.workers.process import WorkerFailure, WorkerProcess, worker_pids
from harness.workers.worker import Deadlines, Worker, attempt
from kernels.op import Implementation, Unsupported, declared
from kernels.platform import Platform
from kernels.tuning import Tunable
from shapes.case import Case, parse

SAVED = ("output.pt", "reference.pt", "sigma.pt", "check.json")  # files that `check --save` writes
TRACEBACK = "traceback.txt"  # the file that it writes for a call that failed


class SingleEntry:
    """One entry at one case, with the worker that calls it."""

    def __init__(
        self,
        case: Case,
        worker: Worker,
        cache: str,
        monitor: Monitor,
        *,
        seed: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """worker: has this entry alone; cache: the mode of the rotation; say: shows the name of each phase"""
        self.case = case
        self.worker = worker
        self.monitor = monitor
        self.entry = worker.entries[0]
        memory = Memory(case, worker.platform, self.entry.impl.name, cache)
        fits = functools.partial(memory.fits, [self.entry])
        self.rotation = rotation(memory.op, memory.sizes, cache, last_level(worker.platform), fits=fits)
        self.disturbances: list[str] = []  # for each sample that was disturbed: by what
        self.samples = 0  # the number of samples, with the disturbed ones
        self.checks = CaseChecks(case=case, workers=[worker], say=say, seed=seed)

    def begin(self) -> None:
        """Checks the entry, and prepares it for samples. Does nothing where it is not supported."""
        if not self.entry.alive:
            return
        self.checks.before(self.rotation)
        if self.entry.alive and not self.entry.interpreted:
            attempt([self.entry], self.worker.fresh, self.rotation)
            attempt([self.entry], self.worker.prepare, self.entry)

    def sample(self) -> float:
        """Takes samples until one is quiet or measuring is given up. Returns seconds per call."""
        while True:
            self.monitor.begin()
            with self.monitor.watching(f"{self.case.key} {self.entry.name}"):
                seconds: float = self.worker.ask(self.entry, "sample", at_least_s=SAMPLE_S)["seconds"]
            self.samples += 1
            disturbance = self.monitor.end()
            if disturbance:
                self.disturbances.append(disturbance)
            if not disturbance or is_given_up(len(self.disturbances), self.samples):
                return seconds

    def end(self, profiled: bool = True) -> None:
        """Checks the entry again. profiled: whether to note what ran in a call, too"""
        self.checks.after(self.rotation, profiled)

    def facts(self, seconds: float | None) -> dict[str, Any]:
        """What is known of the entry besides its times: sizes, check and what ran; and its rates, if the
        `seconds` per call are given."""
        op = kernels.OPS[self.case.op]
        work = op.work(op.sizes(self.case.sizes), self.case.boundary)
        platform = self.worker.platform
        entry = self.entry
        facts: dict[str, Any] = {
            "op": self.case.op,
            "case": self.case.text,
            "boundary": self.case.boundary,
            "implementation": entry.impl.name,
            "version": entry.impl.version,
            "device": platform.name,
            "arch": platform.arch,
            "launch": entry.launch,
            "cache": self.rotation.mode,
            "check": entry.check,
            "kernels": [kernel["name"] for kernel in entry.kernels],
            "ran": entry.ran,
            "picked": entry.picked,
        }
        if self.disturbances:
            disturbed = f"{len(self.disturbances)} of {self.samples} samples"
            facts["disturbed"] = f"{disturbed}: {self.disturbances[-1]}"
        if seconds:
            facts |= {"tflops": work.flops / seconds / 1e12, "gbps": work.bytes / seconds / 1e9}
        return facts

    def save(self, folder: Path) -> list[Path]:
        """Writes the first wrong output, or the last one if all were right, with its reference and facts of
        the check (SAVED); and the traceback of a call that failed. Returns the files."""
        files = []
        log = self.worker.log
        printed = log.read_text("utf-8", errors="replace") if log.exists() else ""
        traceback = re.search("(Traceback \\(most recent|Fatal Python error).*", printed, re.DOTALL)
        if self.entry.status in ("error", "crashed") and traceback:
            (folder / TRACEBACK).write_text(traceback[0], encoding="utf-8")
            files.append(folder / TRACEBACK)
        saved = self.checks.judge.ask("save", REFERENCE_S, folder=str(folder.resolve()))
        if not saved:
            return files
        facts = {
            "implementation": self.entry.name,
            "version": self.entry.impl.version,
            "status": self.entry.status or "ok",
            "reason": self.entry.reason,
            **saved,
        }
        (folder / "check.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        return files + [folder / name for name in SAVED]

    def close(self) -> None:
        self.checks.close()


@dataclass(frozen=True)
class Checked:
    case: Case
    entry: Entry  # its status is None where it is right
    saved: Sequence[Path] = ()  # the files that were written


def check(request: Request, config: str | None, save: str | None, say: Callable[[str], None]) -> Checked:
    """Checks the implementation and the case that a request names. Raises UsageError for what cannot be
    understood, and NothingRan where another run has the device.

    config: the configuration of a tunable implementation, as text
    save:   a folder for SAVED and TRACEBACK
    say:    shows the name of each phase, and notes
    """
    assert request.op is not None and request.impl is not None
    platform = choose_device(request.device)
    op = select.choose_op(request.op)
    case = select.choose_one_case(op, request.case[0], request.boundary, platform.arch, "check")
    implementation = select.choose_implementation(op.name, request.impl)
    setting = parse_setting(request.set)
    launch = select.launches(platform, request.launch)[0]
    entry = entry_of(implementation, case, platform, launch, setting, _config(implementation, config))
    if not entry.alive:
        return Checked(case, entry)
    note_useless_folders([setting.variables], say)
    if save is not None:
        with explained(f"cannot write {save}"):
            Path(save).mkdir(parents=True, exist_ok=True)
            for file in (*SAVED, TRACEBACK):  # An earlier check may have left them.
                Path(save, file).unlink(missing_ok=True)
    threads = worker_threads(request.threads)
    deadlines = Deadlines(request.prepare_timeout, request.call_timeout)
    saved: list[Path] = []
    with (
        own_device(platform, shared=platform.kind == "cpu") as device,  # nothing is timed
        tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch,
    ):
        worker = Worker([entry], platform, threads, deadlines, Path(scratch) / "worker.log")
        cache = request.cache or "serving"
        single = SingleEntry(case, worker, cache, device.monitor, seed=request.seed or 0, say=say)
        try:
            single.begin()
            if entry.alive and not entry.interpreted:
                # The time of this sample is not used, but some kernels are wrong from their third call on.
                attempt([entry], worker.ask, entry, "sample", at_least_s=SAMPLE_S)
            single.end(profiled=False)
            if save is not None:
                saved = single.save(Path(save))
        except WorkerFailure as failure:
            entry.fail("error", f"the reference could not be computed or compared: {failure.reason}")
        finally:
            single.close()
    return Checked(case, entry, saved)


def _config(implementation: Implementation, text: str | None) -> dict[str, Any] | None:
    """A configuration written as in the names of rows: `block_m=16 stages=2`. Raises UsageError."""
    if text is None:
        return None
    if not isinstance(implementation, Tunable):
        raise UsageError(f"{implementation.name} takes no --config: it is not tunable")
    try:
        (texts,) = parse(text)  # also a ValueError where the text stands for several
    except ValueError:
        raise UsageError(f"cannot read --config {text!r}; write 'NAME=VALUE ...'") from None
    return {name: _value(value) for name, value in texts.items()}


def _value(text: str) -> Any:
    """True, False, None, an integer, or else the text itself."""
    number_or_text = int(text) if re.fullmatch(r"-?\d+", text) else text
    return {"True": True, "False": False, "None": None}.get(text, number_or_text)


def benchmark(
    platform: Platform,
    op: str,
    kernel: object,
    log: Path,
    *,
    case: str,
    boundary: str | None = None,
    cache: str,
    launch: str | None,
) -> SingleEntry:
    """A benchmark of a kernel. Raises UsageError for what cannot be understood.

    kernel: an implementation's name, an Implementation, or what `kernels.op.declared` takes
    log:    a file for what the worker prints
    launch: graph or eager; None: the default of the device
    """
    chosen = select.choose_one_case(select.choose_op(op), case, boundary, platform.arch, "benchmark")
    worker_class: type[Worker] = _WorkerHere
    if isinstance(kernel, str):
        impl = select.choose_implementation(op, kernel)
        worker_class = Worker
    elif isinstance(kernel, Implementation):
        impl = kernel
    elif callable(kernel):
        try:
            impl = declared(kernel, op, chosen.boundary)()
        except TypeError as error:
            raise UsageError(str(error)) from None
    else:
        raise UsageError(f"{kernel!r} is no kernel: give a function of (operands, out), or a name")
    impl.op = op
    entry = entry_of(impl, chosen, platform, select.launches(platform, launch)[0], Setting())
    if entry.interpreted:
        entry.fail("unsupported", "it is interpreted here: checked by `run`, never timed")
    worker = worker_class([entry], platform, default_threads(), Deadlines(), log)
    return SingleEntry(chosen, worker, cache, monitor_for(platform, worker_pids))


class _WorkerHere(Worker):
    """A worker without a process of its own, for a kernel that only this process knows."""

    def new_process(self) -> tuple[WorkerProcess, int]:
        import torch

        return _ThisProcess(Bench(*(entry.impl for entry in self.entries))), torch.get_num_threads()


class _ThisProcess(WorkerProcess):
    """Answers requests in this process."""

    alive = True

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def ask(self, request: str, deadline: float, **arguments: Any) -> Any:
        try:
            return getattr(self.bench, request)(**arguments)
        except Unsupported as error:
            raise WorkerFailure("unsupported", str(error)) from error
        except Exception as error:
            raise WorkerFailure("error", kernels.describe_error(error)) from error

    def pause(self) -> None:
        pass

    def kill(self) -> None:
        self.bench.close()
