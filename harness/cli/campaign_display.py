"""What a campaign prints: its plan or the file that starts it on a cluster; its cases; its results."""

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
from harness.report.terminal import COMMAND, plain_text
from harness.results.comparison import spreads
from harness.results.schema import Record, Run
from harness.run.device import device_type
from harness.run.execute import Outcome
from kernels.engines import kind
from kernels.platform import Platform, named
from shapes.case import Case

FILES = ROOT / "docs" / "clusters"
NAMES = {"node": "node.sh", "slurm": "slurm.sbatch", "kuberay": "kuberay.yaml", "dstack": "dstack.yml"}
"""Value of --plan -> the template in FILES."""
IMAGES = {"cuda": 'python: "3.12"', "rocm": "image: rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210"}
"""The line of dstack's file that says what it starts: its own image, or one that brings ROCm's torch."""
NODE_GPUS = 8
SPARE_MINUTES = 15  # what a scheduler allows beyond the budget of a campaign, for set-up and packing


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
        expected = minutes_text(driver.jobs[task.job].expected_s)
        what = task.job if task.key == task.job else f"{task.job}: {task.key}"
        where = f" on {device}" if len(driver.members) > 1 else ""
        self.log(f"{self._clock()}  {what}{where}, about {expected} ...")

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        result = CaseResult.of(records)
        headline = plain_text(case_table.headline(result), columns=1000)  # on one line
        failures = Counter(c.status for c in result.cells if c.status not in ("ok", "checked", "unsupported"))
        failed = "".join(f"; {count} {status}" for status, count in failures.items())
        self.print(f"{self._clock()}  {run.id}: {case.text}: {headline}{failed}")

    def command(self, step: str, code: int | None, output: str) -> None:
        """code: the exit code; None where the command was stopped at its deadline"""
        line = f"{self._clock()}  {step} "
        line += "was stopped at its time" if code is None else f"ended with exit code {code}"
        if code:
            printed = [text for text in output.splitlines() if text.strip()]
            line += f": {printed[-1] if printed else ''}"
        self.print(line)

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        """Prints nothing: the folder of the campaign has what was stored."""

    def end(self, run: Run, outcome: Outcome) -> None:
        """Prints nothing: `finish` prints the results of all runs together."""

    def finish(self, outcome: CampaignOutcome) -> None:
        rows = [
            {"step": job.name, "done": f"{job.done} of {job.cases}",
             "rows": ", ".join(f"{count} {status}" for status, count in job.statuses.items())}
            for job in outcome.jobs
        ]  # fmt: skip
        self.print("")
        self.print(plain_text(table_of(rows)))
        spent = f"{minutes_text(outcome.wall_s)} of {minutes_text(self.budget_s)}"
        self.print(f"\n{spent}; recorded in {outcome.folder}")
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
        return f"[{minutes_text(time.monotonic() - self.began)}]"


def plan_text(jobs: Sequence[PlannedJob], left_s: float) -> str:
    """The table of when each job would begin and end, and of what does not fit the time."""
    in_order = sorted(jobs, key=lambda job: math.inf if job.begins_s is None else job.begins_s)
    rows = [
        {
            "step": job.name,
            "fits": f"{job.fit} of {job.cases}",
            "begins": None if job.begins_s is None else minutes_text(job.begins_s),
            "ends": "does not fit" if job.ends_s is None else minutes_text(job.ends_s),
        }
        for job in in_order
        if job.cases
    ]
    last_end_s = max((job.ends_s or 0.0 for job in jobs), default=0.0)
    return f"{plain_text(table_of(rows))}\nabout {minutes_text(last_end_s)} of {minutes_text(left_s)}\n"


def minutes_text(seconds: float) -> str:
    """200 s -> `3:20`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def print_plan(request: CampaignRequest, here: Platform, read: ReadStep) -> None:
    """Prints the plan of a campaign's steps, or the file that starts it. Raises UsageError."""
    plan, budget_s = request.plan or "steps", request.budget_s
    counts = dict(_type_and_count(text) for text in request.devices)
    if plan != "steps":
        print(cluster_file(plan, counts, budget_s, request.file), end="")
        return
    platforms = {type: _platform(type) for type in counts} or {device_type(here): here}
    counts = counts or dict.fromkeys(platforms, 1)
    steps = steps_of(request.file, [platform.kind for platform in platforms.values()])
    reasons: list[str] = []
    jobs = jobs_of(  # one for each step and type of devices
        steps,
        {type: platform.kind for type, platform in platforms.items()},
        has_one_type=len(platforms) == 1,
        make=lambda step, name, type: [planned_job(step, name, type, platforms[type], budget_s, read)],
        log=reasons.append,
    )
    print(plan_text(simulated(list(jobs), counts, budget_s), budget_s))
    for reason in reasons:
        print(reason, file=sys.stderr)


def _type_and_count(text: str) -> tuple[str, int]:
    """`H200=8` -> ("H200", 8). Raises UsageError."""
    match = re.fullmatch(r"(?P<type>[\w.-]+)=(?P<count>[1-9]\d{0,4})", text)
    if not match:
        swapped = re.fullmatch(r"(?P<count>\d+)[x*:](?P<type>.+)", text)
        example = f"{swapped['type']}={swapped['count']}" if swapped else "H200=8"
        raise UsageError(f"cannot read --devices {text!r}; write for example {example}")
    sheet = named_sheet(match["type"])
    return sheet["name"] if sheet else match["type"], int(match["count"])


def _platform(type: str) -> Platform:
    """The platform of a device that need not be here."""
    if type == "cpu":
        return named("cpu")
    arch = named_architecture(type)
    return named(kind(arch), arch)


def cluster_file(plan: str, counts: dict[str, int], budget_s: float, file: str | None) -> str:
    """The text of the file of NAMES that starts a campaign on GPUs of one type, by default 8 H200. `file` has
    the campaign's own steps; None: the platform's default ones. Raises UsageError."""
    if len(counts) > 1:
        raise UsageError("--plan prints a file for one type of devices: give one --devices TYPE=N")
    [(type, count)] = counts.items() if counts else [("H200", 8)]
    platform = _platform(type)
    if platform.kind == "cpu":
        raise UsageError("--plan prints files for GPUs: give one --devices TYPE=N of a type of GPUs")
    nodes, minutes = math.ceil(count / NODE_GPUS), math.ceil(budget_s / 60)
    values = {
        "type": type,
        "name": re.sub(r"[^a-z0-9]+", "-", type.lower()),
        "vendor": {"cuda": "nvidia", "rocm": "amd"}[platform.kind],
        "image": IMAGES[platform.kind],
        "count": count,
        "nodes": nodes,
        "s": "s" if nodes > 1 else "",
        "per_node": math.ceil(count / nodes),
        "minutes": minutes,
        "limit": minutes + SPARE_MINUTES,
        "root": ROOT,
        "checkout": shlex.quote(str(ROOT)),
        "campaign": shlex.quote(_in_checkout(file or DEFAULTS / f"{platform.kind}.toml")),
    }
    return string.Template((FILES / NAMES[plan]).read_text("utf-8")).safe_substitute(values)


def _in_checkout(file: str | Path) -> str:
    """The path from the root of the checkout; the whole path if the file is elsewhere."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
