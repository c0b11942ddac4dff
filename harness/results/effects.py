"""Effects of flags on an implementation in a case: of each flag, and of two flags together; and which kernels
a setting changed."""

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
"""A kernel with a smaller share of a call's time does not tell two settings apart."""

Setting = Mapping[str, str | None]


@dataclass(frozen=True)
class Effect:
    """What a change of one flag does to the time (`main`), or by which factor it does more where another flag
    is changed too (`interaction`: 1 where the two are independent)."""

    kind: str
    what: str
    """The change in words."""
    comparison: Comparison
    """ratio > 1: the change makes calls faster."""


def same_kernels(a: Cell, b: Cell) -> bool:
    """Whether the same kernels ran in both, as far as is known from names, from what a library says that it
    picked, from oneDNN's implementations and from hashes of Triton's machine code."""
    return not any(_only(a, b) + _only(b, a))


def _only(a: Cell, b: Cell) -> list[str]:
    """What ran in a but not in b, without kernels that take hardly any time."""
    total = sum(a.kernel_us) or 1.0
    pairs = zip(a.kernels, a.kernel_us, strict=True)
    names = [name for name, us in pairs if us >= MAIN_SHARE * total and name not in b.kernels]
    if a.picked not in ("", b.picked):
        names.append(a.picked)
    return names + [word for word in a.ran if word not in b.ran]


def changes(a: Cell, b: Cell) -> str:
    """`what ran in a only -> what ran in b only`; empty if there is no difference."""
    gone, new = _only(a, b), _only(b, a)
    return f"{', '.join(gone) or 'nothing'} -> {', '.join(new) or 'nothing'}" if gone or new else ""


def effects(
    cells: Mapping[str, Cell],
    settings: Mapping[str, Setting],
    noise: float,
    confidence: float,
    margin: float = MARGIN,
) -> list[Effect]:
    """The main effect of each flag, from its first value to each other value, averaged over all settings of
    the other flags, and the interaction of each two flags. They come from the rounds that all settings have.
    Empty where the settings are not a whole factorial design.

    cells:      of one implementation and case, by setting
    settings:   the values of the flags, by setting
    confidence: of all effects together (Bonferroni)
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
    """The block and the log of the seconds by setting, for each round that all settings have."""
    times = {setting: s.by_round for setting, s in samples.items()}
    shared = set.intersection(*(set(seconds) for seconds in times.values()))
    return [
        (place[0], {setting: math.log(seconds[place]) for setting, seconds in times.items()})
        for place in sorted(shared)
    ]


Question = tuple[str, str, dict[str, float]]
"""The kind of an effect, the change in words, and the weight of each setting's log."""
Values = tuple[str | None, ...]
"""The values of the flags in a setting."""


def _mains(values: Mapping[str, list[str | None]], settings: Mapping[Values, str]) -> Iterator[Question]:
    """Contrasts of logs, the first value minus the other: positive where the other is faster."""
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
    """By how much more the change of one flag brings where the other flag is changed too."""
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
    """The verdicts in which another setting is slower than the first."""
    return [r for r in records if isinstance(r, Verdict) and r.about == "baseline" and r.verdict == "slower"]
