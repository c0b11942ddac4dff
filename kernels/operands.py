"""The operands of a case: the tensors that a call reads, in the op's canonical layout."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kernels.lazy import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Seeds:
    """Seeds of operands. Every process makes the same operands of the same case, seeds and device."""

    stationary: int = 0
    live: int = 0
    turn: int = 0
    """Which of the sets that calls rotate over (see `Operands.turned`)."""
    lengths: int | None = None
    """Seed of the lengths of sequences, where an op has them; None for `stationary`."""
    adversarial: bool = False
    """Whether values reveal mistakes that those of a serving step hide: scores that overflow, ties, edges of
    groups. Calls on them are checked, never timed."""


Own = TypeVar("Own", bound="Operands")

ABSENT: Any = None
"""Default of a tensor that not every case or boundary has. It is typed as a tensor: code that knows the
boundary and the dtype of the case knows which tensors are there."""


class Operands(ABC):
    """The operands of one case on one device. A subclass is a dataclass of tensors and plain values."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    boundary: str
    """What the timed call covers. Tensors that such a call produces itself or does not need are None."""
    sizes: DataclassInstance
    live: ClassVar[tuple[str, ...]]
    """Names of the tensors that are new at every step. The others are stationary."""
    streamed: ClassVar[tuple[str, ...]]
    """Names of the tensors that a serving step reads from memory, not from a warm cache."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)
        }

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors().items() if name in self.live}

    def same_stationary(self, other: Operands) -> bool:
        """Whether both hold the same stationary tensors: not equal ones, but the same memory."""
        mine, others = self.tensors(), other.tensors()
        return all(others.get(name) is mine[name] for name in mine.keys() - set(self.live))

    @property
    def without_effect(self) -> frozenset[str]:
        """Live tensors whose values may have no effect on the output at these sizes."""
        return frozenset()

    def replaced(self: Own, **values: object) -> Own:
        return replace(self, **values)

    def copy(self: Own, names: Iterable[str] | None = None) -> Own:
        """A copy with the named tensors, by default all, in new buffers. The others are shared."""
        tensors = self.tensors()
        copied = tensors if names is None else [name for name in names if name in tensors]
        return self.replaced(**{name: tensors[name].clone() for name in copied})

    def turned(self: Own, turn: int, cold: bool = False) -> Own:
        """A further set that calls rotate over: copies of the tensors that a step streams, or of all where
        `cold`. An op of which `Op.turns` is true returns other live operands instead, which make the call
        read other stationary ones."""
        return self.copy(None if cold else self.streamed)

    def far(self: Own) -> Own | None:
        """The same values, so far apart in memory that their offsets, counted in values, need more than 32
        bits, with NaN where an offset of 32 bits would lead. None where the sizes do not allow it."""
        return None

    def narrowed(self: Own) -> Own:
        """The operands of the next narrower boundary: the same stationary ones, and empty buffers for the
        live ones, which `Op.step` fills."""
        raise NotImplementedError(f"{type(self).__name__} has no boundary narrower than {self.boundary}")

    def digest(self) -> int:
        """A digest of all bits and their places. Equal operands have equal digests in all processes."""
        return sum((i + 1) * _digest(tensor) for i, tensor in enumerate(self.guarded_tensors()))

    def guarded_tensors(self) -> Iterable[torch.Tensor]:
        """The tensors with the guard bands around them, so that a store beside a tensor is noticed."""
        return self.tensors().values()


DRAWN_AT_ONCE = 1 << 24
"""Random numbers that are drawn at once, 64 MiB in fp32."""


def draw_normal(target: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a tensor with normal values, some rows at a time. They are drawn in fp32, as in bf16 torch 2.11
    draws other values than 2.13."""
    rows = max(1, DRAWN_AT_ONCE * len(target) // target.numel())
    for part in target.split(rows):
        part.copy_(torch.empty(part.shape, device=part.device).normal_(generator=generator))


def _digest(tensor: torch.Tensor) -> int:
    """Sums a table of 64-bit words by row and by column, each sum weighted by its place."""

    def weighted(words: torch.Tensor) -> int:
        return int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())

    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    columns = 512
    table = flat[: flat.numel() // (8 * columns) * 8 * columns].view(torch.int64).view(-1, columns)
    rest = flat[table.numel() * 8 :].long()
    # In parts: on a GPU, the sum over all rows of a large table would need as many bytes as the table.
    by_column = torch.stack([part.sum(0) for part in table.split(1 << 14)]).sum(0)
    return weighted(by_column) + 3 * weighted(table.sum(1)) + 5 * weighted(rest)
