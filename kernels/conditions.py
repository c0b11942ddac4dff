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
    "multiple-of": lambda given, of: int(given) % int(of) == 0,
    "not-multiple-of": lambda given, of: int(given) % int(of) != 0,
}


def holds(conditions: Sequence[str], sizes: Mapping[str, Size]) -> bool:
    """Whether one of the conditions holds, or there is none. Raises ValueError for a condition that is not
    valid, and where a word is to be ordered against a number.

    sizes: all sizes of the op, including defaults
    """
    return not conditions or any(
        all(_holds(part, sizes) for part in condition.split(" and ")) for condition in conditions
    )


def _holds(part: str, sizes: Mapping[str, Size]) -> bool:
    words = part.split()
    if len(words) != 3 or words[1] not in RELATIONS:
        raise ValueError(f"cannot read the condition {part!r}; write for example 'm < 32' or 'kv = fp8'")
    size, relation, value = words[0], words[1], _number(words[2])
    given = _number(sizes.get(size, sizes[size.partition("/")[0]]))
    if relation not in ("=", "!=") and isinstance(given, str) is not isinstance(value, str):
        raise ValueError(f"size {size}={given} cannot be ordered against {value}")
    return RELATIONS[relation](given, value)


def _number(value: Size) -> Size:
    """The value as an int where it is a whole number, else as a str."""
    return int(value) if str(value).isdecimal() else str(value)
