"""Calls of a library with one argument broken, for every argument that a row gives.

All calls of rows go through `Function.bind`: there an argument is replaced by one that a mistake would give,
of the wrong layout, order, index type, scale or flag.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.binding import Function
from tests.support.recorded import LARGE, is_empty


@dataclass(frozen=True)
class Break:
    """place: of the function; argument: name or position; element: of a tuple, or None; how: a key of WAYS"""

    place: str
    argument: str | int
    element: int | None
    how: str

    def __str__(self) -> str:
        name = f"{self.argument}" if self.element is None else f"{self.argument}[{self.element}]"
        return f"{self.place.rpartition('.')[2]}({name}): {self.how}"


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """One more than it was, but for indices that must stay inside."""
    return (tensor - 1).clamp(min=0) if int(tensor.max()) > 0 else tensor + 1


def rolled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same strides, other values."""
    return torch.empty_like(tensor).copy_(as_bytes(tensor).roll(1, dim).view(tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)


def other_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind each other the other way round."""
    by_columns = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.contiguous() if by_columns.stride() == tensor.stride() else by_columns


INDICES = (torch.int32, torch.int64)


def is_tensor(value: Any, *dtypes: torch.dtype) -> bool:
    if not isinstance(value, torch.Tensor) or not 0 < value.numel() < LARGE:
        return False
    return value.dtype in dtypes if dtypes else True


def has_columns(value: Any) -> bool:
    return is_tensor(value) and value.ndim > 1 and min(value.shape[-2:]) > 1


def differ(tensor: torch.Tensor, dim: int) -> bool:
    """Whether rolling changes anything."""
    if tensor.ndim == 0 or tensor.shape[dim] < 2:
        return False
    whole = as_bytes(tensor)
    return not torch.equal(whole, whole.roll(1, dim)) and not is_empty(tensor)


def same(a: object, b: object) -> bool:
    return isinstance(a, torch.Tensor) or a == b


WAYS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    "other index type": (
        lambda x: is_tensor(x, *INDICES),
        lambda x: x.long() if x.dtype == torch.int32 else x.int(),
    ),
    "one less": (lambda x: is_tensor(x, *INDICES), shifted),
    "another order": (lambda x: is_tensor(x) and differ(x, 0), lambda x: rolled(x, 0)),
    "another order of columns": (lambda x: has_columns(x) and differ(x, -1), lambda x: rolled(x, -1)),
    "other strides": (lambda x: has_columns(x) and x.dtype != torch.uint8, other_strides),
    "twice the scale": (lambda x: is_tensor(x, torch.float32) and x.numel() == 1, lambda x: x * 2),
    "another tensor": (lambda x: is_tensor(x, torch.bfloat16) and is_empty(x), torch.empty_like),
    "the other flag": (lambda x: isinstance(x, bool), lambda x: not x),
    "half of it": (lambda x: isinstance(x, float) and x != 0, lambda x: x / 2),
    "one more": (lambda x: type(x) is int, lambda x: x + 1),
    "none": (lambda x: type(x) is int and x > 1, lambda x: 0),
    "the other order": (
        lambda x: isinstance(x, tuple | list) and len(x) > 1 and not same(x[0], x[-1]),
        lambda x: type(x)(reversed(x)),
    ),
}


def ways(value: Any) -> Iterator[str]:
    return (name for name, (fits, _) in WAYS.items() if fits(value))


@contextlib.contextmanager
def listed() -> Iterator[list[Break]]:
    """Every way to break the calls that are bound meanwhile."""
    breaks: dict[Break, None] = {}
    right = Function.bind

    def bind(
        self: Function, *by_position: object, method_of: object = None, **given: object
    ) -> Callable[[], Any]:
        call = right(self, *by_position, method_of=method_of, **given)
        taken: dict[str | int, object] = {**dict(enumerate(by_position)), **call.keywords}  # type: ignore[attr-defined]
        for argument, value in taken.items():
            breaks.update({Break(self.places[0], argument, None, how): None for how in ways(value)})
            if isinstance(value, tuple | list):
                for i, inner in enumerate(value):
                    breaks.update({Break(self.places[0], argument, i, how): None for how in ways(inner)})
        return call

    everything: list[Break] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "bind", bind)
        yield everything
    everything += breaks


@contextlib.contextmanager
def broken(broken: Break) -> Iterator[None]:
    """That argument of those calls is given broken; the function's own work on it stays."""
    right = Function.bind
    change = WAYS[broken.how][1]

    def instead(value: Any) -> Any:
        if broken.element is None:
            return change(value)
        parts = list(value)
        parts[broken.element] = change(parts[broken.element])
        return type(value)(parts)

    def bind(
        self: Function, *by_position: object, method_of: object = None, **given: object
    ) -> Callable[[], Any]:
        if self.places[0] == broken.place:
            if isinstance(broken.argument, int):
                positions = list(by_position)
                positions[broken.argument] = instead(positions[broken.argument])
                by_position = tuple(positions)
            elif broken.argument in given:
                given[broken.argument] = instead(given[broken.argument])
        return right(self, *by_position, method_of=method_of, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "bind", bind)
        yield


def survivors(attempt: Callable[[], object]) -> list[str]:
    """Breaks that change nothing of what an attempt gives: it does not raise, and gives the same."""
    with listed() as breaks:
        right = attempt()
    assert breaks, "no call of it is bound"
    return [str(way) for way in breaks if not noticed(attempt, right, way)]


def noticed(attempt: Callable[[], object], right: object, way: Break) -> bool:
    with broken(way), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what overflows then
        try:
            return attempt() != right
        except Exception:
            return True
