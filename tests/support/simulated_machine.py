"""A machine that exists only as numbers: entries whose true times are known, noise drawn from a seed."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.timing.rounds import Policy, Rounds, measure

SAMPLE_S = 0.05


@dataclass(frozen=True)
class Noise:
    """Deviations of log times, of samples and of preparations; spikes: the share of turns that take longer"""

    own: float = 0.02
    offset: float = 0.0
    spikes: float = 0.0


QUIET, OFFSETS, SPIKES = Noise(), Noise(offset=0.005), Noise(spikes=0.03)


class Machine:
    """Each sample takes SAMPLE_S of its clock. true: seconds per call of each entry"""

    def __init__(self, true: Mapping[str, float], noise: Noise = QUIET, seed: int = 1) -> None:
        self.true, self.noise = dict(true), noise
        self.random = random.Random(f"noise {seed}")  # others draw from the seed itself
        self.now = 0.0
        self.offset = dict.fromkeys(true, 0.0)

    def clock(self) -> float:
        return self.now

    def prepare(self, *_: object) -> None:
        self.offset = {name: self.random.gauss(0, self.noise.offset) for name in self.true}

    def sample(self, name: str) -> float:
        self.now += SAMPLE_S
        has_spike = self.noise.spikes and self.random.random() < self.noise.spikes
        spike = 1.1 + self.random.expovariate(1) if has_spike else 1.0
        return self.true[name] * spike * math.exp(self.offset[name] + self.random.gauss(0, self.noise.own))

    @property
    def entries(self) -> dict[str, Callable[[], float]]:
        return {name: (lambda n=name: self.sample(n)) for name in self.true}

    def policy(self, **given: Any) -> Policy:
        return Policy(**{"clock": self.clock, "begin_block": self.prepare} | given)

    def measured(self, **policy: Any) -> Rounds:
        return measure(self.entries, self.policy(**policy))
