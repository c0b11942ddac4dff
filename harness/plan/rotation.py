"""Rotation over sets of operands, the cache policy: over how many sets of operands calls rotate, so that what
a serving step streams comes from memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.op import Op

# Calls rotate until this many last-level caches have gone by, or what was measured to be enough ...
ROTATE_CACHES = 2
# ... but over no more sets than this.
MOST_COPIES = 64
# What an unknown last level counts as: the largest of today's GPUs.
UNKNOWN_LEVEL = 256 << 20


@dataclass(frozen=True)
class Rotation:
    """Over how many sets of the operands calls rotate, and what that amounts to.

    mode:   serving (the streamed operands differ), cold (all differ), warm (one set)
    bytes:  touched before a set's sample comes again
    enough: whether what was read comes from memory again
    why:    it is not
    """

    mode: str
    copies: int
    bytes: int
    last_level: int
    enough: bool
    why: str = ""


def _always(copies: int) -> bool:
    return True


def rotation(
    op: Op, sizes: Any, mode: str, last_level: int, reach: int = 0, fits: Callable[[int], bool] = _always
) -> Rotation:
    """The cache policy of a case, sized by the bytes that calls touch.

    last_level: bytes; 0 if unknown
    reach:      bytes whose reading, again and again, was measured to be as slow as memory; 0 if it was not
    fits:       whether memory holds so many sets; one set is made at any rate
    """
    level = last_level or UNKNOWN_LEVEL
    past = min(reach or math.inf, ROTATE_CACHES * level)
    others = int(op.work(sizes).bytes) - op.streamed_bytes(sizes)
    rest = others if mode == "cold" else 0

    def touched(copies: int) -> int:
        return op.streamed_bytes(sizes, copies) + copies * rest

    def enough(copies: int) -> bool:
        between = touched(copies) if copies == 1 else touched(copies) - touched(1)
        # Activations and output stand in one place, and pass through the cache between two calls, too.
        return between + (others if mode == "serving" else 0) >= past

    most = 1 if mode == "warm" or not touched(1) else MOST_COPIES
    wanted = next(n for n in range(1, most + 1) if enough(n) or touched(n) == touched(most))
    copies = next((n for n in range(wanted, 1, -1) if fits(n)), 1)
    if enough(copies):
        why = ""
    elif mode == "warm":
        why = "one set, over and over, as asked"
    elif not touched(1):
        why = "a serving step streams none of its operands"
    elif copies < wanted:
        why = f"memory holds {copies} of the {wanted} sets of operands that it takes"
    else:
        sets = f"{copies} sets of operands touch" if copies > 1 else "one set of operands touches"
        why = f"{sets} {touched(copies) / 1e6:.3g} MB; the last level holds {level / 1e6:.3g} MB"
    return Rotation(mode, copies, touched(copies), level, enough(copies), why)
