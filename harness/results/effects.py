"""Effects of flags, alone and in pairs, on an implementation; and which kernels a setting changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.plan.settings import value_text
from harness.results.schema import Cell, Record, Verdict
from harness.statistics.intervals import interval
from harness.statistics.paired import MARGIN, Comparison, comparison_of

MAIN_SHARE = 0.1  # a kernel with a smaller share of a call's time does not tell two settings apart
Settings = Mapping[str, Mapping[str, str | None]]
"""By setting the values of its flags. All settings have the same flags."""


@dataclass(frozen=True)
class Effect:
    """An effect of kind `main` is the speedup that a change of one flag brings; one of kind `interaction` is
    the factor, 1 if they are independent, by which it is larger where another flag is changed too."""

    kind: Literal["main", "interaction"]
    what: str  # the change in words
    comparison: Comparison  # its ratio is the speedup or the factor; > 1: faster


def _only_in_a(a: Cell, b: Cell) -> list[str]:
    """What ran in a but not in b, without kernels that take hardly any time."""
    total_us = sum(a.kernel_us)
    times = zip(a.kernels, a.kernel_us, strict=True)
    main = [name for name, us in times if us > 0 and us >= MAIN_SHARE * total_us]
    picked = [a.picked] if a.picked and a.picked != b.picked else []
    kernels = [name for name in main if name not in b.kernels]
    return [*kernels, *picked, *(name for name in a.ran if name not in b.ran)]


def changes(a: Cell, b: Cell) -> str:
    """`what ran in a only -> what ran in b only`; empty if the same ran in both, by the names of kernels
    and of oneDNN's implementations, what a library says that it picked, and hashes of Triton's code."""
    only_in_a, only_in_b = _only_in_a(a, b), _only_in_a(b, a)
    if not (only_in_a or only_in_b):
        return ""
    return f"{', '.join(only_in_a) or 'nothing'} -> {', '.join(only_in_b) or 'nothing'}"


def effects(
    cells: Mapping[str, Cell], settings: Settings, noise: float, confidence: float, margin: float = MARGIN
) -> list[Effect]:
    """The main effect of each flag, from its first value to each other value, averaged over all settings of
    the other flags; and the interaction of each two flags. The effects come from the rounds in which all
    settings were timed. Empty where the settings are not all combinations of the flags' values, each once.

    cells:      of one implementation and case, by setting
    noise:      that of the implementation in this case
    confidence: of all effects together (Bonferroni)
    """
    values: dict[str, list[str | None]] = {}  # by flag; the first setting's value is the first
    for flag_values in settings.values():
        for flag, value in flag_values.items():
            if value not in values.setdefault(flag, []):
                values[flag].append(value)
    combinations = math.prod(map(len, values.values()))
    times = {setting: cells[setting].samples.by_round for setting in settings}
    if len(settings) != combinations or combinations < 2:
        return []
    shared = sorted(set.intersection(*map(set, times.values())))
    if not shared:
        return []
    contrasts = list(_contrasts(settings, values))
    effect_confidence = 1 - (1 - confidence) / len(contrasts)
    flag_effects = []
    for kind, what, weights in contrasts:
        by_block = []
        for block, index in shared:
            logs = [weight * math.log(times[setting][block, index]) for setting, weight in weights.items()]
            by_block.append((block, sum(logs)))
        comparison = comparison_of(interval(by_block, effect_confidence), noise=noise, margin=margin)
        flag_effects.append(Effect(kind, what, comparison))
    return flag_effects


def _contrasts(
    settings: Settings, values: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[Literal["main", "interaction"], str, dict[str, float]]]:
    """Yields the kind of each effect, the change in words, and weights by setting: the effect is the sum of
    the weighted logarithms of the times. Settings with a third value of a flag have no weight.

    values: those of each flag, the first setting's first
    """
    for flag, (first, *changed_values) in values.items():
        count = len(settings) / len(values[flag])  # of the settings of the other flags, to average over
        value_of = {setting: flag_values[flag] for setting, flag_values in settings.items()}
        for changed in changed_values:
            signs = {first: 1, changed: -1}  # a speedup is the time before over the time after
            weights = {s: signs[value] / count for s, value in value_of.items() if value in signs}
            yield "main", f"{flag}: {value_text(first)} -> {value_text(changed)}", weights
    for flag_a, flag_b in itertools.combinations(values, 2):
        count = len(settings) / (len(values[flag_a]) * len(values[flag_b]))
        pair_of = {s: (flag_values[flag_a], flag_values[flag_b]) for s, flag_values in settings.items()}
        (first_a, *changed_a), (first_b, *changed_b) = values[flag_a], values[flag_b]
        for a, b in itertools.product(changed_a, changed_b):
            # The speedup of both over the product of the speedups of each alone.
            signs_of_pairs = {(first_a, first_b): -1, (a, first_b): 1, (first_a, b): 1, (a, b): -1}
            weights = {s: signs_of_pairs[p] / count for s, p in pair_of.items() if p in signs_of_pairs}
            yield "interaction", f"{flag_a}={value_text(a)} with {flag_b}={value_text(b)}", weights


def lost(records: Iterable[Record], first: str) -> list[Cell]:
    """The cells that have no time, although the same row has one in that case under the setting `first`."""
    cells = [record for record in records if isinstance(record, Cell)]
    timed = {(c.case, c.impl, c.launch) for c in cells if c.setting == first and c.time_us}
    return [c for c in cells if not c.time_us and (c.case, c.impl, c.launch) in timed]


def regressions(records: Iterable[Record]) -> list[Verdict]:
    """The verdicts that say that a setting is slower than the first one."""
    return [r for r in records if isinstance(r, Verdict) and r.about == "baseline" and r.verdict == "slower"]
