"""Outputs that the harness owns, what repeated calls left in them, and large outputs in messages."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LEAST_CALLS = 20
"""At least so many outputs are compared with the first one, for up to bench.LEAST_S seconds. They show an
error in one call of 10 in 88 % of runs."""
GUARD = 1 << 16  # guard bytes before and behind an output; a multiple of any alignment that a kernel requires
CANARY = 0xA5  # the value of each guard byte
POISON = 0x7FE5  # the bits of each element of a 16-bit output before a call: a NaN that no operation gives
SPOILT = -1536.0  # fills outputs before calls that are compared: an element that still has it was not written
ROWS_AT_ONCE = 8192  # rows of outputs that are compared at once: in fp32 a large output takes gigabytes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers: NaN equals NaN, -0 differs from 0. It shares the memory of a contiguous one."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integers[tensor.element_size()])


class OwnedOutput:
    """The output that kernels write for one set of operands: `tensor`, between two guard bands of bytes."""

    def __init__(self, like: torch.Tensor, device: str) -> None:
        """like: an output on the meta device"""
        import torch

        size = like.numel() * like.element_size()
        self.storage = torch.empty(GUARD + size + GUARD, dtype=torch.uint8, device=device)
        self.storage[:GUARD] = CANARY
        self.storage[GUARD + size :] = CANARY
        self.tensor = torch.empty(0, dtype=like.dtype, device=device).set_(
            self.storage.untyped_storage(), GUARD // like.element_size(), like.shape, like.stride()
        )

    def fill(self, value: float = math.nan) -> None:
        """Fills the output. NaN becomes POISON in an output of 16 bits: the diagnosis of a wrong output then
        tells an element that was never written from a NaN that was computed."""
        if math.isnan(value) and self.tensor.element_size() == 2:
            bits(self.tensor.data).fill_(POISON)
        else:
            self.tensor.data.fill_(value)

    def guards_hold(self) -> bool:
        """Whether nothing was written before or behind the output."""
        end = self.storage.numel() - GUARD
        return bool((self.storage[:GUARD] == CANARY).all() & (self.storage[end:] == CANARY).all())


@dataclass
class Repeats:
    """What the calls of an entry on equal operands gave. Such calls give equal bits, except for sums whose
    order is not fixed, which differ in the last places."""

    first: dict[int, torch.Tensor] = field(default_factory=dict)
    """The first output of each set of operands; where the sets are equal, that of set 0 stands for all."""
    calls: int = 0  # how many outputs were compared with a first one
    changed: int = 0  # how many of these followed a call on another activation
    differed: int = 0  # how many of `calls` had other bits
    distance: float = 0.0  # the largest distance of such an output (see `distance`)
    farthest: tuple[int, torch.Tensor] | None = None  # the set and the output of that distance
    stale: bool = False  # whether a call on another activation gave the old answer

    def compare(self, set_index: int, output: torch.Tensor, sets_are_equal: bool) -> None:
        """Compares an output on a set with the first one, or keeps it as the first one."""
        import torch

        key = 0 if sets_are_equal else set_index
        if key not in self.first:
            self.first[key] = output.detach().clone()
            return
        self.calls += 1
        first = self.first[key]
        if torch.equal(bits(output), bits(first)):
            return
        self.differed += 1
        away = distance(output, first)
        if away > self.distance or self.farthest is None:
            self.distance = away
            self.farthest = (set_index, output.detach().clone())


def distance(output: torch.Tensor, other: torch.Tensor) -> float:
    """The largest |output - other| / |other| of a row (norms of rows); infinite where one is not finite."""
    farthest = 0.0
    for a, b in zip(output.split(ROWS_AT_ONCE), other.split(ROWS_AT_ONCE), strict=True):
        rows = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-30)
        farthest = max(farthest, float(rows.nan_to_num(nan=float("inf")).max()))
    return farthest


LARGE = 1 << 24  # an output of this many bytes or more travels as a Blob


@dataclass
class Blob:
    """Bytes in shared memory, in a file without a name. A message between processes has the number of the
    open file instead of the bytes, and its receiver opens the file when it unpickles the message. The sender
    keeps the blob until then: a worker until the next request, the parent until it has the answer."""

    descriptor: int
    size: int  # in bytes

    def __del__(self) -> None:
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Callable[..., Blob], tuple[int, int, int]]:
        return _opened, (os.getpid(), self.descriptor, self.size)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blob:
        """A copy of a contiguous tensor on any device."""
        import torch

        blob = cls(os.memfd_create("output"), tensor.nbytes)
        os.ftruncate(blob.descriptor, blob.size)
        memory = mmap.mmap(blob.descriptor, blob.size)
        torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return blob

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes as a tensor on the host. Writing to it does not change the blob."""
        import torch

        memory = mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


def _opened(pid: int, descriptor: int, size: int) -> Blob:
    return Blob(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY), size)
