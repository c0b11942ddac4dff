"""Replays, and the suite's own runs, for an experiment: the stages that need no engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import kernels
from harness.errors import HarnessError
from harness.machine.device import choose_device
from harness.paths import ROOT
from harness.serving.experiment.schema import Served
from harness.serving.experiment.spec import ReplaySettings
from harness.serving.experiment.steps import Choices
from harness.serving.replay.child import BOUNDARY
from harness.serving.replay.schema import Replay, Timed
from harness.serving.replay.step import ReplayStep, StepPlace, places
from harness.timing.rounds import Disturbed
from harness.workers.environment import ALLOCATOR
from shapes.routing import Routing

FORMAT = ("fp8", "scales")
PATTERNS = ("balanced", "uniform", *(f"zipf:{tenths / 10:g}" for tenths in range(1, 21)))


class KernelBench(Protocol):
    """What an experiment asks of this machine's kernels."""

    def replay(self, step: ReplayStep, name: str, base: Choices, chosen: Choices) -> Replay:
        """The step by both choices; the second arm is called `name`."""

    def serving(
        self, step: ReplayStep, base: Choices, chosen: Choices, budget_s: float, folder: Path
    ) -> Served:
        """The swapped calls, isolated, their streamed operands from memory as in serving."""


class LocalBench:
    """By the replay's worker and `harness run`, on this machine.

    environment: the engine's, which the replay has too
    """

    def __init__(
        self,
        settings: ReplaySettings,
        disturbed: Disturbed,
        say: Callable[[str], None],
        environment: Mapping[str, str] = {},
    ) -> None:
        self.settings, self.disturbed, self.say = settings, disturbed, say
        # An engine has the allocator that its environment says and not our workers': what glibc faults in
        # anew at each call is a good part of a prefill (results/README.md, serving/allocator).
        self.environment = {name: os.environ.get(name) for name in ALLOCATOR} | dict(environment)

    def replay(self, step: ReplayStep, name: str, base: Choices, chosen: Choices) -> Replay:
        from harness.run.device import own_device
        from harness.serving.replay.replay import BASE, DECOMPOSED, ReplayPlan, replay

        settings, prefill = self.settings, step.phase == "prefill"
        platform = choose_device(settings.device or None)
        plan = ReplayPlan(
            step,
            {BASE: base, name: chosen},
            settings.launch or ("eager" if platform.kind == "cpu" else "graph"),
            settings.threads,
            math.inf if prefill else settings.budget_s,
            blocks=settings.prefill_blocks if prefill else settings.blocks,
            rounds=settings.prefill_rounds if prefill else settings.rounds,
            decomposed=3 if prefill else DECOMPOSED,
            disturbed=self.disturbed,
            environment=self.environment,
        )
        with own_device(platform) as own:
            return replay(plan, platform, own.monitor, self.say)

    def serving(
        self, step: ReplayStep, base: Choices, chosen: Choices, budget_s: float, folder: Path
    ) -> Served:
        cases = _cases(step, base, chosen)
        times: dict[tuple[str, str, str], Timed] = {}
        files, missing = [], []
        for op in dict.fromkeys(called for called, _, _, _ in cases):
            own = [(case, {a, b}) for called, case, a, b in cases if called == op]
            out = folder / f"{op}.json"
            self._run(op, {name for _, names in own for name in names}, {c for c, _ in own}, budget_s, out)
            files.append(out.name)
            for cell in json.loads(out.read_text())["cells"]:
                if cell["low_us"] is not None:
                    ms, low, high = (cell[key] / 1e3 for key in ("time_us", "low_us", "high_us"))
                    times[op, _written(_sizes(cell["case"])), cell["impl"]] = Timed(ms=ms, low=low, high=high)
                else:
                    # A single block is a time without an interval: one prefill's was twice what it is
                    # (results/README.md, serving/cpu-long).
                    why = cell["reason"] or "one block gives no interval: a larger predict.serving_budget_s"
                    missing.append(f"{op} {cell['impl']}, {cell['case']}: {cell['status']}, {why}")
        return Served(
            change=_sum(cases, times, missing), missing=tuple(dict.fromkeys(missing)), files=tuple(files)
        )

    def _run(self, op: str, names: set[str], cases: set[str], budget_s: float, out: Path) -> None:
        command = [sys.executable, "-m", "harness", "run", "--op", op, "--impl", ",".join(sorted(names))]
        for case in sorted(cases):
            command += ["--case", case]
        budget = f"{budget_s * len(cases):g}s"
        command += ["--cache", "serving", "--budget", budget, "--per-case", "1s", "--quiet"]
        command += [
            "--threads",
            str(self.settings.threads),
            "--json",
            str(out),
            "--out",
            str(out.with_suffix("")),
        ]
        command += ["--baseline", sorted(names)[0], "--boundary", BOUNDARY.get(op, "core")]
        command += ["--disturbed", self.disturbed]
        if self.settings.device:
            command += ["--device", self.settings.device]
        self.say(f"harness run of {op}: {len(cases)} cases, {', '.join(sorted(names))}")
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.with_suffix("").exists():  # what a kill left
            command += ["--resume", str(out.with_suffix(""))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not out.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise HarnessError(f"harness run of {op} gave no result: {last}")


def _cases(step: ReplayStep, base: Choices, chosen: Choices) -> list[tuple[str, str, str, str]]:
    """(op, case, the base's implementation, the swap's) of each swapped call."""
    cases = []
    for place in places(step):
        if place.op:
            old, new = (which.get(f"{place.op}:{place.name}") or which[place.op] for which in (base, chosen))
            if old != new:
                cases.append((place.op, _case(step, place), old, new))
    return cases


def _case(step: ReplayStep, place: StepPlace) -> str:
    sizes = dict(step.sizes(place))
    if place.op == "fused_moe" and step.picks:
        sizes["routing"] = like(step, sizes)
    return _written(asdict(kernels.OPS[place.op].sizes(sizes)))


def _written(sizes: Mapping[str, Any]) -> str:
    """As a case is written, in one order; the format of FP8 is the machine's."""
    return " ".join(f"{key}={sizes[key]}" for key in sorted(sizes) if key not in FORMAT)


def _sizes(case: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in case.split() if "=" in part)


def like(step: ReplayStep, sizes: Mapping[str, Any]) -> str:
    """The routing pattern of the suite that hits as many experts as the recorded picks do, nearest."""
    hit = sum(len({expert for token in layer for expert in token}) for layer in step.picks) / len(step.picks)
    fixed = {key: sizes[key] for key in ("tokens", "experts", "topk")}
    return min(PATTERNS, key=lambda pattern: abs(Routing(**fixed, pattern=pattern).hit - hit))


def _sum(
    cases: list[tuple[str, str, str, str]],
    times: Mapping[tuple[str, str, str], Timed],
    missing: list[str],
) -> Timed | None:
    """Of all calls, new less old; a case's intervals are one, however often it is called."""
    value, squares = 0.0, 0.0
    for (op, case, old, new), calls in Counter(cases).items():
        after, before = (times.get((op, case, name)) for name in (new, old))
        if after is None or before is None:
            if not missing:
                missing.append(f"{op}, {case}: not timed")
            return None
        value += calls * (after.ms - before.ms)
        squares += sum((calls * _width(timed) / 2) ** 2 for timed in (after, before))
    half = math.sqrt(squares)
    return Timed(ms=value, low=value - half, high=value + half)


def _width(timed: Timed) -> float:
    assert timed.low is not None and timed.high is not None, "kept only with its interval"
    return timed.high - timed.low
