"""What a campaign prints: its plan, or the file that starts it on a cluster; a line for each case; and the
results in the end."""

from __future__ import annotations

import math
import re
import shlex
import string
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.campaign.execute import CampaignOutcome, CampaignRequest
from harness.campaign.plan import DEFAULTS, PlannedJob, ReadStep, jobs_of, planned_job, simulated, steps_of
from harness.catalogue.architectures import named_architecture, named_sheet
from harness.cli.run_display import TerminalDisplay
from harness.cluster.driver import Driver, Task
from harness.errors import UsageError
from harness.paths import ROOT, command
from harness.report import case_table
from harness.report.fitting_table import table_of
from harness.report.notes import spread_lines
from harness.report.rows import CaseResult
from harness.report.terminal import COMMAND, plain
from harness.results.comparison import spreads
from harness.results.schema import Record, Run
from harness.run.device import device_type
from harness.run.execute import Outcome
from kernels.engines import kind
from kernels.platform import Platform, named
from shapes.case import Case

FILES = ROOT / "docs" / "clusters"
NAMES = {"node": "node.sh", "slurm": "slurm.sbatch", "kuberay": "kuberay.yaml", "dstack": "dstack.yml"}
IMAGES = {"cuda": 'python: "3.12"', "rocm": "image: rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210"}
"""The line of dstack's file that says what it starts: its own image, or one that brings ROCm's torch."""


class CampaignTables(TerminalDisplay):
    """A `harness.campaign.execute.CampaignDisplay`: results on stdout, progress on stderr."""

    def __init__(self, quiet: bool, budget_s: float) -> None:
        super().__init__(quiet, sys.stdout)
        self.began = time.monotonic()
        self.budget_s = budget_s

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """Prints when each job is expected to begin and end, and what will not fit."""
        left_s = driver.ends - driver.clock()
        self.log(plan_text(simulated(list(driver.jobs.values()), counts, left_s), left_s))

    def task(self, task: Task, device: str, driver: Driver) -> None:
        expected = minutes(driver.jobs[task.job].expected_s)
        what = task.job if task.key == task.job else f"{task.job}: {task.key}"
        where = f" on {device}" if len(driver.members) > 1 else ""
        self.log(f"{self._clock()}  {what}{where}, about {expected} ...")

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        result = CaseResult.of(records)
        headline = plain(case_table.headline(result), 1000)
        bad = Counter(c.status for c in result.cells if c.status not in ("ok", "checked", "unsupported"))
        failed = "".join(f"; {n} {status}" for status, n in bad.items())
        self.print(f"{self._clock()}  {run.id}: {case.text}: {headline}{failed}")

    def command(self, step: str, code: int | None, output: str) -> None:
        how = "was stopped at its time" if code is None else f"ended with exit code {code}"
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        self.print(f"{self._clock()}  {step} {how}{f': {last}' if code else ''}")

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        """The folder of the campaign tells what was stored."""

    def end(self, run: Run, outcome: Outcome) -> None:
        """The campaign's end tells of all its runs."""

    def finish(self, outcome: CampaignOutcome) -> None:
        rows = [
            {"step": job.name, "done": f"{job.done} of {job.cases}",
             "rows": ", ".join(f"{n} {s}" for s, n in job.statuses.items())}
            for job in outcome.jobs
        ]  # fmt: skip
        self.print("")
        self.print(plain(table_of(rows)))
        self.print(f"\n{minutes(outcome.wall_s)} of {minutes(self.budget_s)}; recorded in {outcome.folder}")
        for line in spread_lines(spreads(outcome.calibrations)):
            self.print(line)
        archive = outcome.archive
        self.print(f"to carry home: {archive.file}, {archive.size / 1e6:.1f} MB")
        if archive.left_out:
            self.print(f"left out of it, as it would be too large: {', '.join(archive.left_out)}")
        if any(job.done < job.cases for job in outcome.jobs):
            self.print(f"the rest:\n{COMMAND}{command('campaign', '--resume', outcome.folder)}")
        if any(job.done for job in outcome.jobs):
            self.print(f"as pictures:\n{COMMAND}{command('report', outcome.folder, '--open')}")

    def _clock(self) -> str:
        return f"[{minutes(time.monotonic() - self.began)}]"


