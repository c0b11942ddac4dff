"""Uncertainty by Monte Carlo with a fixed seed: what is uncertain, how much, and draws of it.

A source's draws are the same for every workload, before and after a change: what errs in common cancels in a
difference. In each draw the calibration is made anew, so that what it absorbs does not count twice.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.serving.link.closed_loop import Array, ClosedLoop
from harness.serving.link.step_times import BESIDE_DEVIATION_GB, BESIDE_GB, Draws, PhaseTimes, StepTimes
from harness.serving.link.structure import LAUNCH_US, STEP_GAP_US
from harness.serving.op_classes import COMMUNICATION

SEED = 20_260_325
DRAWS = 400
DRAWS_ALONE = 100  # of one source, all others held
CONFIDENCE = 0.9

# Deviations of logarithms where nothing is measured.
GLUE = 0.35
GAP = 0.6
LAUNCH = 0.5
SCHEDULING = 0.3  # of a prefill's stall: batches of prompts, what the host adds
# Tokens of a prompt that finds its kernels compiled, of engines that compile them by the number of tokens and
# warm up with a long prompt. Set on InferenceX's points of the H200: at 8192 in the first wave takes its
# prefills' time, at 1024 in 1 to 4 s more. Why is a guess: DeepGEMM, or its autotuner.
WARM_FROM = {"trtllm": 8192}
UNABSORBED = 0.2  # of scaling prefill attention from absorbed to plain
ROUTING = 0.5  # of the way from experts chosen alike to a power law of 1.2
EXPOSED = 0.05  # mean share of communication that something else hides
IN_SERVER = 0.1  # of a kernel's saving: in the server against alone (replays of a step came within 12 %)

ASSUMED = ("kappa", "routing", "exposure", "glue", "host", "step", "cold", "scheduling", "cache",
           "prefill attention", "kernel change", "kernel in the server")  # fmt: skip


@dataclass(frozen=True)
class World:
    """Draws of every source by name; a source that is not active keeps its central value in all of them.

    active:   None: all
    exposure: of an op class in a phase, from a trace; then it is not uncertain
    engine:   whose cold prefills they are
    """

    count: int = DRAWS
    active: Collection[str] | None = None
    exposure: Mapping[tuple[str, str], float] = field(default_factory=dict)
    engine: str = "sglang"

    def normal(self, source: str, item: str = "") -> Array:
        """Standard normal; the first draw is the central case."""
        drawn = np.zeros(self.count)
        if self.count > 1 and (self.active is None or source in self.active):
            seed = zlib.crc32(f"{source}/{item}".encode())
            drawn[1:] = np.random.default_rng([SEED, seed]).standard_normal(self.count - 1)
        return drawn

    def student(self, source: str, freedom: int) -> Array:
        """Student's t with that many degrees of freedom, so that few points give wide intervals."""
        if freedom <= 0:
            return self.normal(source)
        chi = sum(self.normal(source, f"chi{i}") ** 2 for i in range(freedom))
        scale = np.sqrt(np.where(chi > 0, chi, freedom) / freedom)
        return self.normal(source) / scale

    def draws(self, steps: StepTimes) -> Draws:
        ones = np.ones(self.count)
        return Draws(
            kappa=ones,
            slope=0 * ones,
            decode=self._factors("decode", steps.decode),
            prefill=self._factors("prefill", steps.prefill),
            decode_us=0 * ones,
            prefill_us=0 * ones,
            routing=ROUTING * self.normal("routing"),
            gap_us=STEP_GAP_US * np.exp(GAP * self.normal("host", "gap")),
            launch_us=LAUNCH_US * np.exp(LAUNCH * self.normal("host", "launch")),
            host_ms=ones,
            cold_ms=0 * ones,
            cold_prefill=ones,
            scheduling=np.exp(SCHEDULING * self.normal("scheduling")),
            beside_gb=np.maximum(BESIDE_GB + BESIDE_DEVIATION_GB * self.normal("cache"), 0.0),
            cold_share=ones * self._cold_share(steps.load),
            ttft=ones,
            ttft_mean=ones,
        )

    def _cold_share(self, load: ClosedLoop) -> float:
        return max(1 - load.mean_isl / WARM_FROM.get(self.engine, math.inf), 0.0)

    def exposed(self, name: str, op: str) -> Array:
        """The share of an op's time in a phase that is on the critical path."""
        if (name, op) in self.exposure:
            return np.full(self.count, self.exposure[name, op])
        if op in COMMUNICATION:
            return 1 - EXPOSED * np.abs(self.normal("exposure"))
        return np.ones(self.count)

    def _factors(self, name: str, phase: PhaseTimes) -> Array:
        columns = []
        for term, deviation in zip(phase.terms, phase.deviation, strict=True):
            if term.source == "glue":
                spread = GLUE * self.normal("glue")
            elif term.source == "prefill attention":
                spread = math.hypot(UNABSORBED, deviation) * self.normal(term.source)
            else:
                spread = deviation * self.normal(term.source, term.part)
            columns.append(np.exp(spread) * self.exposed(name, term.op))
        return np.stack(columns, axis=1)


def sources(steps: StepTimes) -> list[str]:
    """All names that a world knows for these steps, in the order of their mention."""
    terms = [term.source for phase in (steps.decode, steps.prefill) for term in phase.terms]
    return list(dict.fromkeys([*terms, *ASSUMED]))


def interval(values: Array | Sequence[float]) -> tuple[float, float]:
    """90 % of the draws; the central case, the first, lies inside."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return min(float(low), float(values[0])), max(float(high), float(values[0]))
