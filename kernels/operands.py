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
    """The seed of stationary operands."""
    live: int = 0
    """The seed of live operands."""
    turn: int = 0
    """The number of the set, of those that calls rotate over (see `Operands.turned`); 0 for the first."""
    lengths: int | None = None
    """The seed of the lengths of sequences, where an op has them; None: that of stationary operands."""
    adversarial: bool = False
    """Whether the values reveal mistakes that those of a serving step hide: scores that overflow, ties, edges
    of groups. Calls on such operands are checked, never timed."""


Own = TypeVar("Own", bound="Operands")

ABSENT: Any = None
"""The default of a tensor that not every case or boundary has. Its type is Any, so that the tensor needs no
check for None: code that knows the boundary and the dtype of the case knows which tensors are there."""


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
        """By name, the tensors that are there."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors().items() if name in self.live}

    def same_stationary(self, other: Operands) -> bool:
        """Whether both hold the same stationary tensors: the same objects, not only equal values."""
        tensors, others = self.tensors(), other.tensors()
        return all(others.get(name) is tensor for name, tensor in tensors.items() if name not in self.live)

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
        """The set number `turn`, from 1, of those that calls rotate over: copies of the tensors that a step
        streams, or of all tensors if `cold`. An op of which `Op.turns` is true returns other live operands
        instead, with which the call reads other parts of the stationary ones."""
        return self.copy(None if cold else self.streamed)

    def far(self: Own) -> Own | None:
        """The same values, so far apart in memory that their offsets, counted in values, need more than 32
        bits. NaN stands where an offset that was cut to 32 bits would lead. None if the sizes forbid it."""
        return None

    def narrowed(self: Own) -> Own:
        """The operands of the next narrower boundary, with empty live ones, which `Op.step` fills."""
        raise NotImplementedError(f"{type(self).__name__} has no boundary narrower than {self.boundary}")

    def digest(self) -> int:
        """A digest of all bits and their places. Equal operands have equal digests in all processes."""
        return sum(place * _digest(tensor) for place, tensor in enumerate(self.guarded_tensors(), start=1))

    def guarded_tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that `digest` covers. In place of a view, an op may give the tensor around it, so that
        stray stores beside the view are noticed."""
        return self.tensors().values()


DRAWN_AT_ONCE = 1 << 24
"""How many random numbers are drawn at once: 64 MiB in fp32."""


def draw_normal(target: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a tensor with normal values, some rows at a time. They are drawn in fp32 and rounded, because
    torch 2.11 and 2.13 draw different values in bf16."""
    rows = max(1, DRAWN_AT_ONCE * len(target) // target.numel())
    for part in target.split(rows):
        part.copy_(torch.empty(part.shape, device=part.device).normal_(generator=generator))


def _digest(tensor: torch.Tensor) -> int:
    """A digest of a tensor's bits: they are read as a table of 64-bit words, whose columns and rows are
    summed, and each sum is weighted by its place. So a changed bit and exchanged words both change it. The
    bytes that fill no row of the table are weighted likewise. Sums wrap around."""

    def weighted(words: torch.Tensor) -> int:
        return int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())

    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    columns = 512
    table_bytes = flat.numel() // (8 * columns) * 8 * columns
    table = flat[:table_bytes].view(torch.int64).view(-1, columns)
    remaining_bytes = flat[table_bytes:].long()
    # In parts: on a GPU, the sum over all rows of a large table would need as many bytes as the table.
    column_sums = torch.stack([part.sum(0) for part in table.split(1 << 14)]).sum(0)
    return weighted(column_sums) + 3 * weighted(table.sum(1)) + 5 * weighted(remaining_bytes)
