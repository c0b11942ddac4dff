"""A check of one implementation on one case, without timing: the checks of a run, and the tensors that were
compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import FAILED, NOTHING_RAN, OK, UsageError
from harness.machine.device import choose_device
from harness.plan import select
from harness.plan.entry import Entry, entry_name
from harness.plan.settings import parse_setting
from harness.run.case import rotation_of_one
from harness.run.checks import REFERENCE_S, SAMPLE_S, CaseChecks
from harness.run.device import OwnDevice, own_device
from harness.workers.environment import worker_threads
from harness.workers.process import WorkerFailure, start_judge
from harness.workers.worker import Deadlines, Worker, attempt
from kernels.op import Implementation
from kernels.tuning import Tunable
from shapes.case import Case, parse


@dataclass(frozen=True)
class CheckRequest:
    """The options of `check`, not yet interpreted."""

    op: str
    impl: str
    case: str
    boundary: str | None = None
    device: str | None = None
    cache: str | None = None
    launch: str | None = None
    set: Sequence[str] = ()
    config: str | None = None
    save: str | None = None  # a folder for the tensors
    seed: int | None = None
    threads: int | None = None
    prepare_timeout: float = 900.0
    call_timeout: float = 120.0


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    name: str
    case: Case
    status: str  # as of a cell: `ok` or `checked` where it is right
    reason: str
    check: dict[str, Any]
    saved: Sequence[Path] = ()  # the files that were written

    @property
    def exit_code(self) -> int:
        if self.status in ("ok", "checked"):
            return OK
        return NOTHING_RAN if self.status == "unsupported" else FAILED


def check(request: CheckRequest, say: Callable[[str], None]) -> Checked:
    """Checks an implementation; `say` is told each stage. Raises UsageError for what cannot be understood,
    and NothingRan where another run has the device."""
    platform, op = choose_device(request.device), select.choose_op(request.op)
    case = select.choose_one_case(op, request.case, request.boundary, platform.arch, "check")
    implementation = select.choose_implementation(op.name, request.impl)
    modes = select.launches(platform, request.launch)
    setting, config = parse_setting(request.set), _config(implementation, request.config)
    support = implementation.supports(case, platform)
    interpreted = support.ok and implementation.interpreted(platform)
    launch = modes[0] if implementation.captures and not interpreted else "eager"
    name = entry_name(implementation.name, setting.name, launch, platform.kind, config)
    entry = Entry(name, implementation, setting, launch, interpreted, config)
    if not support.ok:
        return Checked(name, case, "unsupported", support.reason, {})
    folder = _folder(request.save)
    with own_device(platform) as device:
        saved = _run(request, case, entry, device, folder, say)
    status = entry.status or ("checked" if interpreted else "ok")
    return Checked(name, case, status, entry.reason, entry.check, saved)


def _folder(save: str | None) -> Path | None:
    if save is None:
        return None
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {save}: {error.strerror}") from None
    return Path(save)


def _config(implementation: Implementation, text: str | None) -> dict[str, Any] | None:
    """A configuration written as in the names of rows: `block_m=16 stages=2`. Raises UsageError."""
    if text is None:
        return None
    if not isinstance(implementation, Tunable):
        raise UsageError(f"{implementation.name} takes no --config: it is not tunable")
    try:
        (words,) = parse(text)
    except ValueError:
        raise UsageError(f"cannot read --config {text!r}; write 'NAME=VALUE ...'") from None
    truths = {"True": True, "False": False, "None": None}
    config: dict[str, Any] = {}
    for name, value in words.items():
        if value in truths:
            config[name] = truths[value]
        elif value.lstrip("-").isdecimal():
            config[name] = int(value)
        else:
            config[name] = value
    return config


def _run(
    request: CheckRequest,
    case: Case,
    entry: Entry,
    device: OwnDevice,
    folder: Path | None,
    say: Callable[[str], None],
) -> list[Path]:
    """Runs the checks, which write down against the entry what is wrong. Returns the saved files."""
    platform, threads = device.platform, worker_threads(request.threads)
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        deadlines = Deadlines(request.prepare_timeout, request.call_timeout)
        worker = Worker([entry], platform, threads, deadlines, Path(scratch) / "worker.log")
        log = Path(scratch) / "judge.log"
        checks = CaseChecks(
            case=case,
            workers=[worker],
            start_judge=lambda: start_judge(platform, threads, deadlines.prepare, log),
            say=say,
            seed=request.seed or 0,
        )
        sets = rotation_of_one(entry, case, platform, request.cache or "serving")
        try:
            checks.before(sets)
            if entry.alive and not entry.interpreted:
                # The time of this sample is not used, but some kernels are wrong from their third call on.
                attempt([entry], worker.fresh, sets)
                attempt([entry], worker.ask, entry, "sample", at_least=SAMPLE_S)
            checks.after(sets)
            return _save(checks, entry, folder) if folder else []
        except WorkerFailure as failure:
            entry.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            return []
        finally:
            checks.close()


def _save(checks: CaseChecks, entry: Entry, folder: Path) -> list[Path]:
    """Writes the first wrong output, or the last one if all were right, with what it was judged by and the
    operands that it is the answer to."""
    kept = checks.judge.ask("save", REFERENCE_S, folder=str(folder.resolve()))
    if not kept:
        return []
    facts = {
        "implementation": entry.name,
        "version": entry.impl.version,
        "status": entry.status or "ok",
        "reason": entry.reason,
        **kept,
    }
    (folder / "check.json").write_text(json.dumps(facts, indent=1) + "\n")
    return [folder / name for name in ("output.pt", "reference.pt", "sigma.pt", "check.json")]
