"""Configurations of a kernel: which ones there are, and which one is used for a case.

Choices are data, in files `<device>/<implementation>.json`: in `tuned` beside this file, and before it in the
folder that KERNEL_BENCH_TUNED names. `python -m harness tune` stores what it measured on a device. Choices in
a folder that is named after an architecture were only compiled, on a machine without that GPU.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kernels.op import Implementation
from shapes.case import text_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TUNED = Path(__file__).parent / "tuned"
OWN = "KERNEL_BENCH_TUNED"

Own = TypeVar("Own", bound="Tunable")
T = TypeVar("T")


class StoredError(Exception):
    """Stored choices cannot be read. The text says which, and what to do."""


@dataclass(frozen=True)
class Target:
    """A device for which a configuration is chosen or looked up. This machine need not have it."""

    kind: str
    arch: str
    units: int
    """Compute units (CUs, SMs)."""
    device: str = ""
    """The driver's name of it: `AMD Instinct MI300X`, `NVIDIA H200`; empty for any device of the
    architecture."""
    shared: float = math.inf
    """The most bytes of shared memory that a program may take, if that is known."""
    triton: str = ""
    """The version of Triton that an engine uses there, if that is known."""

    def pick(self, choices: Mapping[str, T]) -> T:
        """Picks from choices by architecture or kind. The architecture comes first."""
        return choices.get(self.arch, choices[self.kind])


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from."""

    config: DataclassInstance
    origin: str


class Tunable(Implementation):
    """An implementation that has several configurations."""

    Config: ClassVar[type[DataclassInstance]]
    """A frozen dataclass of integers, strings and booleans: the constants for which its kernels are
    specialised, and Triton's options. It does not depend on the sizes. A value of None is left out."""
    forced: DataclassInstance | None = None
    """The configuration to use in place of a stored one."""

    @abstractmethod
    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterable[DataclassInstance]:
        """All configurations that are right at these sizes and may be the fastest; one of those that differ
        only in what has no effect there. Whether it fits the device is found by compiling it."""

    def heuristic(self, target: Target, sizes: DataclassInstance) -> DataclassInstance:
        """The configuration to use where no stored one of a target of the kind is right at these sizes."""
        return next(iter(self.configurations(target, sizes)))

    def features(self, sizes: DataclassInstance) -> dict[str, float | str]:
        """The properties by which `distance` compares cases."""
        return asdict(sizes)

    def configured(self: Own, config: Mapping[str, object]) -> Own:
        """A copy that uses this configuration."""
        other = copy.copy(self)
        other.forced = self.Config(**config)
        return other

    def choose(self, target: Target, sizes: DataclassInstance) -> Choice:
        """The configuration for these sizes: the forced one, the nearest stored one, or the heuristic one.
        Raises StoredError."""
        if self.forced is not None:
            return Choice(self.forced, "as told")
        if stored := self.stored(target, sizes):
            return stored[0]
        by_rule = f"by rule: none of the stored fits {target.arch} here"
        return Choice(self.heuristic(target, sizes), by_rule)

    def stored(self, target: Target, sizes: DataclassInstance) -> list[Choice]:
        """The stored choices for targets of this kind that are right at these sizes, the nearest first.
        Raises StoredError."""
        choices = [choice for choice in stored_choices(self.name) if choice.kind == target.kind]
        features = self.features(sizes)
        choices.sort(key=lambda choice: choice.away(features, target))
        right = self.configurations(target, sizes) if choices else ()
        allowed = {words(config): config for config in right}
        return [
            Choice(allowed[choice.config], choice.origin(features, target))
            for choice in choices
            if choice.config in allowed
        ]


def values(config: DataclassInstance) -> dict[str, Any]:
    """The values of a configuration by name, for records and for an engine's tables."""
    return {name: value for name, value in asdict(config).items() if value is not None}


def words(config: DataclassInstance) -> str:
    """Text such as `rows=64 warps=4`."""
    return text_of(values(config))


OTHER_DEVICE, NOT_MEASURED, OTHER_ARCH = 1.0, 2.0, 1000.0
"""What is added to the distance of a choice that was measured on another device of the architecture, was only
compiled, or was made for another architecture. So one that was measured on this device comes before one that
was compiled for exactly these sizes, if its sizes together are within a factor of four."""


@dataclass(frozen=True)
class StoredChoice:
    """A choice in a file, with what the file says of all of its choices."""

    kind: str
    arch: str
    device: str
    """The device on which it was measured; empty on a CPU, and if it was only compiled."""
    measured: bool
    case: str
    features: Mapping[str, float | str]
    config: str
    """The configuration as `words` writes it."""

    def away(self, features: Mapping[str, float | str], target: Target) -> float:
        """The distance of its case from another one, and of its device from the target."""
        away = distance(features, self.features)
        if self.arch != target.arch:
            away += OTHER_ARCH
        if not self.measured:
            away += NOT_MEASURED
        elif self.device != target.device:
            away += OTHER_DEVICE
        return away

    def origin(self, features: Mapping[str, float | str], target: Target) -> str:
        """Says where it comes from, for the record."""
        where = self.device or self.arch
        how = f"measured on {where}" if self.measured else f"compiled for {where}, not measured"
        other = "" if self.arch == target.arch else f", for want of any for {target.arch}"
        at = "for this case" if self.features == features else f"for the nearest case, {self.case}"
        return f"{how}, {at}{other}"


def distance(a: Mapping[str, float | str], b: Mapping[str, float | str]) -> float:
    """The sum of the factors between the numbers of two cases, as log2, and of 4 for each other string."""
    total = 0.0
    for name in a.keys() | b.keys():
        first, second = a.get(name), b.get(name)
        if first == second:
            continue
        if isinstance(first, int | float) and isinstance(second, int | float):
            total += abs(math.log2((first + 1) / (second + 1)))
        else:
            total += 4.0
    return total


def own_folder(named: str) -> Path:
    """The folder that KERNEL_BENCH_TUNED names. Raises StoredError where it does not exist."""
    if not Path(named).is_dir():
        raise StoredError(f"{OWN} names {named}, which is not a folder")
    return Path(named)


@functools.cache
def stored_choices(implementation: str) -> list[StoredChoice]:
    """All stored choices for an implementation, those of the user's own folder first. Raises StoredError."""
    own = os.environ.get(OWN)
    folders = [own_folder(own), TUNED] if own else [TUNED]
    paths = [path for folder in folders for path in sorted(folder.glob(f"*/{implementation}.json"))]
    return [choice for path in paths for choice in _read(path)]


def _read(path: Path) -> Iterator[StoredChoice]:
    try:
        file = json.loads(path.read_bytes())
        place = (file["kind"], file["arch"], file["device"], file["measured"])
        for choice in file["choices"]:
            yield StoredChoice(*place, choice["case"], dict(choice["features"]), text_of(choice["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else error
        raise StoredError(f"stored choices {path} cannot be read: {why}; tune again") from None
