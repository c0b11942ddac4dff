"""Noise of a machine, what can be told apart on it: the steps of the clock, and how far one thing prepared
twice differs from itself."""

from __future__ import annotations

from harness.statistics.intervals import MIN_BLOCKS
from harness.statistics.paired import Comparison, compare
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy
from harness.workers.process import Worker, WorkerFailure

WORKLOADS = ("read", "product")
TURN_S = 0.05
SECONDS = 2.5  # of turns per workload


def clock(worker: Worker) -> dict[str, float]:
    """`step_s` and `reading_s` of the clock that times turns (see Meter.clock)."""
    return worker.ask("clock", 60)


def clock_differences(pair: list[Worker], seconds: float = SECONDS) -> dict[str, Comparison]:
    """Each workload against itself, in two workers, prepared anew in every block: what a ratio between two
    equal implementations comes out as here. Raises WorkerFailure."""
    return {workload: _difference(pair, workload, seconds) for workload in WORKLOADS}


def _difference(pair: list[Worker], workload: str, seconds: float) -> Comparison:
    def prepare(*_: object) -> None:
        for worker in pair:
            worker.ask("prepare", 120, workload=workload)

    policy = Policy(blocks=MIN_BLOCKS, budget_s=seconds, begin_block=prepare)
    turns = {str(i): lambda w=w: w.ask("turn", 60, at_least=TURN_S) for i, w in enumerate(pair)}
    rounds = measure(turns, policy)
    for reason in rounds.dropped.values():
        raise WorkerFailure("error", reason)
    return compare(rounds.series("0"), rounds.series("1"), blocks=rounds.blocks)
