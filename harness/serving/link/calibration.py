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

from harness.serving.link.load import Array, Features, KernelSums, Load, features, settled_features

LEARNING_ROUNDS = 60  # of `learnt`; after 30 its result moves by less than 1 %
T90 = 1.7  # half the width of a 90 % interval, in deviations: between Student's t (10 degrees) and the normal
TPOT_SCATTER, TTFT_SCATTER = 0.06, 0.25  # the assumed scatter of points about a fit, as a share
SCATTER_POINTS = 6  # the number of residuals as which the assumed scatter counts
FITTED_CONSTANTS = 2  # constants of a fit that the points decide; they count as degrees of freedom
ACCEPT_SCATTER = 0.03  # what an unknown accept length adds to the scatter, because it differs between prompts
TPOT_CONSTANTS, TTFT_CONSTANTS = ("a", "k", "p"), ("h", "q", "cold", "each")


@dataclass(frozen=True)
class Normal:
    """The normal distribution of n constants. mean: [n]; covariance: [n, n]"""

    mean: Array
    covariance: Array

    @classmethod
    def from_deviations(
        cls, mean: Sequence[float], deviation: Sequence[float], correlation: Sequence[float]
    ) -> Normal:
        """correlation: that of each pair of constants, in the order of the upper triangle"""
        upper = np.zeros((len(mean), len(mean)))
        upper[np.triu_indices(len(mean), 1)] = correlation
        correlations = np.eye(len(mean)) + upper + upper.T
        return cls(np.array(mean, float), correlations * np.outer(deviation, deviation))

    @property
    def deviation(self) -> Array:
        return np.sqrt(np.diag(self.covariance))


@dataclass(frozen=True)
class Equations:
    """Measured values of one system as equations y = x . constants.

    x:       [values, constants]
    y:       [values], each above 0
    scatter: the error of each y, as a share of it
    """

    x: Array
    y: Array
    scatter: float

    def fitted(self, prior: Normal) -> Normal:
        """The constants after these values (Bayes' rule for normal variables)."""
        if not len(self.y):
            return prior
        errors = self.scatter * self.y
        x, y = self.x / errors[:, None], self.y / errors
        precision = np.linalg.inv(prior.covariance)
        covariance = np.linalg.inv(precision + x.T @ x)
        return Normal(covariance @ (precision @ prior.mean + x.T @ y), covariance)

    def scatter_about(self, constants: Normal) -> float:
        """The scatter by the residuals of a fit. The assumed scatter counts as SCATTER_POINTS residuals."""
        residuals = self.x @ constants.mean / self.y - 1
        freedom = SCATTER_POINTS + max(len(residuals) - FITTED_CONSTANTS, 0)
        return float(np.sqrt((SCATTER_POINTS * self.scatter**2 + (residuals**2).sum()) / freedom))


def learnt(start: Normal, systems: Mapping[str, Sequence[Equations]], start_weight: float) -> Normal:
    """The prior of a new system: the distribution of constants over systems, by expectation maximisation.

    systems:      the equations of each server, by machine and engine; servers of one key count as one system
    start_weight: the number of systems as which the covariance of `start` counts
    """
    servers = []  # with the share of each in the mean
    for of_system in systems.values():
        servers += [(1 / len(of_system) / len(systems), equations) for equations in of_system]
    prior = start
    for _ in range(LEARNING_ROUNDS):
        fits = [(share, equations.fitted(prior)) for share, equations in servers]
        mean = np.sum([share * fit.mean for share, fit in fits], axis=0)
        spread = [
            share * (fit.covariance + np.outer(fit.mean - mean, fit.mean - mean)) for share, fit in fits
        ]
        total = len(systems) * np.sum(spread, axis=0) + start_weight * start.covariance
        prior = Normal(mean, total / (len(systems) + start_weight))
    return prior


# Our guess before any measurement, from which `learnt` starts. It counts as START_WEIGHT systems.
START_TPOT = Normal.from_deviations((2.0, 0.85, 1.15), (2.5, 0.25, 0.42), (-0.5, 0, 0.6))
START_TTFT = Normal.from_deviations((60.0, 0.9, 1200.0, 25.0), (25.0, 0.2, 1000.0, 30.0), (0, 0, 0, 0, 0, 0))
START_WEIGHT = 3.0


@dataclass(frozen=True)
class Point:
    """One measured run of a client. A number that its source does not have is None."""

    load: Load
    tpot_ms: float
    ttft_ms: float | None = None
    ttft_median_ms: float | None = None
    output_tok_s_gpu: float | None = None


@dataclass(frozen=True)
class ModelledPoint:
    """A measured point with the kernel sums of its load."""

    point: Point
    sums: KernelSums

    @functools.cached_property
    def features(self) -> Features:
        """The features at the measured TPOT and TTFT."""
        steady_ms = self.point.ttft_median_ms or self.point.ttft_ms or 0.0
        return features(self.sums, self.point.tpot_ms, steady_ms)


def tpot_equations(points: Sequence[ModelledPoint], scatter: float = TPOT_SCATTER) -> Equations:
    x = np.array([modelled.features.tpot for modelled in points]).reshape(-1, len(TPOT_CONSTANTS))
    return Equations(x, np.array([modelled.point.tpot_ms for modelled in points]), scatter)


