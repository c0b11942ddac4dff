"""Least squares of a few constants, begun at what other systems had: linear models with normal constants.

Every measured value is y = x . constants, off by a share of itself (`scatter`). With no point the constants
are those of other systems (the prior), with many they are the least-squares fit; in between they are the most
likely compromise of both. All of it is closed form.
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
    def of(
        cls, mean: Sequence[float], deviation: Sequence[float], correlation: Array | None = None
    ) -> Normal:
        """correlation: [n, n]; None: of none with another"""
        spread = np.asarray(deviation, float)
        shape = np.eye(len(spread)) if correlation is None else np.asarray(correlation, float)
        return cls(np.asarray(mean, float), shape * np.outer(spread, spread))

    @property
    def deviation(self) -> Array:
        return np.sqrt(np.diag(self.covariance))

    def plus(self, other: Array) -> Normal:
        """Less sure by another covariance."""
        return Normal(self.mean, self.covariance + other)

    def value(self, x: Array) -> tuple[float, float]:
        """x . constants, and its deviation."""
        return float(x @ self.mean), float(np.sqrt(x @ self.covariance @ x))


@dataclass(frozen=True)
class Rows:
    """Measured values of one system. x: [rows, n]; y: [rows], positive; each off by `scatter` of y"""

    x: Array
    y: Array
    scatter: Array

    def __len__(self) -> int:
        return len(self.y)

    @property
    def information(self) -> tuple[Array, Array]:
        """X' W X and X' W y."""
        weight = 1 / (self.scatter * self.y) ** 2
        return (self.x.T * weight) @ self.x, (self.x.T * weight) @ self.y

    def off(self, constants: Normal) -> Array:
        """Fitted over measured less 1, [rows]."""
        return self.x @ constants.mean / self.y - 1


def fitted(prior: Normal, rows: Rows) -> Normal:
    """The constants after the rows (Bayes' rule for normal variables)."""
    return _after(prior, *rows.information) if len(rows) else prior


def _after(prior: Normal, information: Array, pull: Array) -> Normal:
    precision = np.linalg.inv(prior.covariance)
    covariance = np.linalg.inv(precision + information)
    return Normal(covariance @ (precision @ prior.mean + pull), covariance)


def learnt(begun: Normal, systems: Mapping[str, Sequence[Rows]], weight: float) -> Normal:
    """The distribution of the constants over systems, which is a new system's prior: by expectation and
    maximisation.

    systems: rows of servers by what they are of; all servers of one machine and engine count as one system
    begun:   where it begins; its covariance counts as so many (weight) systems more
    """
    shares, known = [], []
    for servers in systems.values():
        for rows in servers:
            shares.append(1 / len(servers) / len(systems))
            known.append(rows.information)
    prior = begun
    for _ in range(ROUNDS):
        found = [_after(prior, *each) for each in known]
        mean = sum(share * one.mean for share, one in zip(shares, found, strict=True))
        spread = sum(
            share * (one.covariance + np.outer(one.mean - mean, one.mean - mean))
            for share, one in zip(shares, found, strict=True)
        )
        of_all = len(systems) + weight
        prior = Normal(mean, (len(systems) * spread + weight * begun.covariance) / of_all)
    return prior


def pooled_scatter(assumed: float, points: int, off: Array, constants: int) -> float:
    """A scatter from residuals of a fit of so many constants, with what is assumed counted as `points`."""
    more = max(len(off) - constants, 0)
    return float(np.sqrt((points * assumed**2 + (off**2).sum()) / (points + more)))
