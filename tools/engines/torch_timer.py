"""torch.utils.benchmark: `Timer.adaptive_autorange`, and what `Compare` makes of the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.engines.callables import prepare
from tools.engines.verdicts import Ranking

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement


def rank(names: Sequence[str]) -> Ranking:
    import torch
    from torch.utils.benchmark import Timer

    # Its own default is one thread, whatever the process has.
    threads = torch.get_num_threads()
    measured = {
        name: Timer(
            "call()", globals={"call": prepare(name)}, num_threads=threads, label="ranking", sub_label=name
        ).adaptive_autorange()
        for name in names
    }
    baseline = measured[names[0]]
    return Ranking(
        {name: measurement.median for name, measurement in measured.items()},
        {name: verdict(measured[name], baseline) for name in names[1:]},
    )


def verdict(measured: Measurement, baseline: Measurement) -> str:
    """By the table that `Compare` prints of the two with `colorize` and `highlight_warnings`: medians in the
    colour of the best, which all have within 1 % of it, are the same; a median with the warning
    `(! 23%)`, its interquartile range, says nothing about a smaller difference."""
    from torch.utils.benchmark.utils.compare import BEST, _Row

    first, second = sorted((measured.median, baseline.median))
    if BEST in _Row.color_segment("", second, first):
        return "same"
    warned = max((m.iqr / m.median for m in (measured, baseline) if m.has_warnings), default=0.0)
    if second < (1 + warned) * first:
        return "unclear"
    return "faster" if measured.median < baseline.median else "slower"
