"""The contracts between what is measured (kernels) and how (harness).

Importing this module, or any op's provider files, imports no library: torch and the rest are
imported inside functions, so that `list` works on a machine that has none of them.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from shapes.case import Case, Size

if TYPE_CHECKING:
    import torch

    from kernels.platform import Platform

BOUNDARIES = ("core", "with_quant", "with_routing")


class Unsupported(Exception):
    """Raised by `prepare` where a library turns out to lack what was needed; the text is the reason."""


@dataclass(frozen=True)
class Support:
    """Whether something can run, and if not why, in words a user can act on."""

    ok: bool
    reason: str = ""

    @staticmethod
    def all_of(*supports: Support) -> Support:
        """The first that fails, or yes."""
        return next((s for s in supports if not s.ok), Support(True))


def need(condition: object, reason: str) -> Support:
    return Support(True) if condition else Support(False, reason)


@dataclass(frozen=True)
class Work:
    """What a call must do at least: floating-point operations, and bytes moved, each byte once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Tolerance:
    """How far a right output may lie from the reference, in units of `Reference.sigma`.

    `sigma` is the error that rounding alone explains, element by element (see each problem.py for
    its derivation), so the limits are the same for flat and peaked, small and large inputs.

    row:     root mean square over one row (the smallest unit that one thread block writes)
    element: largest single element
    """

    row: float
    element: float


@dataclass
class Reference:
    """The right answer for the rows that were computed, and the error rounding explains there.

    value, sigma: fp64 [rows, ...], rows indexing the output's first dimension
    rows:         None if all rows were computed, else the sampled row numbers
    """

    value: torch.Tensor
    sigma: torch.Tensor
    rows: list[int] | None = None


@dataclass(frozen=True)
class Seeds:
    """Operands are a pure function of (case, seeds, device): every process makes the same ones."""

    stationary: int = 0
    live: int = 0


class Operands(ABC):
    """The canonical operands of one case on one device; a dataclass of tensors and plain values.

    live:     names of the tensors produced anew every step; the others are stationary
    streamed: names of those that a serving step reads from memory, not from a warm cache
    """

    live: ClassVar[tuple[str, ...]]
    streamed: ClassVar[tuple[str, ...]]

    def tensors(self) -> dict[str, torch.Tensor]:
        import torch

        return {
            f.name: value
            for f in fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self.live}

    def copy(self, names: Iterable[str] | None = None) -> Operands:
        """The same operands with the named tensors (default: all) in fresh buffers, the rest shared."""
        tensors = self.tensors()
        chosen = set(tensors if names is None else names)
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        values |= {name: tensors[name].clone() for name in chosen}
        return type(self)(**values)

    def digest(self) -> int:
        """Of all bits and their places: equal operands have equal digests, across processes too."""
        return sum((i + 1) * _digest(tensor) for i, tensor in enumerate(self.tensors().values()))


