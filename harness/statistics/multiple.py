"""Multiple comparisons: the verdicts of a case, which hold together (Holm), and when measuring may stop."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, interval
from harness.statistics.paired import MARGIN, Comparison, compare, noise_of

INTERIM_ERROR = 0.1  # the share of the allowed error of final verdicts that verdicts before the end may have

Series = Mapping[str, Sequence[float]]  # seconds of each round by entry; NaN where an entry has none

About = Literal["baseline", "runner-up", "A/A"]


@dataclass(frozen=True)
class JointVerdict:
    """The comparison of two entries, at a confidence at which it holds together with the others."""

    a: str
    b: str
    about: About  # what it is for
    noise: float
    confidence: float
    comparison: Comparison  # the result of compare(a, b, floor=noise, confidence=confidence)

    @property
    def half_width(self) -> float:
        return (self.comparison.high - self.comparison.low) / 2 / self.comparison.ratio


def joint_verdicts(
    series: Series,
    blocks: Sequence[int],
    wanted: Collection[str],
    baseline: str | None,
    *,
    rerun: str | None = None,
    confidence: float = CONFIDENCE,
    margin: float = MARGIN,
) -> list[JointVerdict]:
    """The verdicts on the wanted entries: one about the `baseline` for each other entry, and one on the
    winner against the `runner-up`.

    series: of the entries that lasted to the end
    rerun:  the baseline prepared a second time: the pair gives the noise; without it the noise is 0

    The verdicts hold together with the stated confidence by Holm's procedure (1979, Scandinavian Journal of
    Statistics 6:65): a verdict that is `faster` or `slower` at an equal share of the error leaves its share
    to the others.
    That the winner was chosen after looking at the times costs one share only (Gutmann and Maymin 1987,
    Annals of Statistics 15:456). Each verdict states the confidence at which it was reached.
    """
    noise = 0.0
    if rerun is not None and baseline is not None and rerun in series and baseline in series:
        noise = noise_of(compare(series[rerun], series[baseline], blocks=blocks, confidence=confidence))
    pairs = list(_pairs(series, blocks, wanted, baseline))
    # Two pairs may be one question: the runner-up may be the baseline.
    unanswered = {frozenset((a, b)) for a, b, _ in pairs}
    verdicts: dict[tuple[str, str, About], JointVerdict] = {}
    while unanswered:
        share = 1 - (1 - confidence) / len(unanswered)
        answered = set()
        for a, b, about in pairs:
            if frozenset((a, b)) in unanswered:
                times_a, times_b = series[a], series[b]
                found = compare(times_a, times_b, blocks=blocks, floor=noise, margin=margin, confidence=share)
                verdicts[a, b, about] = JointVerdict(a, b, about, noise, share, found)
                if found.verdict in ("faster", "slower"):
                    answered.add(frozenset((a, b)))
        if not answered:
            break
        unanswered -= answered
    return [verdicts[pair] for pair in pairs]


def _pairs(
    series: Series, blocks: Sequence[int], wanted: Collection[str], baseline: str | None
) -> Iterator[tuple[str, str, About]]:
    if baseline is not None and baseline in wanted:
        for name in wanted:
            if name != baseline:
                yield name, baseline, "baseline"
    ranked = sorted(wanted, key=lambda name: log_time(series[name], blocks))
    if len(ranked) > 1:
        yield ranked[0], ranked[1], "runner-up"


def log_time(seconds: Sequence[float], blocks: Sequence[int]) -> float:
    """The logarithm of an entry's time over all blocks."""
    logs = [(block, math.log(s)) for block, s in zip(blocks, seconds, strict=True) if not math.isnan(s)]
    return interval(logs).mean


def stopping_reason(
    series: Series,
    blocks: Sequence[int],
    wanted: Collection[str],
    baseline: str | None,
    *,
    rerun: str | None,
    confidence: float,
    half_width: float,
    margin: float = MARGIN,
) -> str:
    """Why no more rounds are needed; empty if they are. `tight`: all wanted intervals are tight; `clear`: the
    pairs whose intervals are not have a verdict other than `unclear`, or there is nothing to compare.

    Repeated looks must not raise the share of errors: before the end a verdict counts only if it is reached
    at a far higher confidence, so that the final verdicts keep theirs (Haybittle 1971, British Journal of
    Radiology 44:793; Peto and others 1976, British Journal of Cancer 34:585).
    """
    verdicts = functools.partial(joint_verdicts, series, blocks, wanted, baseline, rerun=rerun, margin=margin)
    at_the_end = verdicts(confidence=confidence)
    # `not <=`, because the half width of an entry without a time is NaN.
    loose = [joint for joint in at_the_end if not joint.half_width <= half_width]
    if not loose:
        return "tight" if at_the_end else "clear"
    if any(joint.comparison.verdict == "unclear" for joint in loose):
        return ""
    pairs = {(joint.a, joint.b) for joint in loose}
    for joint in verdicts(confidence=1 - INTERIM_ERROR * (1 - confidence)):
        if (joint.a, joint.b) in pairs and joint.comparison.verdict == "unclear":
            return ""
    return "clear"
