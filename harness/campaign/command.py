"""A step of a campaign that runs whole: a Python command which has a device for itself. The command is run by
the device's agent, and its files are brought back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import files
from harness.cluster.agent import Agent, Opened
from harness.cluster.driver import Job, Task
from harness.errors import NOTHING_RAN
from harness.files import JournalFull, JsonObject
from harness.paths import ROOT

LAST_CHARACTERS = 4000  # how much of the end of a command's output is brought back
RUN = (
    "import os, sys; from harness.workers.child.main import die_with_parent; die_with_parent(); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Python code that becomes `python ARGUMENTS`, and dies with the agent that started it."""


@dataclass(frozen=True)
class CommandDone:
    code: int | None  # the exit code; None where it was killed
    output: str  # the end of what it printed
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class CommandOrder:
    """The order to run `python` with arguments. `{out}` among them is a folder whose files are brought
    back."""

    arguments: Sequence[str]
    deadline_s: float  # seconds of wall-clock after which it is killed

    def obey(self, agent: Agent) -> CommandDone:
        """Releases the device first, because the command takes it itself. A command that does not end by
        itself is killed with all that it started."""
        agent.release()
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            out = Path(folder) / "out"
            out.mkdir()
            words = [argument.replace("{out}", str(out)) for argument in self.arguments]
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, *words],
                cwd=ROOT,
                env=os.environ | _environment(agent),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=self.deadline_s)
                code: int | None = process.returncode
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                printed, _ = process.communicate()
                code = None
            made = {file.relative_to(out).as_posix(): file for file in sorted(out.rglob("*"))}
            content = {name: file.read_bytes() for name, file in made.items() if file.is_file()}
        return CommandDone(code, printed[-LAST_CHARACTERS:], content)


def _environment(agent: Agent) -> dict[str, str]:
    """Variables with which a command sees the agent's device alone and uses the same number of threads."""
    platform, asked = agent.platform, agent.device.threads
    threads = {"OMP_NUM_THREADS": str(asked)} if asked else {}
    if platform.kind == "cpu":
        return threads | dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    if not platform.uuid.startswith(("GPU-", "MIG-")):
        return threads
    name = "CUDA_VISIBLE_DEVICES" if platform.kind == "cuda" else "ROCR_VISIBLE_DEVICES"
    return threads | {name: platform.uuid}


@dataclass
class CommandJob(Job):
    """It is done when the command's files are in its folder, `done.json` the last of them."""

    folder: Path
    arguments: Sequence[str]  # `{out}` among them stands for the folder
    wall_s: float  # expected; it is killed after twice as long
    on_done: Callable[[int | None, str], None]  # is told the exit code and the end of the output
    cases = 1

    def __post_init__(self) -> None:
        self.aside_s = self.wall_s
        if not self.done:
            self.waiting.append(Task(self.name, self.name))

    @property
    def file(self) -> Path:
        return self.folder / "done.json"

    @property
    def done(self) -> int:
        return int(self.file.exists())

    @property
    def statuses(self) -> dict[str, int]:
        """`ok`, or `error` for a command that failed; neither for one that could not do anything here."""
        try:
            code = json.loads(self.file.read_text())["code"]
        except (OSError, ValueError, KeyError):
            return {}
        return {} if code == NOTHING_RAN else {"error" if code else "ok": 1}

    def order(self, task: Task, left_s: float) -> CommandOrder:
        return CommandOrder(self.arguments, min(left_s, 2 * self.wall_s))

    def take(self, task: Task, result: Any, by: Opened, wall_s: float) -> float:
        facts: JsonObject = {
            "arguments": list(self.arguments),
            "code": result.code,
            "seconds": round(wall_s, 1),
            "device": by.used.name,
            "provenance": by.facts.provenance,
            "output": result.output,
        }
        written = dict(result.files)
        if result.code is not None:  # else it was killed at its time, which is longer in a longer campaign
            written[self.file.name] = (json.dumps(facts, indent=1) + "\n").encode()
        for name, content in written.items():
            with files.explained(f"cannot write to {self.folder / name}", error=JournalFull):
                files.replace(self.folder / name, content)
        self.on_done(result.code, result.output)
        return 0.0