def plan_text(jobs: Sequence[PlannedJob], left_s: float) -> str:
    """The table of when each job would begin and end, and of what does not fit the time."""
    rows = [
        {
            "step": job.name,
            "fits": f"{job.fit} of {job.cases}",
            "begins": None if job.begins_s is None else minutes(job.begins_s),
            "ends": "does not fit" if job.ends_s is None else minutes(job.ends_s),
        }
        for job in sorted(jobs, key=lambda job: (job.begins_s is None, job.begins_s))
        if job.cases
    ]
    last = max((job.ends_s or 0.0 for job in jobs), default=0.0)
    return f"{plain(table_of(rows))}\nabout {minutes(last)} of {minutes(left_s)}\n"


def minutes(seconds: float) -> str:
    """`3:20`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def print_plan(request: CampaignRequest, here: Platform, read: ReadStep) -> None:
    """Prints the plan of a campaign's steps, or the file that starts it. Raises UsageError."""
    kind, budget_s = request.plan or "steps", request.budget_s
    counts = dict(_count(text) for text in request.devices)
    if kind != "steps":
        print(cluster_file(kind, counts, budget_s, request.file), end="")
        return
    platforms = {type: _platform(type) for type in counts} or {device_type(here): here}
    counts = counts or dict.fromkeys(platforms, 1)
    steps = steps_of(request.file, [platform.kind for platform in platforms.values()])
    reasons: list[str] = []
    jobs = jobs_of(
        steps,
        {type: platform.kind for type, platform in platforms.items()},
        len(platforms) == 1,
        lambda step, name, type: [planned_job(step, name, type, platforms[type], budget_s, read)],
        reasons.append,
    )
    print(plan_text(simulated(list(jobs), counts, budget_s), budget_s))
    for reason in reasons:
        print(reason, file=sys.stderr)


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([\w.-]+)=([1-9]\d{0,4})", text)
    if not match:
        swapped = re.fullmatch(r"(\d+)[x*:](.+)", text)
        example = f"{swapped[2]}={swapped[1]}" if swapped else "H200=8"
        raise UsageError(f"cannot read --devices {text!r}; write for example {example}")
    sheet = named_sheet(match[1])
    return sheet["name"] if sheet else match[1], int(match[2])


def _platform(type: str) -> Platform:
    """The platform of a device that need not be here."""
    if type == "cpu":
        return named("cpu")
    arch = named_architecture(type)
    return named(kind(arch), arch)


def cluster_file(kind: str, counts: dict[str, int], budget_s: float, file: str | None) -> str:
    """The text of the file for one type of GPUs, for 8 H200 where none is named. Raises UsageError."""
    if len(counts) > 1:
        raise UsageError("--plan prints a file for one type of devices: give one --devices TYPE=N")
    type, count = next(iter(counts.items()), ("H200", 8))
    platform = _platform(type)
    if platform.kind == "cpu":
        raise UsageError("--plan prints files for GPUs: give one --devices TYPE=N of a type of GPUs")
    nodes, minutes = -(-count // 8), math.ceil(budget_s / 60)
    filled = {
        "type": type,
        "name": re.sub(r"[^a-z0-9]+", "-", type.lower()),
        "vendor": {"cuda": "nvidia", "rocm": "amd"}[platform.kind],
        "image": IMAGES[platform.kind],
        "count": str(count),
        "nodes": str(nodes),
        "s": "s" if nodes > 1 else "",
        "per_node": str(-(-count // nodes)),
        "minutes": str(minutes),
        "limit": str(minutes + 15),
        "checkout": shlex.quote(str(ROOT)),
        "root": str(ROOT),
        "campaign": shlex.quote(_in_checkout(file or DEFAULTS / f"{platform.kind}.toml")),
    }
    return string.Template((FILES / NAMES[kind]).read_text("utf-8")).safe_substitute(filled)


def _in_checkout(file: str | Path) -> str:
    """The path as commands in the checkout call it; the whole path if the file is elsewhere."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
