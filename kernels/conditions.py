"""Conditions on the sizes of a case, as the data of engines and defects write them: `m < 32 and kv = fp8`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from shapes.case import Size

RELATIONS: Mapping[str, Callable[[Size, Size], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "multiple-of": lambda size, factor: int(size) % int(factor) == 0,
    "not-multiple-of": lambda size, factor: int(size) % int(factor) != 0,
}


def holds(conditions: Sequence[str], sizes: Mapping[str, Size]) -> bool:
    """Whether one of the conditions holds, or there is none. A condition holds if all of its parts, which
    `and` joins, do. Raises ValueError for one that is not valid, or that orders a word against a number.
    sizes: all sizes of the op, including defaults"""
    return not conditions or any(
        all(_part_holds(part, sizes) for part in text.split(" and ")) for text in conditions
    )


def _part_holds(part: str, sizes: Mapping[str, Size]) -> bool:
    words = part.split()
    if len(words) != 3 or words[1] not in RELATIONS:
        raise ValueError(f"cannot read the condition {part!r}; write for example 'm < 32' or 'kv = fp8'")
    name, relation, text = words
    if name not in sizes:
        name = name.partition("/")[0]  # `heads` in place of `heads/tp`: see EngineDefault.when
    size, value = _as_number(sizes[name]), _as_number(text)
    if relation not in ("=", "!=") and type(size) is not type(value):
        raise ValueError(f"size {name}={size} cannot be ordered against {value}")
    return RELATIONS[relation](size, value)


def _as_number(value: Size) -> Size:
    """The value as an int where it is a whole number, else as a str."""
    return int(value) if str(value).isdecimal() else str(value)
