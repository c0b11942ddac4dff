"""Effects of flags on an implementation in a case: setting by setting, flag by flag, and two flags
together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.plan.settings import value_text
from harness.results.schema import Cell, Record, Samples, Verdict
from harness.statistics.intervals import interval
from harness.statistics.paired import MARGIN, Comparison, verdict

MAIN_SHARE = 0.1
"""Of a call's time: a kernel that takes less is not what makes a setting another."""

Setting = Mapping[str, str | None]


@dataclass(frozen=True)
class Effect:
    """What a change of flags does to the time: of one (`main`), or what that of one does to the other's
    (`interaction`): 1 where the two do not touch each other.

    what:       in words
    comparison: ratio > 1: the change makes calls faster
    """

    kind: str
    what: str
    comparison: Comparison


def same_kernels(a: Cell, b: Cell) -> bool:
    """Whether the same ran in both, as far as is known: names, what a library says it picked, oneDNN's
    implementations, the machine code of Triton kernels."""
    return not any(_only(a, b) + _only(b, a))


def _only(a: Cell, b: Cell) -> list[str]:
    """What ran in a and not in b. A kernel that takes hardly any time may be missing from either list."""
    total = sum(a.kernel_us) or 1.0
    pairs = zip(a.kernels, a.kernel_us, strict=True)
    names = [name for name, us in pairs if us >= MAIN_SHARE * total and name not in b.kernels]
    return [
        *names,
        *[a.picked] * (a.picked not in ("", b.picked)),
        *(word for word in a.ran if word not in b.ran),
    ]


def changes(a: Cell, b: Cell) -> str:
    """What of b ran instead of what of a; empty if the same."""
    gone, new = _only(a, b), _only(b, a)
    return f"{', '.join(gone) or 'nothing'} -> {', '.join(new) or 'nothing'}" if gone or new else ""


def effects(
    cells: Mapping[str, Cell],
    settings: Mapping[str, Setting],
    noise: float,
    confidence: float,
    margin: float = MARGIN,
) -> list[Effect]:
    """Main effects of each flag, from its first value to each other, averaged over all settings of the
    others, and interactions of each two: from the rounds that all settings of a factorial have, and none
    where the factorial is not whole.

    cells, settings: by setting, of one implementation and case; settings without the plain setting
    confidence:      of all of them together (Bonferroni)
    """
    values = _values(settings)
    complete = math.prod(map(len, values.values()))
    if (
        len(settings) != complete
        or complete < 2
        or any(not cells[setting].samples.seconds for setting in settings)
    ):
        return []
    logs = _logs({setting: cells[setting].samples for setting in settings})
    by_setting = {
        tuple(values_of_flags[name] for name in values): setting
        for setting, values_of_flags in settings.items()
    }
    questions = [*_mains(values, by_setting), *_interactions(values, by_setting)]
    each = 1 - (1 - confidence) / len(questions)
    effects = []
    for kind, what, weights in questions:
        contrast = [
            (block, sum(weight * log[setting] for setting, weight in weights.items())) for block, log in logs
        ]
        if contrast:
            effects.append(Effect(kind, what, _comparison(contrast, noise, each, margin)))
    return effects


def _values(settings: Mapping[str, Setting]) -> dict[str, list[str | None]]:
    values: dict[str, list[str | None]] = {}
    for setting in settings.values():
        for name, value in setting.items():
            known = values.setdefault(name, [])
            if value not in known:
                known.append(value)
    return values


def _logs(samples: Mapping[str, Samples]) -> list[tuple[int, dict[str, float]]]:
    """(block, log seconds by setting) of the rounds that all settings have."""
    times = {
        setting: dict(zip(zip(s.block, s.round, strict=True), s.seconds, strict=True))
        for setting, s in samples.items()
    }
    shared = set.intersection(*(set(seconds) for seconds in times.values()))
    return [
        (place[0], {setting: math.log(seconds[place]) for setting, seconds in times.items()})
        for place in sorted(shared)
    ]


Question = tuple[str, str, dict[str, float]]
Values = tuple[str | None, ...]


def _mains(values: Mapping[str, list[str | None]], settings: Mapping[Values, str]) -> Iterator[Question]:
    """Contrasts of logs, first value minus the other: positive where the other is faster."""
    for place, (name, own) in enumerate(values.items()):
        others = len(settings) / len(own)
        for value in own[1:]:
            weights = {
                setting: (1 if key[place] == own[0] else -1) / others
                for key, setting in settings.items()
                if key[place] in (own[0], value)
            }
            yield "main", f"{name}: {value_text(own[0])} -> {value_text(value)}", weights


def _interactions(
    values: Mapping[str, list[str | None]], settings: Mapping[Values, str]
) -> Iterator[Question]:
    """How much more the change of one brings where the other is changed too."""
    names = list(values)
    for (i, one), (j, other) in itertools.combinations(enumerate(names), 2):
        rest = len(settings) / len(values[one]) / len(values[other])
        for a, b in itertools.product(values[one][1:], values[other][1:]):
            weights = {
                setting: (1 if key[i] == a else -1) * (-1 if key[j] == b else 1) / rest
                for key, setting in settings.items()
                if key[i] in (values[one][0], a) and key[j] in (values[other][0], b)
            }
            yield "interaction", f"{one}={value_text(a)} with {other}={value_text(b)}", weights


def _comparison(
    contrast: Sequence[tuple[int, float]], noise: float, confidence: float, margin: float
) -> Comparison:
    over_blocks = interval(contrast, confidence)
    ratio, low, high = (math.exp(v) for v in (over_blocks.mean, over_blocks.low, over_blocks.high))
    return Comparison(ratio, low, high, verdict(low, high, noise=noise, margin=margin))


def regressions(records: Iterable[Record]) -> list[Verdict]:
    """Of the other settings against the first."""
    return [r for r in records if isinstance(r, Verdict) and r.about == "baseline" and r.verdict == "slower"]
