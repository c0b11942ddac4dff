"""Multiple comparisons: the verdicts of a case, which hold together (Holm), and when measuring may stop."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, interval
from harness.statistics.paired import MARGIN, Comparison, compare, noise_of

INTERIM_ERROR = 0.1  # verdicts before the end may have this share of the error allowed for final ones

Series = Mapping[str, Sequence[float]]  # seconds of each round by entry; NaN where an entry has none

About = Literal["baseline", "runner-up", "A/A"]


@dataclass(frozen=True)
class JointVerdict:
    """The comparison of two entries, at a confidence with which it holds together with the others."""

    a: str
    b: str
    about: About  # with what the entry is compared
    noise: float
    confidence: float
    comparison: Comparison  # the result of compare(a, b, floor=noise, confidence=confidence)

    @property
    def half_width(self) -> float:
        """Half the width of the interval, as a share of the ratio."""
        return (self.comparison.high - self.comparison.low) / 2 / self.comparison.ratio


def joint_verdicts(
    series: Series,
    blocks: Sequence[int],
    names: Collection[str],
    baseline: str | None,
    *,
    rerun: str | None = None,
    confidence: float = CONFIDENCE,
    margin: float = MARGIN,
) -> list[JointVerdict]:
    """The verdicts on the named entries: each against the `baseline`, and the winner against the `runner-up`.

    series: of the entries that were measured to the end
    blocks: the block of each round
    rerun:  the baseline prepared a second time: the pair gives the noise; without it the noise is 0

    The verdicts hold together with the stated confidence by Holm's procedure (1979, Scandinavian Journal of
    Statistics 6:65). At first each question gets an equal share of the allowed error. Questions that have the
    verdict `faster` or `slower` at that share are answered, and the others share the error anew. The winner
    is chosen after looking at the times; that costs one share only (Gutmann and Maymin 1987, Annals of
    Statistics 15:456). Each verdict states the confidence at which it was reached.
    """
    noise = 0.0
    if rerun is not None and baseline is not None and rerun in series and baseline in series:
        noise = noise_of(compare(series[rerun], series[baseline], blocks=blocks, confidence=confidence))
    pairs = list(_pairs(series, blocks, names, baseline))
    # A question is the set of its two entries. Two pairs may be one: the runner-up may be the baseline.
    unanswered = {frozenset((a, b)) for a, b, _ in pairs}
    verdicts: dict[tuple[str, str, About], JointVerdict] = {}
    while unanswered:
        stricter = 1 - (1 - confidence) / len(unanswered)
        answered = set()
        for a, b, about in pairs:
            question = frozenset((a, b))
            if question not in unanswered:
                continue
            comparison = compare(
                series[a], series[b], blocks=blocks, floor=noise, margin=margin, confidence=stricter
            )
            verdicts[a, b, about] = JointVerdict(a, b, about, noise, stricter, comparison)
            if comparison.verdict in ("faster", "slower"):
                answered.add(question)
        if not answered:
            break
        unanswered -= answered
    return [verdicts[pair] for pair in pairs]


def _pairs(
    series: Series, blocks: Sequence[int], names: Collection[str], baseline: str | None
) -> Iterator[tuple[str, str, About]]:
    """The pairs of entries to compare, with what each is compared with."""
    if baseline is not None and baseline in names:
        for name in names:
            if name != baseline:
                yield name, baseline, "baseline"
    ranked = sorted(names, key=lambda name: log_time(series[name], blocks))
    if len(ranked) > 1:
        yield ranked[0], ranked[1], "runner-up"


def log_time(seconds: Sequence[float], blocks: Sequence[int]) -> float:
    """The logarithm of an entry's time over all blocks. seconds: of each round; NaN where it has none"""
    logs = [(block, math.log(s)) for block, s in zip(blocks, seconds, strict=True) if not math.isnan(s)]
    return interval(logs).mean


def stopping_reason(
    series: Series,
    blocks: Sequence[int],
    names: Collection[str],
    baseline: str | None,
    *,
    rerun: str | None,
    confidence: float,
    half_width: float,
    margin: float = MARGIN,
) -> str:
    """Why no more rounds are needed; empty if they are. `tight`: each interval has at most this half width.
    `clear`: the verdict of each wider interval is not `unclear`, or there is nothing to compare. Arguments as
    for `joint_verdicts`.

    Repeated looks must not raise the share of errors. So a verdict before the end counts only if it is
    reached at a far higher confidence; then the final verdicts keep theirs (Haybittle 1971, British Journal
    of Radiology 44:793; Peto and others 1976, British Journal of Cancer 34:585).
    """
    verdicts = functools.partial(joint_verdicts, series, blocks, names, baseline, rerun=rerun, margin=margin)
    final = verdicts(confidence=confidence)
    if not final:
        return "clear"
    # `not <=`, because the half width of an entry without a time is NaN.
    loose = [joint for joint in final if not joint.half_width <= half_width]
    if not loose:
        return "tight"
    if any(joint.comparison.verdict == "unclear" for joint in loose):
        return ""
    loose_pairs = {(joint.a, joint.b) for joint in loose}
    for joint in verdicts(confidence=1 - INTERIM_ERROR * (1 - confidence)):
        if (joint.a, joint.b) in loose_pairs and joint.comparison.verdict == "unclear":
            return ""
    return "clear"
