"""A machine that exists only as numbers: what disturbs it, and contenders whose true times are known.

A disturbance is a function of time and slows whichever contender is running; every sample has noise of its
own besides, and every preparation may give a contender an offset of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

TURN_S = 0.05
# Turns of a session of two contenders that is measured to the end; then everything starts over.
SESSION = 400

# Log factors on the time of a call, turn by turn.
Disturbance = Callable[[np.random.Generator, int], np.ndarray]


def nothing(rng: np.random.Generator, turns: int) -> np.ndarray:
    return np.zeros(turns)


def drift(rng: np.random.Generator, turns: int) -> np.ndarray:
    """15 % over the session, up or down."""
    return rng.choice([-1, 1]) * math.log(1.15) * np.arange(turns) / SESSION


def autocorrelated(rng: np.random.Generator, turns: int) -> np.ndarray:
    """AR(1) with coefficient 0.9 from turn to turn, 3 % standard deviation."""
    from scipy.signal import lfilter

    start, steps = 0.03 * rng.standard_normal(), 0.03 * math.sqrt(1 - 0.9**2) * rng.standard_normal(turns)
    return lfilter([1], [1, -0.9], steps, zi=[0.9 * start])[0]


def periodic(rng: np.random.Generator, turns: int) -> np.ndarray:
    """A sine of 3 % with a period of 2 to 100 turns."""
    period, phase = np.exp(rng.uniform(math.log(2), math.log(100))), rng.uniform(0, 2 * math.pi)
    return 0.03 * np.sin(2 * math.pi * np.arange(turns) / period + phase)


def spikes(rng: np.random.Generator, turns: int) -> np.ndarray:
    """3 % of turns take longer, by 10 % at least, some many times (Pareto with infinite variance)."""
    return np.where(rng.random(turns) < 0.03, np.log(1 + 0.1 * (1 + rng.pareto(1.2, turns))), 0)


def two_clocks(rng: np.random.Generator, turns: int) -> np.ndarray:
    """Clocks that change between two states, 10 % apart, every 20 turns on average."""
    state = (np.cumsum(rng.random(turns) < 1 / 20) + rng.integers(2)) % 2
    return math.log(1.1) * state


def warm_up(rng: np.random.Generator, turns: int) -> np.ndarray:
    """25 % slow at first, or fast until clocks droop; a third of it is left after 60 turns."""
    return rng.choice([-1, 1]) * math.log(1.25) * np.exp(-np.arange(turns) / 60)


def everything(rng: np.random.Generator, turns: int) -> np.ndarray:
    return sum(f(rng, turns) for f in (drift, autocorrelated, periodic, spikes, two_clocks, warm_up))


@dataclass(frozen=True)
class Neighbours:
    """Other processes that a monitor sees, come and gone without regard to what is measured.

    stay, away: turns, on average; infinite: for ever
    """

    stay: float
    away: float

    def present(self, rng: np.random.Generator, turns: int) -> np.ndarray:
        leaving, coming = 1 / self.stay, 1 / self.away
        here, present = rng.random() < self.stay / (self.stay + self.away) or not coming, []
        for change in rng.random(turns):
            here = change >= leaving if here else change < coming
            present.append(here)
        return np.array(present)


def beside_neighbours(rng: np.random.Generator, present: np.ndarray) -> np.ndarray:
    """Twice as slow, give or take 30 % by what the scheduler does, which lasts about three turns."""
    from scipy.signal import lfilter

    scattered = lfilter([math.sqrt(1 - 0.7**2)], [1, -0.7], rng.standard_normal(len(present)))
    return np.where(present, math.log(2) + 0.3 * scattered, 0)


@dataclass(frozen=True)
class Family:
    """own: standard deviation of each sample's own noise; offset: of a contender's at each preparation."""

    disturbance: Disturbance = nothing
    own: float = 0.02
    offset: float = 0.0
    neighbours: Neighbours | None = None


FAMILIES = {
    "quiet": Family(),
    "drift": Family(drift),
    "AR(1)": Family(autocorrelated),
    "periodic": Family(periodic),
    "spikes": Family(spikes),
    "two clocks": Family(two_clocks),
    "warm-up": Family(warm_up),
    "all of these": Family(everything),
    "offsets": Family(offset=0.005),
    "offsets, AR(1)": Family(autocorrelated, offset=0.005),
    "offsets, little noise": Family(own=0.003, offset=0.005),
}

# Apart from FAMILIES: the rules of other suites have no monitor, and are not held to what ours sees.
BUSY = {
    "neighbours, always": Family(neighbours=Neighbours(math.inf, 1)),
    "neighbours, now and then": Family(neighbours=Neighbours(stay=15, away=60)),
    "neighbours, half of the time": Family(neighbours=Neighbours(stay=60, away=60)),
    "neighbours, mostly": Family(neighbours=Neighbours(stay=60, away=15), offset=0.005),
}


class Machine:
    """One session: a clock, and a turn for each contender.

    true: seconds per call of each contender, if nothing disturbs it
    """

    def __init__(self, family: Family, true: Mapping[str, float], seed: int) -> None:
        self.family = family
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.log_true = {name: math.log(seconds) for name, seconds in true.items()}
        self.offset = dict.fromkeys(true, 0.0)
        turns = SESSION * max(1, len(true)) + 1
        self.disturbed = family.disturbance(self.rng, turns).tolist()
        self.noise = (family.own * self.rng.standard_normal(turns)).tolist()
        self.present = np.zeros(turns, dtype=bool)
        if family.neighbours is not None:
            self.present = family.neighbours.present(self.rng, turns)
            slowed = beside_neighbours(self.rng, self.present)
            self.disturbed = [a + b for a, b in zip(self.disturbed, slowed.tolist(), strict=True)]
        self.begun = 0

    def begin_round(self) -> None:
        self.begun = self._turn

    def end_round(self) -> str:
        """Whom a monitor has seen in the round."""
        turns = range(self.begun, self._turn)
        return "neighbours" if any(self.present[turn % len(self.noise)] for turn in turns) else ""

    @property
    def _turn(self) -> int:
        return round(self.now / TURN_S)

    def clock(self) -> float:
        return self.now

    def prepare(self, *_: object) -> None:
        offsets = self.family.offset * self.rng.standard_normal(len(self.offset))
        self.offset = dict(zip(self.offset, offsets.tolist(), strict=True))

    def turn(self, name: str) -> float:
        place = self._turn % len(self.noise)
        self.now += TURN_S
        return math.exp(self.log_true[name] + self.offset[name] + self.disturbed[place] + self.noise[place])

    @property
    def contenders(self) -> dict[str, Callable[[], float]]:
        return {name: (lambda n=name: self.turn(n)) for name in self.log_true}