def _digest(tensor: torch.Tensor) -> int:
    """Sums of 64-bit words by rows of a table and by its columns, each weighted by its place."""
    import torch

    def weighted(words: torch.Tensor) -> int:
        return int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())

    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    columns = 512
    table = flat[: flat.numel() // (8 * columns) * 8 * columns].view(torch.int64).view(-1, columns)
    rest = flat[table.numel() * 8 :].long()
    return weighted(table.sum(0)) + 3 * weighted(table.sum(1)) + 5 * weighted(rest)


class Prepared(ABC):
    """An implementation bound to operands and an output, ready to be called again and again."""

    def __init__(self, operands: Any, out: torch.Tensor | None = None) -> None:
        self.operands = operands
        self.out = out

    @abstractmethod
    def call(self) -> None:
        """Timed: compute the op once, from whatever the operands hold now."""

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """Untimed: put new live operands where `call` reads them.

        The default writes into the canonical tensors in place, which is right for whatever reads
        them there, graphs included. Whoever keeps a copy in another layout extends this.
        """
        for name, tensor in live.items():
            getattr(self.operands, name).copy_(tensor)

    def result(self) -> torch.Tensor:
        """The output of the last call in the op's canonical layout."""
        assert self.out is not None, f"{type(self).__name__} got no output tensor and kept none"
        return self.out


class Implementation(ABC):
    """One way to compute an op.

    name:           `provider.variant`
    op:             filled in by the op that finds it
    requires:       what it needs, for people
    runtime:        implementations of one runtime share a worker process, others never do
    boundary:       the boundary its call covers
    allocates:      True if the library allocates its own output (`out` is then None, never poisoned)
    captures:       False if the call cannot be recorded into a CUDA/HIP graph
    """

    name: ClassVar[str]
    requires: ClassVar[str]
    op: str = ""
    runtime: ClassVar[str] = "torch"
    boundary: ClassVar[str] = "core"
    allocates: ClassVar[bool] = False
    captures: ClassVar[bool] = True

    @property
    def provider(self) -> str:
        return self.name.split(".")[0]

    @abstractmethod
    def available(self, platform: Platform) -> Support:
        """Whether this platform and its libraries can run it at all; imports nothing."""

    def fits(self, sizes: Any) -> Support:
        """Whether it takes these sizes (heads, page, dtype ...)."""
        return Support(True)

    def interpreted(self, platform: Platform) -> bool:
        """True where it runs only through an interpreter: checked, never timed."""
        return False

    def environment(self, platform: Platform) -> dict[str, str]:
        """Variables its worker process needs from the start; equal for all of one runtime."""
        return {}

    def supports(self, case: Case, platform: Platform) -> Support:
        from kernels import OPS

        return Support.all_of(
            self.available(platform),
            need(
                case.boundary == self.boundary,
                f"covers the boundary {self.boundary}, not {case.boundary}",
            ),
            self.fits(OPS[self.op].sizes(case.sizes)),
        )

    def workspace(self, sizes: Any) -> int:
        """Bytes that prepare and call allocate beyond operands and output, for the memory plan."""
        return 0

    @abstractmethod
    def prepare(self, operands: Any, out: torch.Tensor | None) -> Prepared:
        """Untimed: bring stationary operands into the library's layout. Raises Unsupported."""


class Op(ABC):
    """What is computed: its sizes, operands, reference, work and tolerance."""

    name: ClassVar[str]
    Sizes: ClassVar[type]
    boundaries: ClassVar[tuple[str, ...]] = ("core",)
    baseline: ClassVar[Mapping[str, str]]
    """Platform kind -> the best torch implementation there: the default baseline."""

    def sizes(self, given: Mapping[str, Size]) -> Any:
        """Reads sizes given as text or numbers; raises ValueError with one clear line."""
        return read_sizes(self.name, self.Sizes, given)

    def case(self, given: Mapping[str, Size], **place: Any) -> Case:
        """The case of these sizes in canonical form, defaults filled in."""
        return Case(self.name, asdict(self.sizes(given)), **place)

    @abstractmethod
    def work(self, sizes: Any) -> Work: ...

    @abstractmethod
    def operand_bytes(self, sizes: Any) -> int:
        """Bytes of one full set of operands, for the memory plan."""

    @abstractmethod
    def output_bytes(self, sizes: Any) -> int: ...

    @abstractmethod
    def streamed_bytes(self, sizes: Any) -> int:
        """Bytes of the streamed operands that one call touches, for the cache policy."""

    @abstractmethod
    def operands(self, sizes: Any, seeds: Seeds, device: str) -> Operands: ...

    @abstractmethod
    def empty_output(self, sizes: Any, device: str) -> torch.Tensor: ...

    @abstractmethod
    def reference(self, operands: Any, max_flops: float = float("inf")) -> Reference:
        """Computes the op from the same operands in fp64, streamed; samples rows above `max_flops`."""

    @abstractmethod
    def tolerance(self, sizes: Any) -> Tolerance: ...


def read_sizes(op: str, cls: type, given: Mapping[str, Size]) -> Any:
    """Builds a Sizes dataclass from text or numbers; names the op's sizes where one is unknown."""
    kinds = typing.get_type_hints(cls)
    names = ", ".join(kinds)
    values: dict[str, Size] = {}
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"unknown size {name!r} for {op}; sizes: {names}")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"size {name}={value!r} of {op} is not a whole number") from None
    missing = [f.name for f in fields(cls) if f.name not in values and f.default is MISSING]
    if missing:
        raise ValueError(f"{op} needs {', '.join(missing)}; sizes: {names}")
    return cls(**values)
