"""Records of an experiment's stages, as they are stored."""

from __future__ import annotations

from pydantic import Field

from harness.serving.replay.schema import Replay, Timed
from harness.serving.schema import StrictRecord


class LiveRun(StrictRecord):
    """One run of an arm. started: ISO 8601, UTC; latencies in ms, means over requests.

    pattern:   how many requests were prefilled together, in order
    prefills:  milliseconds from the step before to each group's first tokens
    kv_len:    mean tokens in a request's cache during the steady steps
    """

    started: str
    itl: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    pattern: tuple[int, ...] = ()
    prefills: tuple[float, ...] = ()
    batch: float | None = None
    kv_len: float | None = None
    file: str = ""


class ObservedArm(StrictRecord):
    """An arm looked into: not one of the runs that count.

    trace, routing: files, relative to the experiment's folder
    classes: op class -> milliseconds of it in a decode step of the trace; prefill: in a step that prefills
    kernels: names in the trace
    runs:    plain ones, after the logged one
    version: of the engine
    """

    trace: str = ""
    routing: str = ""
    classes: dict[str, float] = Field(default_factory=dict)
    prefill: dict[str, float] = Field(default_factory=dict)
    step_ms: float | None = None
    kernels: tuple[str, ...] = ()
    runs: tuple[LiveRun, ...] = ()
    version: str = ""


class Paired(StrictRecord):
    """Finished pairs of runs, (base, arm) each, in order.

    begun:    when the first run began that is in a pair, rejected ones too
    given_up: reasons of the pairs that no attempt finished; rejected: reason -> runs
    """

    begun: str
    pairs: tuple[tuple[LiveRun, LiveRun], ...] = ()
    given_up: tuple[str, ...] = ()
    rejected: dict[str, int] = Field(default_factory=dict)


class Replays(StrictRecord):
    """The replays of one kind of step, of one swap against the base: one for each recorded routing."""

    replays: tuple[Replay, ...]


class Served(StrictRecord):
    """The swapped calls of one kind of step, by the suite's own run of their op in cache mode `serving`.

    change:  over all swapped calls of the step
    missing: kernels that it could not time, and why; then there is no change
    """

    change: Timed | None = None
    missing: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
