"""Configurations of a kernel: which ones there are, and which one is used for a case.

A stored choice says which configuration a case gets. Choices lie in files `<device>/<implementation>.json` of
two folders: the one that KERNEL_BENCH_TUNED names, which comes first, and `tuned` beside this file.
`python -m harness tune` stores what it measured on a device. Choices in a folder that is named after an
architecture were only compiled, on a machine without that GPU.
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
"""The environment variable that names the user's own folder of stored choices."""

Own = TypeVar("Own", bound="Tunable")
T = TypeVar("T")


class StoredError(Exception):
    """Stored choices cannot be read. The text says which, and what to do."""


@dataclass(frozen=True)
class Target:
    """A device for which a configuration is chosen or looked up. This machine need not have it."""

    kind: str
    """The kind of platform: `cuda`, `rocm` or `cpu`."""
    arch: str
    units: int
    """How many compute units (CUs, SMs) it has."""
    device: str = ""
    """The driver's name of it, such as `NVIDIA H200`; empty for any device of the architecture."""
    shared: float = math.inf
    """The most bytes of shared memory that a program may take; infinite if unknown."""
    triton: str = ""
    """The version of Triton that an engine uses there; empty if unknown."""

    def pick(self, choices: Mapping[str, T]) -> T:
        """Picks from choices by architecture or kind. The architecture comes first."""
        return choices.get(self.arch, choices[self.kind])


@dataclass(frozen=True)
class Choice:
    """The configuration that a case gets."""

    config: DataclassInstance
    origin: str
    """Says where it comes from, for the record."""


class Tunable(Implementation):
    """An implementation that has several configurations."""

    Config: ClassVar[type[DataclassInstance]]
    """A frozen dataclass of integers, strings and booleans: the constants for which its kernels are
    specialised, and Triton's options. None of them depends on the sizes. One that is None is left out."""
    forced: DataclassInstance | None = None
    """The configuration to use instead of a stored one; None: the stored one."""

    @abstractmethod
    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterable[DataclassInstance]:
        """All configurations that are right at these sizes and may be the fastest. Of several that differ in
        options without effect there it gives one. It may still not fit the device: compiling tells."""

    def heuristic(self, target: Target, sizes: DataclassInstance) -> DataclassInstance:
        """What to use where no stored choice is right at these sizes: by default the first configuration."""
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
        """The configuration for these sizes: forced, stored or by rule, in this order. Raises StoredError."""
        if self.forced is not None:
            return Choice(self.forced, "as told")
        if nearest_first := self.stored(target, sizes):
            return nearest_first[0]
        by_rule = f"by rule: none of the stored fits {target.arch} here"
        return Choice(self.heuristic(target, sizes), by_rule)

    def stored(self, target: Target, sizes: DataclassInstance) -> list[Choice]:
        """The stored choices for targets of this kind whose configurations are right at these sizes, the
        nearest first (see `StoredChoice.distance_to`). Raises StoredError."""
        choices = [choice for choice in stored_choices(self.name) if choice.kind == target.kind]
        if not choices:  # the configurations of some rows take long to list
            return []
        features = self.features(sizes)
        choices.sort(key=lambda choice: choice.distance_to(features, target))
        right = {words(config): config for config in self.configurations(target, sizes)}
        return [
            Choice(right[choice.config], choice.origin(features, target))
            for choice in choices
            if choice.config in right
        ]


def values(config: DataclassInstance) -> dict[str, Any]:
    """The values of a configuration by name, for records and for an engine's tables."""
    return {name: value for name, value in asdict(config).items() if value is not None}


def words(config: DataclassInstance) -> str:
    """A configuration as text, such as `rows=64 warps=4`."""
    return text_of(values(config))


OTHER_DEVICE, NOT_MEASURED, OTHER_ARCH = 1.0, 2.0, 1000.0
"""What is added to the distance of a choice that was measured on another device of the architecture, was only
compiled, or was made for another architecture. `distance` is a base 2 logarithm. So a choice measured on this
device, at sizes that differ by less than a factor of 2^2, precedes one compiled for exactly these sizes."""


@dataclass(frozen=True)
class StoredChoice:
    """A choice in a file, with what the file says of all of its choices."""

    kind: str
    arch: str
    device: str
    """The device on which it was measured; empty on a CPU, and if it was only compiled."""
    measured: bool
    """False if it was only compiled."""
    case: str
    """The text of the case for which it was made."""
    features: Mapping[str, float | str]
    """`Tunable.features` of that case."""
    config: str
    """The configuration as `words` writes it."""

    def distance_to(self, features: Mapping[str, float | str], target: Target) -> float:
        """How far it is from a case on the target: the `distance` of the cases and that of the devices."""
        total = distance(features, self.features)
        if self.arch != target.arch:
            total += OTHER_ARCH
        if not self.measured:
            total += NOT_MEASURED
        elif self.device != target.device:
            total += OTHER_DEVICE
        return total

    def origin(self, features: Mapping[str, float | str], target: Target) -> str:
        """Says where it comes from, for the record of a case with these features."""
        place = self.device or self.arch
        how = f"measured on {place}" if self.measured else f"compiled for {place}, not measured"
        which = "for this case" if self.features == features else f"for the nearest case, {self.case}"
        other_arch = "" if self.arch == target.arch else f", for want of any for {target.arch}"
        return f"{how}, {which}{other_arch}"


def distance(a: Mapping[str, float | str], b: Mapping[str, float | str]) -> float:
    """How much two cases differ in their features: the sum of |log2| of the ratios of their numbers, each
    plus 1, and of 4 for each string that is not the same."""
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


def own_folder(setting: str) -> Path:
    """The folder that a value of KERNEL_BENCH_TUNED names. Raises StoredError where it does not exist."""
    if not Path(setting).is_dir():
        raise StoredError(f"{OWN} names {setting}, which is not a folder")
    return Path(setting)


@functools.cache
def stored_choices(implementation: str) -> list[StoredChoice]:
    """All stored choices for an implementation, those of the user's own folder first. Raises StoredError."""
    own = os.environ.get(OWN)
    choices: list[StoredChoice] = []
    for folder in [own_folder(own), TUNED] if own else [TUNED]:
        for path in sorted(folder.glob(f"*/{implementation}.json")):
            choices += _read(path)
    return choices


def _read(path: Path) -> Iterator[StoredChoice]:
    """The choices of a file. Raises StoredError."""
    try:
        file = json.loads(path.read_bytes())
        of_all = (file["kind"], file["arch"], file["device"], file["measured"])
        for choice in file["choices"]:
            yield StoredChoice(*of_all, choice["case"], dict(choice["features"]), text_of(choice["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else error
        raise StoredError(f"stored choices {path} cannot be read: {why}; tune again") from None
