"""The constants of a system: they are fitted to measured points, and each has a deviation.

| constant | unit | what it is |
|----------|------|------------|
| a        | ms   | time of a decode step beside its kernels |
| k        |      | time of decode's kernels in the server, over the sum of their times alone |
| p        |      | stall by other requests' prefills, over the sum of the prefills' kernels |
| h        | ms   | time of a request outside the engine's steps: client, HTTP, tokenisation |
| q        |      | time of a prefill in the server, over the sum of its kernels |
| cold     | ms   | time that the first wave of a cold server takes beside its prefills |
| each     | ms   | time that each prompt of that wave takes beside its prefill |

Most of what differs between systems is in the sums of kernel times, so that these constants are similar.
Their distribution over the stored series is the prior of a system without points. `serving validate` learns
it anew for each system, without that system's own points.

The fit is least squares: a measured value is y = x . constants, with an error that is a share of it
(`scatter`). Without points the constants are the prior. With many points they are the least-squares fit. In
between they are the most likely compromise of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.serving.link.load import Array, Features, KernelSums, Load, features, settled

ROUNDS = 60  # rounds of `learnt`; after 30 its result moves by less than 1 %


@dataclass(frozen=True)
class Normal:
    """The normal distribution of n constants. mean: [n]; covariance: [n, n]"""

    mean: Array
    covariance: Array

    @classmethod
    def of(cls, mean: Sequence[float], deviation: Sequence[float], correlation: Sequence[float]) -> Normal:
        """correlation: that of each pair, in the order of the upper triangle"""
        shape = np.eye(len(mean))
        shape[np.triu_indices(len(mean), 1)] = correlation
        whole = shape + shape.T - np.eye(len(mean))
        return cls(np.array(mean, float), whole * np.outer(deviation, deviation))

    @property
    def deviation(self) -> Array:
        return np.sqrt(np.diag(self.covariance))


@dataclass(frozen=True)
class Rows:
    """Measured values of one system: x [rows, n] and y [rows] > 0. scatter: the error of a y, as a share"""

    x: Array
    y: Array
    scatter: float

    def fitted(self, prior: Normal) -> Normal:
        """The constants after these rows (Bayes' rule for normal variables)."""
        if not len(self.y):
            return prior
        x = self.x / (self.scatter * self.y)[:, None]  # and y / (scatter * y) is 1 / scatter
        precision = np.linalg.inv(prior.covariance)
        covariance = np.linalg.inv(precision + x.T @ x)
        return Normal(covariance @ (precision @ prior.mean + x.sum(axis=0) / self.scatter), covariance)

    def scatter_about(self, constants: Normal, fitted: int) -> float:
        """The scatter by the residuals of a fit of so many constants. The assumed scatter counts as
        SCATTER_POINTS residuals."""
        off = self.x @ constants.mean / self.y - 1
        count = SCATTER_POINTS + max(len(off) - fitted, 0)
        return float(np.sqrt((SCATTER_POINTS * self.scatter**2 + (off**2).sum()) / count))


def learnt(begun: Normal, systems: Mapping[str, Sequence[Rows]], weight: float) -> Normal:
    """The prior of a new system: the distribution of constants over systems, by expectation maximisation.

    systems: the rows of each server, by machine and engine; all servers of one key count as one system
    begun:   the distribution from which it starts
    weight:  the number of systems as which the covariance of `begun` counts
    """
    servers = [(1 / len(each) / len(systems), rows) for each in systems.values() for rows in each]
    prior = begun
    for _ in range(ROUNDS):
        found = [(share, rows.fitted(prior)) for share, rows in servers]
        mean = np.sum([share * one.mean for share, one in found], axis=0)
        off = [share * (one.covariance + np.outer(one.mean - mean, one.mean - mean)) for share, one in found]
        spread = len(systems) * np.sum(off, axis=0) + weight * begun.covariance
        prior = Normal(mean, spread / (len(systems) + weight))
    return prior


T90 = 1.7  # half the width of a 90 % interval, in deviations: between Student's t (10 degrees) and the normal
TPOT_SCATTER, TTFT_SCATTER, SCATTER_POINTS = 0.06, 0.25, 6
"""The assumed scatter of points about a fit, as a share, and the number of points as which it counts."""
ACCEPT_SCATTER = 0.03  # what an unknown accept length adds to the scatter, because it differs between prompts
OF_TPOT, OF_TTFT = ("a", "k", "p"), ("h", "q", "cold", "each")
BEGUN_TPOT = Normal.of((2.0, 0.85, 1.15), (2.5, 0.25, 0.42), (-0.5, 0, 0.6))
BEGUN_TTFT = Normal.of((60.0, 0.9, 1200.0, 25.0), (25.0, 0.2, 1000.0, 30.0), (0, 0, 0, 0, 0, 0))
BEGUN_WEIGHT = 3.0
"""`learnt` starts from BEGUN_TPOT and BEGUN_TTFT. They are our guess before any measurement, and count as
BEGUN_WEIGHT systems."""


@dataclass(frozen=True)
class Point:
    """One measured run of a client. A number that its source does not have is None."""

    load: Load
    tpot_ms: float
    ttft_ms: float | None = None
    ttft_median_ms: float | None = None
    output_tok_s_gpu: float | None = None


@dataclass(frozen=True)
class Measured:
    """A point with the kernel sums of its load."""

    point: Point
    sums: KernelSums

    @functools.cached_property
    def features(self) -> Features:
        """The features at the measured TPOT and TTFT."""
        steady = self.point.ttft_median_ms or self.point.ttft_ms or 0.0
        return features(self.sums, self.point.tpot_ms, steady)


def tpot_rows(measured: Sequence[Measured]) -> Rows:
    return _rows([(each.features.tpot, each.point.tpot_ms) for each in measured], len(OF_TPOT), TPOT_SCATTER)


def ttft_rows(measured: Sequence[Measured]) -> Rows:
    """The rows of mean TTFTs, and of medians where there are more than two waves: of two waves the first is
    half, so that the median is not that of the steady state. Points that wait for memory are left out."""
    rows = []
    for each in measured:
        point, found = each.point, each.features
        median = point.ttft_median_ms if point.load.waves > 2 else None
        if not found.queue_ms:
            rows.append((found.mean, (point.ttft_ms or 0.0) - found.waiting_mean))
            rows.append((found.steady, (median or 0.0) - found.waiting))
    return _rows([(x, y) for x, y in rows if y > 0], len(OF_TTFT), TTFT_SCATTER)


def _rows(rows: Sequence[tuple[Array, float]], constants: int, scatter: float) -> Rows:
    x = np.array([x for x, _ in rows]).reshape(len(rows), constants)
    return Rows(x, np.array([y for _, y in rows]), scatter)


@dataclass(frozen=True)
class Value:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, share: float) -> Value:
        """share: the deviation, as a share of the value"""
        ratio = math.exp(T90 * share)
        return cls(value, value / ratio, value * ratio)

    @property
    def share(self) -> float:
        return math.log(self.high / self.value) / T90


