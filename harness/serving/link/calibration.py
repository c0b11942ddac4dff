"""The constants of a system, fitted to measured points, and how sure they are.

| constant | unit | what it is |
|----------|------|------------|
| a        | ms   | of each decode step, beside its kernels |
| k        |      | time of decode's kernels in the server, over the sum of their times alone |
| p        |      | stall by other requests' prefills, over the sum of the prefills' kernels |
| h        | ms   | of a request outside the engine's steps: client, HTTP, tokenisation |
| q        |      | time of a prefill in the server, over the sum of its kernels |
| cold     | ms   | that a cold server's first wave takes beside its prefills |
| each     | ms   | that each prompt of a cold server's first wave takes beside its prefill |

The kernel sums hold most of what differs between systems, so that these constants are alike. What they were
over the stored series is the prior of a system without points; `serving validate` learns it anew, each time
without the system that is predicted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.serving.link.closed_loop import Array, Features, cold_share, features, settled
from harness.serving.link.kernel_sums import KernelSums
from harness.serving.link.load import Load
from harness.serving.link.regression import Normal, Rows, fitted, learnt, pooled_scatter

T90 = 1.7
"""Deviations to either side of a 90 % interval: between Student's t of 10 degrees of freedom and normal."""
TPOT_SCATTER, TTFT_SCATTER = 0.05, 0.18
"""Of single points about the fitted, as a share, at lengths that were not calibrated on; a system's own
residuals move it."""
SCATTER_POINTS = 6
"""How many points what is assumed of the scatter counts for."""
OF_TPOT, OF_TTFT = ("a", "k", "p"), ("h", "q", "cold", "each")

BEGUN_TPOT = Normal.of(
    (2.0, 0.85, 1.15), (2.5, 0.25, 0.42), np.array([[1, -0.5, 0], [-0.5, 1, 0.6], [0, 0.6, 1]])
)
BEGUN_TTFT = Normal.of((60.0, 0.9, 1200.0, 25.0), (25.0, 0.2, 1000.0, 30.0))
BEGUN_WEIGHT = 3.0
"""What the priors are learnt from beside the stored series: our guess before any, for so many systems."""
OPERATOR = np.diag(np.array([1.5, 0.08, 0.2]) ** 2), np.diag(np.array([25.0, 0.2, 500.0, 20.0]) ** 2)
"""Covariance of the constants between operators of one machine, engine and parallelism."""


@dataclass(frozen=True)
class Point:
    """One measured run of a client. None: the source does not have it."""

    load: Load
    tpot_ms: float
    ttft_ms: float | None = None
    ttft_median_ms: float | None = None
    output_tok_s_gpu: float | None = None


@dataclass(frozen=True)
class Measured:
    """A point with the kernel sums of its load. warm: whether its server had served before."""

    point: Point
    sums: KernelSums
    engine: str
    warm: bool = False

    @property
    def cold(self) -> float:
        return cold_share(self.point.load, self.engine, self.warm)

    @functools.cached_property
    def features(self) -> Features:
        """At what was measured."""
        point = self.point
        steady = point.ttft_median_ms or point.ttft_ms or 0.0
        return features(self.sums, point.tpot_ms, steady, self.cold)


def tpot_rows(measured: Sequence[Measured]) -> Rows:
    rows = [(each.features.tpot, each.point.tpot_ms, TPOT_SCATTER) for each in measured]
    return _rows(rows, len(OF_TPOT))


def ttft_rows(measured: Sequence[Measured]) -> Rows:
    """Of means, and of medians where they are of the steady state: the first wave is half of two. Points that
    wait for memory tell nothing."""
    rows = []
    for each in measured:
        point, found = each.point, each.features
        if point.ttft_ms is None or found.queue_ms:
            continue
        if (left := point.ttft_ms - found.waiting_mean) > 0:
            rows.append((found.mean, left, TTFT_SCATTER * point.ttft_ms / left))
        median = point.ttft_median_ms
        if median and point.load.waves > 2 and (left := median - found.waiting) > 0:
            rows.append((found.steady, left, TTFT_SCATTER * median / left))
    return _rows(rows, len(OF_TTFT))


def _rows(rows: Sequence[tuple[Array, float, float]], constants: int) -> Rows:
    if not rows:
        return Rows(np.zeros((0, constants)), np.zeros(0), np.zeros(0))
    x, y, scatter = zip(*rows, strict=True)
    return Rows(np.array(x), np.array(y), np.array(scatter))


