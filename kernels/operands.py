"""Operands of a case: the canonical tensors that a call reads, live ones and stationary ones."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Seeds:
    """Operands are a pure function of (case, seeds, device): every process makes the same ones.

    turn:        which of the sets that calls rotate over (see `Operands.turned`)
    lengths:     of the lengths of sequences, where an op has them; None: `stationary`
    adversarial: values on which mistakes show that a serving step's would not reveal (scores that overflow,
                 ties, edges of groups): for checks, never timed
    """

    stationary: int = 0
    live: int = 0
    turn: int = 0
    lengths: int | None = None
    adversarial: bool = False


Own = TypeVar("Own", bound="Operands")

ABSENT: Any = None  # stands where a tensor does
"""Default of a tensor that not every case or boundary has. Its type is that of where it is: the boundary, or
the dtype of the case, says which are."""


class Operands(ABC):
    """The canonical operands of one case on one device; a dataclass of tensors and plain values.

    boundary: what the timed call covers; tensors that a call of this boundary has to produce itself,
              or that it does not need, are None
    sizes:    those of the case
    live:     names of the tensors produced anew every step; the others are stationary
    streamed: names of those that a serving step reads from memory, not from a warm cache
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # as a dataclass has it: of any types
    boundary: str
    sizes: DataclassInstance
    live: ClassVar[tuple[str, ...]]
    streamed: ClassVar[tuple[str, ...]]

    def tensors(self) -> dict[str, torch.Tensor]:
        import torch

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
        """Live tensors of which other values need not change the output at these sizes."""
        return frozenset()

    def replaced(self: Own, **values: object) -> Own:
        return replace(self, **values)

    def copy(self: Own, names: Iterable[str] | None = None) -> Own:
        """The same operands with the named tensors (default: all) in fresh buffers, the rest shared."""
        tensors = self.tensors()
        copied = tensors if names is None else [name for name in names if name in tensors]
        return self.replaced(**{name: tensors[name].clone() for name in copied})

    def turned(self: Own, turn: int, cold: bool = False) -> Own:
        """The operands of a further set that calls rotate over: copies of what a step streams (`cold`: of
        everything), of the same values. An op whose calls touch only some of their stationary operands
        gives other live ones instead, which make a call touch others (then `Op.turns` is true)."""
        return self.copy(None if cold else self.streamed)

    def far(self: Own) -> Own | None:
        """The same values where they stand so far apart that places, counted in values, need more than 32
        bits, with NaN where 32 bits of them lead; None where they cannot stand so at these sizes. Memory that
        is not touched costs a CPU nothing: allocate it, and do not fill it."""
        return None

    def narrowed(self: Own) -> Own:
        """The operands of the next narrower boundary: the same stationary ones, and empty buffers for the
        live ones that `Op.step` produces."""
        raise NotImplementedError(f"{type(self).__name__} has no boundary narrower than {self.boundary}")

    def digest(self) -> int:
        """Of all bits and their places: equal operands have equal digests, across processes too."""
        return sum((i + 1) * _digest(tensor) for i, tensor in enumerate(self.guarded_tensors()))

    def guarded_tensors(self) -> Iterable[torch.Tensor]:
        """The tensors with what guards them, so that a store beside them is seen."""
        return self.tensors().values()


DRAWN_AT_ONCE = 1 << 24  # numbers: 64 MiB


def draw_normal(target: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a tensor of any dtype with normal values, some rows at a time. They are drawn in fp32, of which
    versions of torch draw the same: in bf16 2.11 draws others than 2.13, among them exact zeros."""
    import torch

    rows = max(1, DRAWN_AT_ONCE * len(target) // target.numel())
    for part in target.split(rows):
        part.copy_(torch.empty(part.shape, device=part.device).normal_(generator=generator))


def _digest(tensor: torch.Tensor) -> int:
    """Sums of 64-bit words by rows of a table and by its columns, each weighted by its place."""
    import torch

    def weighted(words: torch.Tensor) -> int:
        return int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())

    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    columns = 512
    table = flat[: flat.numel() // (8 * columns) * 8 * columns].view(torch.int64).view(-1, columns)
    rest = flat[table.numel() * 8 :].long()
    # On a GPU the sums over rows of a large table would take as many bytes as the table has.
    by_column = torch.stack([part.sum(0) for part in table.split(1 << 14)]).sum(0)
    return weighted(by_column) + 3 * weighted(table.sum(1)) + 5 * weighted(rest)
