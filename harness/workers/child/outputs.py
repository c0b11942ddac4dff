"""Outputs that the harness owns, and what repeated calls left in them."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LEAST_CALLS = 20
"""Outputs that are compared with the first one at least, however long it takes up to LEAST_S: a call that is
wrong once in 10 shows among them in 88 % of runs."""

GUARD = 1 << 16
"""Bytes before and behind an output, a multiple of any alignment that a kernel asks for."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, so that NaN equals NaN and -0 is not 0; its own memory where it has no gaps."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integers[tensor.element_size()])


def wrong_number(wild: random.Random) -> float:
    """A finite one as an answer may hold."""
    return wild.choice((-1.0, 1.0)) * 2.0 ** wild.uniform(0.0, 6.0)


class OwnedOutput:
    """The output of the calls on one set of operands, between guards. Kernels get `tensor`; the harness
    writes through an alias of the same memory, whose version no kernel can read.

    wild: draws what it is filled with, which no kernel can foresee
    """

    def __init__(self, like: torch.Tensor, device: str, wild: random.Random) -> None:
        """like: an output on the meta device"""
        import torch

        self.wild = wild
        size = like.numel() * like.element_size()
        self.storage = torch.empty(GUARD + size + GUARD, dtype=torch.uint8, device=device)
        self.canary = wild.randrange(1, 256)
        self.storage[:GUARD] = self.canary
        self.storage[GUARD + size :] = self.canary

        def view() -> torch.Tensor:
            empty = torch.empty(0, dtype=like.dtype, device=device)
            begin = GUARD // like.element_size()
            return empty.set_(self.storage.untyped_storage(), begin, like.shape, like.stride())

        self.tensor, self.alias = view(), view()

    def poison(self) -> None:
        """NaN: what is never written is seen, whatever its neighbours hold."""
        self.alias.fill_(float("nan"))

    def spoil(self) -> None:
        """Another number each time."""
        self.alias.fill_(wrong_number(self.wild))

    def spoiler(self, places: int = 61) -> Callable[[], None]:
        """A function that spoils one element of an output in the host's memory, another one each time, within
        a microsecond. It never stands in the way: the call writes the whole output."""
        size = self.alias.element_size()
        base, count = self.alias.data_ptr(), self.alias.numel()
        drawn = [
            (base + size * self.wild.randrange(count), self.wild.randrange(0x41, 0x43)) for _ in range(places)
        ]
        places_and_bytes = itertools.cycle(drawn)
        memset = ctypes.memset

        def spoil() -> None:
            where, byte = next(places_and_bytes)
            memset(where, byte, size)

        return spoil

    def guards_hold(self) -> bool:
        """Whether nothing was written before or behind the output."""
        end = self.storage.numel() - GUARD
        return bool((self.storage[:GUARD] == self.canary).all() & (self.storage[end:] == self.canary).all())

    def holds(self, result: torch.Tensor) -> bool:
        """Whether a result lies in this memory."""
        return result.untyped_storage().data_ptr() == self.storage.untyped_storage().data_ptr()


@dataclass
class Repeats:
    """What the calls on equal operands gave, of an entry: the first output that was seen of each set, and
    the one that lies farthest from it. Calls of one kernel on equal operands give equal bits, but for sums
    whose order is not fixed, which differ in the last places.

    first:    by set; where the sets are copies of each other, set 0's stands for all
    calls:    outputs compared with it
    changed:  of them, those of a call that came right after one on another activation
    differed: of them, those that had other bits
    farthest: (set, output) of the largest distance
    kept:     whether timed calls gave the old answer to another activation; None: nobody has tried
    """

    first: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: int = 0
    changed: int = 0
    differed: int = 0
    distance: float = 0.0
    farthest: tuple[int, torch.Tensor] | None = None
    kept: bool | None = None

    def see(self, which: int, output: torch.Tensor, copies: bool) -> None:
        """copies: whether the sets are of equal values"""
        import torch

        key = 0 if copies else which
        known = self.first.get(key)
        if known is None:
            self.first[key] = output.detach().clone()
            return
        self.calls += 1
        if not torch.equal(bits(output), bits(known)):
            self.differed += 1
            self.note(which, output, known)

    def note(self, which: int, output: torch.Tensor, known: torch.Tensor) -> None:
        """An output that differs from a known one."""
        far = distance(output, known)
        if far > self.distance or self.farthest is None:
            self.distance, self.farthest = far, (which, output.detach().clone())


def distance(output: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, over rows, of |output - other| / |other|; infinite where one is not finite."""
    farthest = 0.0
    for a, b in zip(output.split(ROWS), other.split(ROWS), strict=True):
        rows = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-30)
        farthest = max(farthest, float(rows.nan_to_num(nan=float("inf")).max()))
    return farthest


ROWS = 8192
"""Of the first dimension, that are compared at once: all of a large output in fp32 would take gigabytes."""
