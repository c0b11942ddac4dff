"""Reads the sizes of a case, given as text or numbers, into an op's own class."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar

from shapes.case import Size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SizesType = TypeVar("SizesType", bound="DataclassInstance")


@functools.cache
def _kinds(cls: type) -> dict[str, Callable[[Size], Size]]:
    return typing.get_type_hints(cls)


def read_sizes(op: str, cls: type[SizesType], given: Mapping[str, Size]) -> SizesType:
    """Makes an op's Sizes. Raises ValueError, which names the op's sizes, where one is unknown or missing."""
    kinds = _kinds(cls)
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