@dataclass(frozen=True)
class Value:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, share: float) -> Value:
        """share: its deviation, as a share of it"""
        ratio = math.exp(T90 * share)
        return cls(value, value / ratio, value * ratio)

    def covers(self, measured: float) -> bool:
        return self.low <= measured <= self.high

    @property
    def width(self) -> float:
        """Of the interval, as a share of the value."""
        return (self.high - self.low) / self.value


@dataclass(frozen=True)
class Constants:
    """Of one system. tpot: a, k, p; ttft: h, q, cold, each; the scatters: of a point about the fitted"""

    tpot: Normal
    ttft: Normal
    tpot_scatter: float = TPOT_SCATTER
    ttft_scatter: float = TTFT_SCATTER

    def fitted(self, measured: Sequence[Measured]) -> Constants:
        """After these points."""
        tpot, ttft = tpot_rows(measured), ttft_rows(measured)
        of_tpot, of_ttft = fitted(self.tpot, tpot), fitted(self.ttft, ttft)
        return Constants(
            of_tpot,
            of_ttft,
            pooled_scatter(TPOT_SCATTER, SCATTER_POINTS, tpot.off(of_tpot), 2),
            pooled_scatter(TTFT_SCATTER, SCATTER_POINTS, ttft.off(of_ttft), 2),
        )

    def elsewhere(self) -> Constants:
        """Of another operator's server of the same machine and engine."""
        of_tpot, of_ttft = OPERATOR
        return replace(self, tpot=self.tpot.plus(of_tpot), ttft=self.ttft.plus(of_ttft))

    def served(self, sums: KernelSums, cold: float) -> Served:
        """Raises HarnessError where the batch does not settle."""
        load = sums.load
        found = settled(sums, self.tpot.mean, self.ttft.mean, cold)
        tpot = _value(self.tpot, found.tpot, 0.0, self.tpot_scatter)
        steady = _value(self.ttft, found.steady, found.waiting, self.ttft_scatter)
        mean = _value(self.ttft, found.mean, found.waiting_mean, self.ttft_scatter)
        decoding = (load.mean_osl - 1) * tpot.value
        life = mean.value + decoding
        share = math.hypot(_share(tpot) * decoding, _share(mean) * mean.value) / life
        output = Value.of(load.concurrency * load.mean_osl / life * 1e3, share)
        return Served(tpot, steady, mean, output, found)


def _value(constants: Normal, x: Array, more: float, scatter: float) -> Value:
    value, deviation = constants.value(x)
    whole = max(value + more, 1e-3)
    return Value.of(whole, math.hypot(deviation / whole, scatter))


def _share(value: Value) -> float:
    return math.log(value.high / value.value) / T90


@dataclass(frozen=True)
class Served:
    """What a client would see. ttft: after the first wave, as its median; ttft_mean: over the whole run;
    output: tokens/s of the instance"""

    tpot: Value
    ttft: Value
    ttft_mean: Value
    output: Value
    features: Features


def learnt_constants(systems: Mapping[str, Sequence[Sequence[Measured]]]) -> Constants:
    """Those of a system without points. systems: points of each server, by its machine and engine"""
    tpot = {name: [tpot_rows(server) for server in servers] for name, servers in systems.items()}
    ttft = {name: [ttft_rows(server) for server in servers] for name, servers in systems.items()}
    return Constants(learnt(BEGUN_TPOT, tpot, BEGUN_WEIGHT), learnt(BEGUN_TTFT, ttft, BEGUN_WEIGHT))


PRIOR = Constants(
    Normal.of(
        (3.77, 0.747, 1.10),
        (1.91, 0.164, 0.453),
        np.array([[1, -0.56, -0.24], [-0.56, 1, 0.61], [-0.24, 0.61, 1]]),
    ),
    Normal.of(
        (52.6, 1.11, 1500.0, 31.3),
        (30.6, 0.445, 983.0, 52.6),
        np.array(
            [
                [1, -0.31, -0.07, -0.33],
                [-0.31, 1, -0.48, 0.71],
                [-0.07, -0.48, 1, -0.30],
                [-0.33, 0.71, -0.30, 1],
            ]
        ),
    ),
)
"""`learnt_constants` of all stored series, rounded: the last lines of `serving validate --json` have it."""
