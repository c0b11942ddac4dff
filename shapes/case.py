"""A case: an op at concrete sizes, with a boundary and its place in a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

Size = int | str


def text_of(sizes: Mapping[str, Size]) -> str:
    """`{"batch": 64, "ctx": "3200..3999"}` -> `batch=64 ctx=3200..3999`."""
    return " ".join(f"{name}={value}" for name, value in sizes.items())


@dataclass(frozen=True)
class Case:
    """One op at concrete sizes."""

    op: str
    sizes: Mapping[str, Size]
    """The sizes that the op's `Sizes` reads: plain integers and words without units."""
    boundary: str = "core"
    """What the timed call covers: `core`, `with_quant` or `with_routing`."""
    place: str = "ad hoc"
    """Where it occurs in a model, as a text for people: `deepseek-r1 tp8 decode`."""
    weight: float = 1.0
    """How often the step that contains it occurs in the suite's workload, 0..1."""

    @property
    def text(self) -> str:
        return text_of(self.sizes)

    @property
    def key(self) -> str:
        """The name of the case within a run. Cases with equal keys are the same measurement."""
        return f"{self.op} {self.text} {self.boundary}"


def merge(cases: Iterable[Case]) -> list[Case]:
    """Replaces cases with equal keys by one that has the sum of their weights, and keeps the order."""
    merged: dict[str, Case] = {}
    for case in cases:
        known = merged.get(case.key)
        merged[case.key] = replace(known, weight=known.weight + case.weight) if known else case
    return list(merged.values())


def parse(text: str) -> list[dict[str, str]]:
    """Returns the sizes of each combination of the listed values: two for `batch=1,16 ctx=4096`. Raises
    ValueError with one line."""
    spaced = re.sub(r"[,;]\s*(?=\w+=)", " ", text)
    if spaced != text:
        raise ValueError(f"sizes are separated by spaces, not {text!r}; write {spaced!r}")
    axes: dict[str, list[str]] = {}
    for word in text.split():
        name, equals, values = word.partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"cannot read {word!r} in case {text!r}; write name=value[,value...]")
        if name in axes:
            raise ValueError(f"size {name!r} stands twice in case {text!r}")
        axes[name] = values.split(",")
    if not axes:
        raise ValueError("an empty case; write for example 'batch=64 ctx=4096 heads=16'")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
