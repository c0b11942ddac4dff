"""The fields of a row of a file that comes from outside.

A number that cannot be read (text, NaN, an absurd size) does not stop its row and is never guessed. It is
left out, and a finding says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.serving.schema import Finding, Severity

LARGEST = 1e15  # larger than any token count or time here
SMALLEST = 1e-12  # smaller values are rounding errors, as in the deviation of equal times
NUMBER = re.compile(
    r"[+-]?(?=\.?\d)(\d+|\d{1,3}(,\d{3})+)?(\.\d*)?(e[+-]?\d+)?|[+-]?inf|nan", re.ASCII | re.IGNORECASE
)


@dataclass
class Fields:
    """The fields of one row. They are taken one by one; the others are its `rest`."""

    where: str  # file and line, for messages
    values: Mapping[str, Any]
    as_text: bool = False  # whether numbers are texts, perhaps with commas (CSV, console output)
    findings: list[Finding] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    within: dict[str, Fields] = field(default_factory=dict)

    def inside(self, key: str) -> Fields:
        """The fields of the object under `key`; empty if it is absent, or (with a finding) no object."""
        if key not in self.within:
            raw = self._json(key)
            if raw is not None and not isinstance(raw, Mapping):
                self._unreadable(key, "an object")
            values = raw if isinstance(raw, Mapping) else {}
            self.within[key] = Fields(f"{self.where}: {key}", values, self.as_text, self.findings)
        return self.within[key]

    def entries(self, key: str) -> list[Fields]:
        """The fields of each object in the list under `key`; empty if it is no list."""
        listed = self.values.get(key)
        objects = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
        return [Fields(f"{self.where}: {key}", item, self.as_text, self.findings) for item in objects]

    def at(self, path: str) -> tuple[Fields, str]:
        """The object that holds `a.b.key`, and the key."""
        *outer, key = [path] if path in self.values else path.split(".")  # `p99.9_ttft_ms` is one key
        fields = self
        for name in outer:
            fields = fields.inside(name)
        return fields, key

    def number(
        self, key: str, *, scale: float = 1.0, least: float = 0.0, infinite: float | None = None
    ) -> float | None:
        """The number under `key`, times scale. None if it is absent, null or empty, or (with a finding) no
        number of at least `least`. infinite: what an infinite number stands for"""
        raw = self.take(key)
        if raw is None or raw == "":
            return None
        if infinite is not None and str(raw).strip().lower() in ("inf", "infinity"):
            return infinite  # JSON has no infinity, so some clients write it as text
        value = self._number(raw)
        if value is None:
            self._unreadable(key, "a number")
        elif value < least:
            self._unreadable(key, f"a number of at least {least:g}")
        else:
            return value * scale
        return None

    def count(self, key: str) -> int | None:
        """A whole number of at least 0, as `number` returns it."""
        value = self.number(key)
        if value is not None and value != int(value):
            self._unreadable(key, "a whole number")
            return None
        return None if value is None else int(value)

    def text(self, key: str) -> str:
        """The text under `key`; empty if it is absent or null."""
        raw = self.take(key)
        if isinstance(raw, (dict, list)):
            self._unreadable(key, "a text")
            return ""
        if raw is not None and not isinstance(raw, str):
            self.find("unreadable", "suspect", f"{key!r} is {_shown(raw)}, not a text; taken as one")
        return "" if raw is None else str(raw)

    def flag(self, key: str) -> bool | None:
        """A flag, which some files have as text; None if it is absent or null."""
        raw = self.take(key)
        if raw is None or raw == "":
            return None
        if str(raw).lower() in ("true", "false"):
            return str(raw).lower() == "true"
        self._unreadable(key, "true or false")
        return None

    def numbers(self, key: str, *, scale: float = 1.0) -> tuple[float, ...]:
        """A list of numbers of at least 0; empty if it is absent, or (with a finding) not such a list."""
        return tuple(scale * number for number in self._list(key, "a list of numbers", self._at_least_0))

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0, as `numbers` returns it."""
        return tuple(map(int, self._list(key, "a list of whole numbers", self._whole)))

    def lists(self, key: str, *, scale: float = 1.0) -> tuple[tuple[float, ...], ...]:
        """A list of lists of numbers, each as `numbers` returns it."""
        lists = self._list(key, "a list of lists of numbers", lambda raw: _each(raw, self._at_least_0))
        return tuple(tuple(scale * number for number in inner) for inner in lists)

    def take(self, key: str) -> Any:
        """The value under `key` as it is; None if it is absent. It is no longer in the rest."""
        self.taken.add(key)
        return self.values.get(key)

    def rest(self) -> dict[str, Any]:
        """All fields that were not taken, also in inner objects, without what JSON cannot express."""
        left: dict[str, Any] = plain({k: v for k, v in self.values.items() if k and k not in self.taken})
        for key, fields in self.within.items():
            if inner := fields.rest():
                left[key] = inner
        return left

    def find(self, rule: str, severity: Severity, what: str) -> None:
        """Adds a finding about the row. Its message begins with `where`."""
        finding = Finding(rule=rule, severity=severity, message=f"{self.where}: {what}")
        if finding not in self.findings:  # a value may be read twice
            self.findings.append(finding)

    def leave_out(self, key: str, why: str) -> None:
        """Adds a finding that the value of `key` is not used."""
        self.find("unreadable", "wrong", f"{key!r} {why}; left out")

    def _list(self, key: str, wanted: str, read: Callable[[Any], Any]) -> tuple[Any, ...]:
        raw = self._json(key)
        values = () if raw is None else _each(raw, read)
        if values is None:
            self._unreadable(key, wanted)
        return values or ()

    def _json(self, key: str) -> Any:
        """The value under `key`, which is JSON in a CSV's cell."""
        raw = self.take(key)
        if not self.as_text or not isinstance(raw, str):
            return raw
        try:
            return json.loads(raw) if raw else None
        except (ValueError, RecursionError):
            return raw

    def _at_least_0(self, raw: Any) -> float | None:
        number = self._number(raw)
        return number if number is not None and number >= 0 else None

    def _whole(self, raw: Any) -> float | None:
        number = self._at_least_0(raw)
        return number if number is not None and number.is_integer() else None

    def _number(self, raw: Any) -> float | None:
        """A number of a sensible size, perhaps as text; None for anything else."""
        if isinstance(raw, str) and self.as_text and NUMBER.fullmatch(raw.strip()):
            raw = float(raw.strip().replace(",", ""))
        number = real(raw)
        return 0.0 if number is not None and abs(number) < SMALLEST else number

    def _unreadable(self, key: str, wanted: str) -> None:
        self.leave_out(key, f"is {_shown(self.values[key])}, not {wanted}")


def _each(raw: Any, read: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """The result of reading each entry of a list; None if it is no list, or one entry cannot be read."""
    if not isinstance(raw, list):
        return None
    values = tuple(map(read, raw))
    return None if None in values else values


def real(value: Any) -> float | None:
    """The value if it is a number of a sensible size; otherwise None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def plain(value: Any) -> Any:
    """The value without what JSON cannot express: infinities and NaN become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def _shown(raw: Any) -> str:
    """The value for a message, cut off after 40 characters."""
    shown = json.dumps(raw, default=str)
    return shown if len(shown) <= 40 else shown[:37] + "..."
