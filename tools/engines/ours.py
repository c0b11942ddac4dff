"""Our engine: rounds of interleaved turns in blocks that prepare anew, verdicts that hold together."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace

from harness.machine.monitor import monitor_for
from harness.run.case import SLOW, TURN_S
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.multiple import joint_verdicts, log_time
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy
from harness.workers.child.timers.base import Program
from harness.workers.child.timers.cpu import CpuTimer
from kernels.platform import detect
from tools.engines.callables import prepare
from tools.engines.verdicts import Ranking


def rank(names: Sequence[str], *, budget_s: float) -> Ranking:
    """As harness/run/case.py times a case, but in this process, whose kernels are all torch's."""
    monitor = monitor_for(detect("cpu"), lambda: [os.getpid()])
    timer, baseline, twin = CpuTimer(), names[0], f"{names[0]} twin"
    programs: dict[str, Program] = {}

    def begin_block(block: int, wanted: Collection[str]) -> None:
        for name in wanted:
            programs[name] = timer.program([prepare(baseline if name == twin else name)])

    def turn(name: str) -> float:
        seconds = timer.turn(programs[name], TURN_S).seconds
        monitor.sample(name)
        return seconds

    turns = {name: lambda name=name: turn(name) for name in (*names, twin)}
    policy = Policy(
        begin_block=begin_block,
        begin_round=monitor.begin,
        end_round=monitor.end,
        slow=SLOW,
        anchor=baseline,
        twin=twin,
    )
    opening_s = 1.2 * policy.opening * len(turns) * TURN_S
    rounds = measure(turns, replace(policy, budget_s=max(budget_s, opening_s)))
    series = {name: rounds.series(name) for name in turns}
    joint = [
        j
        for j in joint_verdicts(series, rounds.blocks, names, baseline, twin=twin, confidence=CONFIDENCE)
        if j.about == "baseline"
    ]
    baseline_s = math.exp(log_time(series[baseline], rounds.blocks))
    return Ranking(
        {baseline: baseline_s} | {j.a: baseline_s / j.comparison.ratio for j in joint},
        {j.a: j.comparison.verdict for j in joint},
    )