@dataclass(frozen=True)
class Served:
    """What a client would see.

    ttft:       after the first wave, which the median shows
    ttft_mean:  over the whole run
    output:     tokens/s of the instance
    decode_ms:  time of a decode step in the server
    stall_ms:   time of other requests' prefills in the server, for each token
    prefill_ms: time of the prefill of one prompt in the server
    """

    tpot: Value
    ttft: Value
    ttft_mean: Value
    output: Value
    decode_ms: float
    stall_ms: float
    prefill_ms: float
    features: Features


@dataclass(frozen=True)
class Constants:
    """The constants of one system. tpot: a, k, p; ttft: h, q, cold, each; scatter: of points about the fit"""

    tpot: Normal
    ttft: Normal
    tpot_scatter: float = TPOT_SCATTER
    ttft_scatter: float = TTFT_SCATTER

    def unsure(self, share: float) -> Constants:
        """The constants if the accept length is not known. share: the deviation of its logarithm"""
        if not share:
            return self
        off = share * self.tpot.mean
        off[2] = 0.0  # p does not depend on the accept length
        scatter = math.hypot(self.tpot_scatter, ACCEPT_SCATTER)
        tpot = Normal(self.tpot.mean, self.tpot.covariance + np.outer(off, off))
        return replace(self, tpot=tpot, tpot_scatter=scatter)

    def fitted(self, measured: Sequence[Measured]) -> Constants:
        """The constants after these points."""
        tpot, ttft = replace(tpot_rows(measured), scatter=self.tpot_scatter), ttft_rows(measured)
        of_tpot, of_ttft = tpot.fitted(self.tpot), ttft.fitted(self.ttft)
        pairs = ((tpot, of_tpot), (ttft, of_ttft))
        return Constants(of_tpot, of_ttft, *(rows.scatter_about(of, 2) for rows, of in pairs))

    def served(self, sums: KernelSums) -> Served:
        """Raises HarnessError where the batch does not settle."""
        found = settled(sums, self.tpot.mean, self.ttft.mean)
        tpot = _value(self.tpot, found.tpot, 0.0, self.tpot_scatter)
        steady = _value(self.ttft, found.steady, found.waiting, self.ttft_scatter)
        mean = _value(self.ttft, found.mean, found.waiting_mean, self.ttft_scatter)
        decoding = (sums.load.mean_osl - 1) * tpot.value
        life = mean.value + decoding
        share = math.hypot(tpot.share * decoding, mean.share * mean.value) / life
        a, k, p = (float(constant) for constant in self.tpot.mean)
        return Served(
            tpot, steady, mean, Value.of(sums.load.output(life), share),
            decode_ms=a + k * float(found.tpot[1] / found.tpot[0]), stall_ms=p * float(found.tpot[2]),
            prefill_ms=float(self.ttft.mean[1]) * sums.prefill.ms(1), features=found,
        )  # fmt: skip


def _value(constants: Normal, x: Array, more: float, scatter: float) -> Value:
    whole = max(float(x @ constants.mean) + more, 1e-3)
    return Value.of(whole, math.hypot(float(np.sqrt(x @ constants.covariance @ x)) / whole, scatter))


def learnt_constants(systems: Mapping[str, Sequence[Sequence[Measured]]]) -> Constants:
    """The constants of a system without points. systems: the points of each server, by machine and engine"""
    tpot = {name: [tpot_rows(server) for server in servers] for name, servers in systems.items()}
    ttft = {name: [ttft_rows(server) for server in servers] for name, servers in systems.items()}
    return Constants(learnt(BEGUN_TPOT, tpot, BEGUN_WEIGHT), learnt(BEGUN_TTFT, ttft, BEGUN_WEIGHT))


PRIOR = Constants(
    Normal.of((3.66, 0.751, 1.29), (1.96, 0.156, 0.340), (-0.56, -0.08, 0.43)),
    Normal.of((48.0, 1.235, 1368, 44.6), (33.0, 0.247, 890, 42.2), (-0.48, -0.12, -0.38, -0.25, 0.48, -0.10)),
)
"""`learnt_constants` of all stored series, rounded; `serving validate --json` ends with it."""
