"""The sequence lengths of a batch: one length for all, or lengths that are spread evenly over a span."""

from __future__ import annotations

import random


def parse_span(text: int | str, least: int = 1) -> tuple[int, int]:
    """`4096` -> (4096, 4096); `3200..3999` -> (3200, 3999). Raises ValueError, also for less than `least`."""
    low, dots, high = str(text).partition("..")
    try:
        span = (int(low), int(high) if dots else int(low))
    except ValueError:
        raise ValueError(f"cannot read length {text!r}; write 4096 or 3200..3999") from None
    if not least <= span[0] <= span[1]:
        raise ValueError(f"length {text!r} must be at least {least} and rise from low to high")
    return span


def span_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def spread(span: tuple[int, int], count: int, seed: int) -> list[int]:
    """Returns `count` lengths at equal distances over the span, with both ends if count > 1. The seed changes
    only their order, and not the work. Neighbouring seeds give different orders, unless all are equal."""
    low, high = span
    if count == 1:
        return [(low + high + 1) // 2]
    lengths = [low + round(i * (high - low) / (count - 1)) for i in range(count)]
    random.Random(count).shuffle(lengths)
    first = seed % count
    return lengths[first:] + lengths[:first]
