"""Which rows of an output a reference computes, where all of them would take too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable

GOLDEN = 0.5 * (5**0.5 - 1)


def spread(count: int, offset: float = 0.0) -> list[int]:
    """All of 0 .. count - 1 in steps of the golden section: any beginning of it is spread evenly. offset: the
    share of the count at which it begins."""
    steps = (int((offset + i * GOLDEN) % 1 * count) for i in range(2 * count))
    return list(dict.fromkeys([*steps, *range(count)]))


def affordable(order: Iterable[int], flops: Callable[[int], float], max_flops: float) -> list[int]:
    """The first rows of an order that together take no more than `max_flops`, one at least; ascending.
    flops: of a row, asked for once, in this order"""
    rows: list[int] = []
    spent = 0.0
    for row in dict.fromkeys(order):
        spent += flops(row)
        if rows and spent > max_flops:
            break
        rows.append(row)
    return sorted(rows)