def ttft_equations(points: Sequence[ModelledPoint]) -> Equations:
    """The equations of mean TTFTs, and of medians where there are more than two waves: of two waves the first
    is half, so that the median is not that of the steady state. Points that wait for memory are left out."""
    x, y = [], []
    for modelled in points:
        point, of_point = modelled.point, modelled.features
        if of_point.queue_ms:
            continue
        if point.ttft_ms and point.ttft_ms > of_point.mean_waiting_ms:
            x.append(of_point.mean)
            y.append(point.ttft_ms - of_point.mean_waiting_ms)
        if point.load.waves > 2 and point.ttft_median_ms and point.ttft_median_ms > of_point.waiting_ms:
            x.append(of_point.steady)
            y.append(point.ttft_median_ms - of_point.waiting_ms)
    return Equations(np.array(x).reshape(-1, len(TTFT_CONSTANTS)), np.array(y), TTFT_SCATTER)


@dataclass(frozen=True)
class Value:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_share(cls, value: float, share: float) -> Value:
        """share: the deviation, as a share of the value"""
        ratio = math.exp(T90 * share)
        return cls(value, value / ratio, value * ratio)

    @property
    def share(self) -> float:
        """The deviation, as a share of the value."""
        return math.log(self.high / self.value) / T90


@dataclass(frozen=True)
class Served:
    """What a client would see, and times in the server."""

    tpot: Value  # ms
    ttft: Value  # ms, after the first wave, which the median shows
    ttft_mean: Value  # ms, over the whole run
    output: Value  # tokens/s of the instance
    decode_ms: float  # of a decode step
    stall_ms: float  # of other requests' prefills, for each token
    prefill_ms: float  # of the prefill of one prompt
    features: Features


@dataclass(frozen=True)
class Constants:
    """The constants of one system. tpot: a, k, p; ttft: h, q, cold, each; scatter: of points about the fit"""

    tpot: Normal
    ttft: Normal
    tpot_scatter: float = TPOT_SCATTER
    ttft_scatter: float = TTFT_SCATTER

    def with_unsure_accept_length(self, deviation: float) -> Constants:
        """These constants for a guessed accept length. deviation: of its logarithm; 0 if it is known"""
        if not deviation:
            return self
        # TPOT is (a + k * decode) / accept length + p * stall: an error of the length is one of a and k.
        shift = deviation * self.tpot.mean
        shift[TPOT_CONSTANTS.index("p")] = 0.0
        tpot = Normal(self.tpot.mean, self.tpot.covariance + np.outer(shift, shift))
        return replace(self, tpot=tpot, tpot_scatter=math.hypot(self.tpot_scatter, ACCEPT_SCATTER))

    def fitted(self, points: Sequence[ModelledPoint]) -> Constants:
        """The constants after these points."""
        of_tpot, of_ttft = tpot_equations(points, self.tpot_scatter), ttft_equations(points)
        tpot, ttft = of_tpot.fitted(self.tpot), of_ttft.fitted(self.ttft)
        return Constants(tpot, ttft, of_tpot.scatter_about(tpot), of_ttft.scatter_about(ttft))

    def served(self, sums: KernelSums) -> Served:
        """What a client would see under a load. Raises HarnessError where the batch does not settle."""
        settled = settled_features(sums, self.tpot.mean, self.ttft.mean)
        tpot = _value(self.tpot, settled.tpot, 0.0, self.tpot_scatter)
        steady = _value(self.ttft, settled.steady, settled.waiting_ms, self.ttft_scatter)
        mean = _value(self.ttft, settled.mean, settled.mean_waiting_ms, self.ttft_scatter)
        decoding_ms = (sums.load.mean_osl - 1) * tpot.value
        life_ms = mean.value + decoding_ms
        life_share = math.hypot(tpot.share * decoding_ms, mean.share * mean.value) / life_ms
        output = Value.from_share(sums.load.output_tok_s(life_ms), life_share)
        a, k, p = self.tpot.mean.tolist()
        _, q, _, _ = self.ttft.mean.tolist()
        steps_per_token, kernels_per_token_ms, stall_ms = settled.tpot.tolist()
        return Served(
            tpot=tpot,
            ttft=steady,
            ttft_mean=mean,
            output=output,
            decode_ms=a + k * (kernels_per_token_ms / steps_per_token),
            stall_ms=p * stall_ms,
            prefill_ms=q * sums.prefill.ms(1),
            features=settled,
        )


def _value(constants: Normal, x: Array, waiting_ms: float, scatter: float) -> Value:
    """x . constants + waiting_ms, with its interval."""
    ms = max(float(x @ constants.mean) + waiting_ms, 1e-3)
    return Value.from_share(ms, math.hypot(float(np.sqrt(x @ constants.covariance @ x)) / ms, scatter))


def learnt_constants(systems: Mapping[str, Sequence[Sequence[ModelledPoint]]]) -> Constants:
    """The constants of a system without points. systems: the points of each server, by machine and engine"""
    tpot = {name: [tpot_equations(server) for server in servers] for name, servers in systems.items()}
    ttft = {name: [ttft_equations(server) for server in servers] for name, servers in systems.items()}
    return Constants(learnt(START_TPOT, tpot, START_WEIGHT), learnt(START_TTFT, ttft, START_WEIGHT))


PRIOR = Constants(
    Normal.from_deviations((3.66, 0.751, 1.29), (1.96, 0.156, 0.340), (-0.56, -0.08, 0.43)),
    Normal.from_deviations((48.0, 1.235, 1368, 44.6), (33.0, 0.247, 890, 42.2),
                           (-0.48, -0.12, -0.38, -0.25, 0.48, -0.10)),
)  # fmt: skip
"""`learnt_constants` of all stored series, rounded; `serving validate --json` ends with it."""
