"""Noise of a machine, what can be told apart on it: the steps of the clock, and how far one thing prepared
twice differs from itself."""

from __future__ import annotations

from harness.statistics.intervals import MIN_BLOCKS
from harness.statistics.paired import Comparison, compare
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy
from harness.workers.process import WorkerFailure, WorkerProcess

WORKLOADS = ("read", "product")
SAMPLE_S = 0.05
SECONDS = 2.5  # of samples per workload


def clock(worker: WorkerProcess) -> dict[str, float]:
    """`step_s` and `reading_s` of the clock that times samples (see Meter.clock)."""
    return worker.ask("clock", 60)


def clock_differences(pair: list[WorkerProcess], seconds: float = SECONDS) -> dict[str, Comparison]:
    """Each workload against itself, in two workers, prepared anew in every block: what a ratio between two
    equal implementations comes out as here. Raises WorkerFailure."""
    return {workload: _difference(pair, workload, seconds) for workload in WORKLOADS}


def _difference(pair: list[WorkerProcess], workload: str, seconds: float) -> Comparison:
    def prepare(*_: object) -> None:
        for worker in pair:
            worker.ask("prepare", 120, workload=workload)

    policy = Policy(blocks=MIN_BLOCKS, budget_s=seconds, begin_block=prepare)
    samples = {str(i): lambda w=w: w.ask("sample", 60, at_least=SAMPLE_S) for i, w in enumerate(pair)}
    rounds = measure(samples, policy)
    for reason in rounds.dropped.values():
        raise WorkerFailure("error", reason)
    return compare(rounds.series("0"), rounds.series("1"), blocks=rounds.blocks)
