"""Configurations of a kernel: which there are, what each asks of a device, and which was chosen for what.

Choices are data: `python -m harness tune` writes `tuned/<device>/<implementation>.json` beside this file,
from offline compiling (the device is then an architecture) or from measuring, and `choose` reads them when a
call is prepared. KERNEL_BENCH_TUNED names a further folder of the same layout, which goes before.
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
Of = TypeVar("Of")


class StoredError(Exception):
    """Stored choices cannot be read; the text says which and what to do."""


@dataclass(frozen=True)
class Target:
    """What kernels are chosen for; it need not be here.

    kind:   cpu, cuda or rocm
    arch:   sm_90, gfx942 ...
    units:  compute units (streaming multiprocessors)
    device: the vendor's name; empty for any of the architecture
    shared: bytes that the threads of a program share at most; of a device that is here its driver knows
    """

    kind: str
    arch: str
    units: int
    device: str = ""
    shared: float = math.inf

    def pick(self, choices: Mapping[str, Of]) -> Of:
        """Of choices by architecture or kind: the architecture's own, if there is one."""
        return choices.get(self.arch, choices[self.kind])


@dataclass(frozen=True)
class Demand:
    """What one kernel of a call asks of a device: all that is needed to judge a configuration before it runs.

    kernel:    name of the function that is compiled
    programs:  of its grid that have work to do
    flops:     of a program's matrix products, with what pads its tile
    dtype:     of the operands of those products
    read:      bytes that a program loads, from a cache or from memory
    in_flight: bytes of those that are on the way at once, by the stages of its loop
    moved:     bytes that all programs read and write, each once
    overlaps:  whether a program's loads go on while it multiplies; not so in a loop of one stage
    """

    kernel: str
    programs: int
    flops: float
    dtype: str
    read: float
    in_flight: float
    moved: float
    overlaps: bool = True


@dataclass(frozen=True)
class Choice:
    """A configuration, and where it comes from, for the record."""

    config: DataclassInstance
    origin: str


class Tunable(Implementation):
    """An implementation that has configurations to choose from.

    Config: a frozen dataclass of whole numbers, words and truths: the constants that its kernels are
            specialised by and Triton's options, whatever the sizes are
    forced: the configuration that is used instead of the one chosen
    """

    Config: ClassVar[type[DataclassInstance]]
    forced: DataclassInstance | None = None

    @abstractmethod
    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterable[DataclassInstance]:
        """All that are right for these sizes and may be best for some; whether one fits is the compiler's to
        say. Those that differ only in what cannot matter here are given once."""

    @abstractmethod
    def heuristic(self, target: Target, sizes: DataclassInstance) -> DataclassInstance:
        """What is taken where nothing is stored for any target of the kind."""

    def demands(self, config: DataclassInstance, target: Target, sizes: DataclassInstance) -> list[Demand]:
        """Of each kernel of a call that a configuration changes."""
        return []

    def features(self, sizes: DataclassInstance) -> dict[str, float | str]:
        """By which cases are near each other or far: see `distance`."""
        return asdict(sizes)

    def configured(self: Own, config: Mapping[str, object]) -> Own:
        """The same, made to use this configuration."""
        other = copy.copy(self)
        other.forced = self.Config(**config)
        return other

    def choose(self, target: Target, sizes: DataclassInstance) -> Choice:
        """The configuration for these sizes: the forced one, else the nearest stored one, else by rule."""
        if self.forced is not None:
            return Choice(self.forced, "as told")
        by_rule = f"by rule: none of the stored fits {target.arch} here"
        return nearest(self, target, sizes) or Choice(self.heuristic(target, sizes), by_rule)


def words(config: DataclassInstance) -> str:
    """`rows=64 warps=4`, for people."""
    return text_of(asdict(config))


OTHER_DEVICE, NOT_MEASURED, OTHER_ARCH = 1.0, 2.0, 1000.0
"""What distance a choice is thought farther by that was measured on another device of the architecture, or
only compiled, or made for another architecture of the kind. One that was measured here goes before one that
was compiled for exactly these sizes if all sizes together are within a factor of four; another architecture's
goes before none of its own."""


def nearest(implementation: Tunable, target: Target, sizes: DataclassInstance) -> Choice | None:
    """The stored choice that is right for these sizes and was made for the nearest; None if there is none.
    Raises StoredError where what is stored cannot be read."""
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
class Entry:
    """A stored choice.

    kind, arch, device: what it was made for; device is empty where it was only compiled
    case:     its text, for people; features: see Tunable.features
    config:   in words
    """

    kind: str
    arch: str
    device: str
    measured: bool
    case: str
    features: Mapping[str, float | str]
    config: str

    def away(self, features: Mapping[str, float | str], target: Target) -> float:
        """How far its case is from another, and what it was made for from the target."""
        away = distance(features, self.features)
        if self.arch != target.arch:
            away += OTHER_ARCH
        if not self.measured:
            away += NOT_MEASURED
        elif self.device != target.device:
            away += OTHER_DEVICE
        return away

    def origin(self, features: Mapping[str, float | str], target: Target) -> str:
        """For the record."""
        where = self.device or self.arch
        how = f"measured on {where}" if self.measured else f"compiled for {where}, not measured"
        other = "" if self.arch == target.arch else f", for want of any for {target.arch}"
        at = "for this case" if self.features == features else f"for the nearest case, {self.case}"
        return f"{how}, {at}{other}"


def distance(a: Mapping[str, float | str], b: Mapping[str, float | str]) -> float:
    """Between sizes: binary orders of magnitude, summed over all of them; four for each word that differs."""
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
    """Where choices are stored, the first goes before. Raises StoredError."""
    own = os.environ.get(OWN)
    return [*([own_folder(own)] if own else []), TUNED]


def own_folder(named: str) -> Path:
    """The folder that OWN names. Raises StoredError where it is none."""
    if not Path(named).is_dir():
        raise StoredError(f"{OWN} names {named}, which is not a folder")
    return Path(named)


@functools.cache
def stored(implementation: str) -> list[Entry]:
    """All choices for an implementation. Raises StoredError."""
    return [entry for folder in folders() for entry in _read(folder, implementation)]


def _read(folder: Path, implementation: str) -> Iterator[Entry]:
    for path in sorted(folder.glob(f"*/{implementation}.json")):
        try:
            file = json.loads(path.read_text())
            place = (file["kind"], file["arch"], file["device"], file["measured"])
            for choice in file["choices"]:
                yield Entry(*place, choice["case"], dict(choice["features"]), text_of(choice["config"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else error
            raise StoredError(f"stored choices {path} cannot be read: {why}; tune again") from None
