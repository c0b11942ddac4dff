"""Effects of flags on an implementation in a case, alone and in pairs; which kernels a setting changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.plan.settings import value_text
from harness.results.schema import Cell, Record, Verdict
from harness.statistics.intervals import interval
from harness.statistics.paired import MARGIN, Comparison, verdict

MAIN_SHARE = 0.1  # a kernel with a smaller share of a call's time does not tell two settings apart


@dataclass(frozen=True)
class Effect:
    """What a change of one flag does to the time (`main`), or by which factor it does more where another flag
    is changed too (`interaction`: 1 where the two are independent)."""

    kind: str
    what: str  # the change in words
    comparison: Comparison  # ratio > 1: the change makes calls faster


def _only(a: Cell, b: Cell) -> list[str]:
    """What ran in a but not in b, without kernels that take hardly any time."""
    total = sum(a.kernel_us) or 1.0
    pairs = zip(a.kernels, a.kernel_us, strict=True)
    names = [name for name, us in pairs if us >= MAIN_SHARE * total and name not in b.kernels]
    if a.picked not in ("", b.picked):
        names.append(a.picked)
    return names + [word for word in a.ran if word not in b.ran]


def changes(a: Cell, b: Cell) -> str:
    """`what ran in a only -> what ran in b only`; empty if the same kernels ran in both, as far as is known
    from names, from what a library says that it picked, from oneDNN's implementations and from hashes of
    Triton's machine code."""
    gone, new = _only(a, b), _only(b, a)
    return f"{', '.join(gone) or 'nothing'} -> {', '.join(new) or 'nothing'}" if gone or new else ""


def effects(
    cells: Mapping[str, Cell],
    settings: Mapping[str, Mapping[str, str | None]],
    noise: float,
    confidence: float,
    margin: float = MARGIN,
) -> list[Effect]:
    """The main effect of each flag, from its first value to each other value, averaged over all settings of
    the other flags, and the interaction of each two flags. They come from the rounds that all settings have.
    Empty where the settings are not a whole factorial design.

    cells:      of one implementation and case, by setting
    settings:   the values of the flags, by setting; all settings have the same flags
    confidence: of all effects together (Bonferroni)
    """
    flags = next(iter(settings.values()), {})
    values = {flag: list(dict.fromkeys(of[flag] for of in settings.values())) for flag in flags}
    complete = math.prod(map(len, values.values()))
    times = {setting: cells[setting].samples.by_round for setting in settings}
    if len(settings) != complete or complete < 2 or not all(times.values()):
        return []
    shared = sorted(set.intersection(*map(set, times.values())))
    if not shared:
        return []
    logs = {setting: [math.log(seconds[place]) for place in shared] for setting, seconds in times.items()}
    contrasts = list(_contrasts(settings, values))
    each = 1 - (1 - confidence) / len(contrasts)
    found = []
    for kind, what, weights in contrasts:
        sums = [
            sum(weight * logs[setting][i] for setting, weight in weights.items()) for i in range(len(shared))
        ]
        over_blocks = interval(zip((block for block, _ in shared), sums, strict=True), each)
        ratio, low, high = (math.exp(v) for v in (over_blocks.mean, over_blocks.low, over_blocks.high))
        word = verdict(low, high, noise=noise, margin=margin)
        found.append(Effect(kind, what, Comparison(ratio, low, high, word)))
    return found


def _contrasts(
    settings: Mapping[str, Mapping[str, str | None]], values: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """For each change of one flag, then of two flags together: the kind of its effect, the change in words,
    and the weight of the log time under each setting that has the first or the changed values.

    values: those of each flag, the first one first
    """
    for flags in (*itertools.combinations(values, 1), *itertools.combinations(values, 2)):
        averaged = len(settings) / math.prod(len(values[flag]) for flag in flags)
        for change in itertools.product(*(values[flag][1:] for flag in flags)):
            changed = dict(zip(flags, change, strict=True))
            weights = {}
            for setting, of in settings.items():
                if all(of[flag] in (values[flag][0], value) for flag, value in changed.items()):
                    count = sum(of[flag] == value for flag, value in changed.items())
                    # Main: first minus changed. Interaction: one changed minus both or none changed.
                    sign = 1 if count == len(flags) - 1 else -1
                    weights[setting] = sign / averaged
            if len(flags) == 1:
                (flag,) = flags
                yield "main", f"{flag}: {value_text(values[flag][0])} -> {value_text(changed[flag])}", weights
            else:
                words = [f"{flag}={value_text(value)}" for flag, value in changed.items()]
                yield "interaction", " with ".join(words), weights


def lost(records: Iterable[Record], first: str) -> list[Cell]:
    """Cells without a time of rows that have one under the first setting in the same case."""
    cells = [record for record in records if isinstance(record, Cell)]
    timed = {(c.case, c.impl, c.launch) for c in cells if c.setting == first and c.time_us}
    return [c for c in cells if not c.time_us and (c.case, c.impl, c.launch) in timed]


def regressions(records: Iterable[Record]) -> list[Verdict]:
    """The verdicts in which another setting is slower than the first."""
    return [r for r in records if isinstance(r, Verdict) and r.about == "baseline" and r.verdict == "slower"]
