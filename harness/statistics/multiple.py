"""The comparisons of a case, judged together: each contender against the anchor, winner against runner-up."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.statistics.intervals import CONFIDENCE, interval
from harness.statistics.paired import MARGIN, Comparison, compare, noise_floor

# A look before the end takes a contender's word only at a tenth of the error that the end allows.
LOOK = 0.1

Series = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Judged:
    """compare(a, b, floor=floor, confidence=confidence) and what it was asked for."""

    a: str
    b: str
    about: str
    floor: float
    confidence: float
    found: Comparison

    @property
    def half_width(self) -> float:
        return (self.found.high - self.found.low) / 2 / self.found.ratio


def joint_verdicts(
    series: Series,
    blocks: Sequence[int],
    wanted: Collection[str],
    anchor: str | None,
    twin: str | None = None,
    confidence: float = CONFIDENCE,
    margin: float = MARGIN,
) -> list[Judged]:
    """The verdicts on the wanted contenders: `baseline` for each but the anchor, and one `runner-up`.

    series: seconds of each round, NaN where there are none, of those who lasted to the end
    twin:   the anchor prepared a second time: the pair gives the floor; without it the floor is 0

    All of them hold together with the stated confidence by Holm's procedure (1979, Scandinavian Journal
    of Statistics 6:65): what is clear at the confidence that all share equally leaves its share to the
    others. That the winner was chosen after looking costs one share and no more (Gutmann and Maymin
    1987, Annals of Statistics 15:456). Each verdict carries the confidence at which it was found.
    """
    floor = 0.0
    if twin in series and anchor in series:
        floor = noise_floor(compare(series[twin], series[anchor], blocks=blocks, confidence=confidence))
    pairs = list(_pairs(series, blocks, wanted, anchor))
    open_questions = {frozenset(pair[:2]) for pair in pairs}
    judged: dict[int, Judged] = {}
    while open_questions:
        share = 1 - (1 - confidence) / len(open_questions)
        for place, (a, b, about) in enumerate(pairs):
            if frozenset((a, b)) in open_questions:
                found = compare(
                    series[a], series[b], blocks=blocks, floor=floor, margin=margin, confidence=share
                )
                judged[place] = Judged(a, b, about, floor, share, found)
        clear = {frozenset((j.a, j.b)) for j in judged.values() if j.found.verdict in ("faster", "slower")}
        if not clear & open_questions:
            break
        open_questions -= clear
    return [judged[place] for place in range(len(pairs))]


def _pairs(
    series: Series, blocks: Sequence[int], wanted: Collection[str], anchor: str | None
) -> Iterator[tuple[str, str, str]]:
    if anchor in wanted:
        yield from ((name, anchor, "baseline") for name in wanted if name != anchor)
    ranked = sorted(wanted, key=lambda name: log_time(series[name], blocks))
    if len(ranked) > 1:
        yield ranked[0], ranked[1], "runner-up"


def log_time(seconds: Sequence[float], blocks: Sequence[int]) -> float:
    logs = [(block, math.log(s)) for block, s in zip(blocks, seconds, strict=True) if s == s]
    return interval(logs).mean


def stopping_reason(
    series: Series,
    blocks: Sequence[int],
    wanted: Collection[str],
    anchor: str | None,
    twin: str | None,
    confidence: float,
    half_width: float,
    margin: float = MARGIN,
) -> str:
    """Why no more rounds are needed, or nothing: all wanted intervals are `tight`, or what is not has a
    `clear` verdict (nobody being left to compare is clear).

    Looking may not inflate errors: before the end a verdict counts only if it is clear at a far higher
    confidence, which leaves the end's its own (Haybittle 1971, British Journal of Radiology 44:793; Peto
    and others 1976, British Journal of Cancer 34:585).
    """
    at_the_end = joint_verdicts(series, blocks, wanted, anchor, twin, confidence, margin)
    loose = [j for j in at_the_end if not j.half_width <= half_width]
    if not loose:
        return "tight" if at_the_end else "clear"
    if any(j.found.verdict == "unclear" for j in loose):
        return ""
    now = joint_verdicts(series, blocks, wanted, anchor, twin, 1 - LOOK * (1 - confidence), margin)
    pairs = {(j.a, j.b) for j in loose}
    return "clear" if all(j.found.verdict != "unclear" for j in now if (j.a, j.b) in pairs) else ""
