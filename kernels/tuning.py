"""Configurations of a kernel: which there are, what each needs of a device, and which one is used for a case.

Choices are data. `python -m harness tune` writes them to `tuned/<device>/<implementation>.json` beside this
file, after compiling (the device is then an architecture) or measuring. `choose` reads them when a call is
prepared. KERNEL_BENCH_TUNED names another folder of the same layout, which comes first.
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
from typing import TYPE_CHECKING, ClassVar, TypeVar

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
    """A device for which a configuration is chosen. This machine need not have it."""

    kind: str
    """cpu, cuda or rocm."""
    arch: str
    """sm_90, gfx942 ..."""
    units: int
    """Compute units (CUs, SMs)."""
    device: str = ""
    """The vendor's name; empty for any device of the architecture."""
    shared: float = math.inf
    """The most bytes of shared memory of a program, if the driver of a device here reports it."""

    def pick(self, choices: Mapping[str, T]) -> T:
        """Picks from choices by architecture or kind. The architecture comes first."""
        return choices.get(self.arch, choices[self.kind])


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from."""

    config: DataclassInstance
    origin: str
    """A phrase for the record."""


class Tunable(Implementation):
    """An implementation that has several configurations."""

    Config: ClassVar[type[DataclassInstance]]
    """A frozen dataclass of integers, strings and booleans: the constants for which its kernels are
    specialised, and Triton's options. It does not depend on the sizes."""
    forced: DataclassInstance | None = None
    """The configuration to use in place of a stored one."""

    @abstractmethod
    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterable[DataclassInstance]:
        """All configurations that are right at these sizes and may be the fastest. Whether one fits the
        device is found by compiling it. Of configurations that differ only in what has no effect at these
        sizes, one is returned."""

    @abstractmethod
    def heuristic(self, target: Target, sizes: DataclassInstance) -> DataclassInstance:
        """The configuration to use where none is stored for any target of the kind."""

    def features(self, sizes: DataclassInstance) -> dict[str, float | str]:
        """The properties by which `distance` compares cases."""
        return asdict(sizes)

    def configured(self: Own, config: Mapping[str, object]) -> Own:
        """A copy that uses this configuration."""
        other = copy.copy(self)
        other.forced = self.Config(**config)
        return other

    def choose(self, target: Target, sizes: DataclassInstance) -> Choice:
        """The configuration for these sizes: the forced one, the nearest stored one, or the heuristic one."""
        if self.forced is not None:
            return Choice(self.forced, "as told")
        by_rule = f"by rule: none of the stored fits {target.arch} here"
        return nearest(self, target, sizes) or Choice(self.heuristic(target, sizes), by_rule)


def words(config: DataclassInstance) -> str:
    """Text such as `rows=64 warps=4`."""
    return text_of(asdict(config))


OTHER_DEVICE, NOT_MEASURED, OTHER_ARCH = 1.0, 2.0, 1000.0
"""What is added to the distance of a choice that was measured on another device of the architecture, was only
compiled, or was made for another architecture. So a choice that was measured on this device comes before one
that was compiled for exactly these sizes, if its sizes together are within a factor of four. A choice for
another architecture comes after all of the device's own."""


def nearest(implementation: Tunable, target: Target, sizes: DataclassInstance) -> Choice | None:
    """The stored choice for the nearest case, of those that are right at these sizes. None if there is none.
    Raises StoredError where stored choices cannot be read."""
    entries = [entry for entry in stored(implementation.name) if entry.kind == target.kind]
    if not entries:
        return None
    features = implementation.features(sizes)
    allowed = {words(config): config for config in implementation.configurations(target, sizes)}
    by_distance = [(entry.away(features, target), entry) for entry in entries if entry.config in allowed]
    if not by_distance:
        return None
    _, entry = min(by_distance, key=lambda pair: pair[0])
    return Choice(allowed[entry.config], entry.origin(features, target))


@dataclass(frozen=True)
class StoredChoice:
    """A stored choice."""

    kind: str
    arch: str
    device: str
    """The device on which it was measured; empty if it was only compiled."""
    measured: bool
    case: str
    features: Mapping[str, float | str]
    """Properties of the case (see Tunable.features)."""
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


def folders() -> list[Path]:
    """The folders of stored choices. The first comes first. Raises StoredError."""
    own = os.environ.get(OWN)
    return [*([own_folder(own)] if own else []), TUNED]


def own_folder(named: str) -> Path:
    """The folder that KERNEL_BENCH_TUNED names. Raises StoredError where it does not exist."""
    if not Path(named).is_dir():
        raise StoredError(f"{OWN} names {named}, which is not a folder")
    return Path(named)


@functools.cache
def stored(implementation: str) -> list[StoredChoice]:
    """All stored choices for an implementation. Raises StoredError."""
    return [entry for folder in folders() for entry in _read(folder, implementation)]


def _read(folder: Path, implementation: str) -> Iterator[StoredChoice]:
    for path in sorted(folder.glob(f"*/{implementation}.json")):
        try:
            file = json.loads(path.read_text())
            place = (file["kind"], file["arch"], file["device"], file["measured"])
            for choice in file["choices"]:
                yield StoredChoice(
                    *place, choice["case"], dict(choice["features"]), text_of(choice["config"])
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else error
            raise StoredError(f"stored choices {path} cannot be read: {why}; tune again") from None
