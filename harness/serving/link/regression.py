"""Least squares of a few constants, begun at what other systems had: linear models with normal constants.

Every measured value is y = x . constants, off by a share of itself (`scatter`). With no point the constants
are those of other systems (the prior), with many they are the least-squares fit; in between they are the
most likely compromise of both. All of it is closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
ROUNDS = 60  # of `learnt`, which moves by less than 1 % after 30


@dataclass(frozen=True)
class Normal:
    """Constants as far as they are known. mean: [n]; covariance: [n, n]"""

    mean: Array
    covariance: Array

    @classmethod
    def of(cls, mean: Sequence[float], deviation: Sequence[float], correlation: Sequence[float]) -> Normal:
        """correlation: of each pair, in the order of the upper triangle"""
        shape = np.eye(len(mean))
        shape[np.triu_indices(len(mean), 1)] = correlation
        whole = shape + shape.T - np.eye(len(mean))
        return cls(np.array(mean, float), whole * np.outer(deviation, deviation))

    @property
    def deviation(self) -> Array:
        return np.sqrt(np.diag(self.covariance))


@dataclass(frozen=True)
class Rows:
    """Measured values of one system: x [rows, n] and y [rows], positive, each off by `scatter` of y."""

    x: Array
    y: Array
    scatter: float

    def fitted(self, prior: Normal) -> Normal:
        """The constants after these rows (Bayes' rule for normal variables)."""
        if not len(self.y):
            return prior
        x = self.x / (self.scatter * self.y)[:, None]
        precision = np.linalg.inv(prior.covariance)
        covariance = np.linalg.inv(precision + x.T @ x)
        return Normal(covariance @ (precision @ prior.mean + x.sum(axis=0) / self.scatter), covariance)

    def scatter_about(self, constants: Normal, assumed_points: int, fitted: int) -> float:
        """A scatter from the residuals of a fit of so many constants, with what is assumed of it counted as
        `assumed_points` of them."""
        off = self.x @ constants.mean / self.y - 1
        count = assumed_points + max(len(off) - fitted, 0)
        return float(np.sqrt((assumed_points * self.scatter**2 + (off**2).sum()) / count))


def learnt(begun: Normal, systems: Mapping[str, Sequence[Rows]], weight: float) -> Normal:
    """The distribution of the constants over systems, which is a new system's prior: by expectation and
    maximisation.

    systems: rows of servers by what they are of; all servers of one machine and engine count as one system
    begun:   where it begins; its covariance counts as so many (weight) systems more
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
