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
from typing import Any, ClassVar, TypeVar

from kernels.op import Implementation, Unsupported

TUNED = Path(__file__).parent / "tuned"

Own = TypeVar("Own", bound="Tunable")
Of = TypeVar("Of")


@dataclass(frozen=True)
class Target:
    """What kernels are chosen for; it need not be here.

    kind:   cpu, cuda or rocm
    arch:   sm_90, gfx942 ...
    units:  compute units (streaming multiprocessors)
    device: the vendor's name; empty for any of the architecture
    """

    kind: str
    arch: str
    units: int
    device: str = ""

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
    """

    kernel: str
    programs: int
    flops: float
    dtype: str
    read: float
    in_flight: float
    moved: float


@dataclass(frozen=True)
class Choice:
    """A configuration, and where it comes from, for the record."""

    config: Any
    origin: str


class Tunable(Implementation):
    """An implementation that has configurations to choose from.

    Config: a frozen dataclass of whole numbers, words and truths: the constants that its kernels are
            specialised by and Triton's options, whatever the sizes are
    forced: the configuration that is used instead of the one chosen
    """

    Config: ClassVar[type]
    forced: Any = None

    @abstractmethod
    def configurations(self, target: Target, sizes: Any) -> Iterable[Any]:
        """All that are right for these sizes and may be best for some; whether one fits is the compiler's to
        say. Those that differ only in what cannot matter here are given once."""

    @abstractmethod
    def heuristic(self, target: Target, sizes: Any) -> Any:
        """What is taken where nothing is stored for any target of the kind."""

    def demands(self, config: Any, target: Target, sizes: Any) -> list[Demand]:
        """Of each kernel of a call that a configuration changes."""
        return []

    def features(self, sizes: Any) -> dict[str, float | str]:
        """By which cases are near each other or far: see `distance`."""
        return asdict(sizes)

    def configured(self: Own, config: Mapping[str, Any]) -> Own:
        """The same, made to use this configuration."""
        other = copy.copy(self)
        other.forced = self.Config(**config)
        return other

    def choose(self, target: Target, sizes: Any) -> Choice:
        """The configuration for these sizes: the forced one, else the nearest stored one, else by rule."""
        if self.forced is not None:
            return Choice(self.forced, "as told")
        return nearest(self, target, sizes) or Choice(self.heuristic(target, sizes), "by rule")


def words(config: Any) -> str:
    """`rows=64 warps=4`, for people."""
    return _words(asdict(config))


def _words(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


OTHER_DEVICE, NOT_MEASURED, OTHER_ARCH = 1.0, 2.0, 8.0
"""What distance a choice is thought farther by that was made on another device of the architecture, or by
compiling alone, or for another architecture of its kind: one that was measured here goes before one compiled
for exactly these sizes if all sizes together are within a factor of four."""


def nearest(implementation: Tunable, target: Target, sizes: Any) -> Choice | None:
    """The stored choice that is right for these sizes and was made for the nearest; None if there is none."""
    entries = [entry for entry in stored(implementation.name) if entry["kind"] == target.kind]
    if not entries:
        return None
    asked = implementation.features(sizes)
    allowed = {_words(asdict(config)): config for config in implementation.configurations(target, sizes)}
    found = []
    for entry in entries:
        config = allowed.get(_words(entry["config"]))
        if config is None:
            continue
        far = distance(asked, entry["features"])
        away = far + OTHER_ARCH * (entry["arch"] != target.arch)
        if not entry["measured"]:
            away += NOT_MEASURED
        elif entry["device"] != target.device:
            away += OTHER_DEVICE
        found.append((away, far, entry, config))
    if not found:
        return None
    _, far, entry, config = min(found, key=lambda one: one[0])
    where = entry["device"] or entry["arch"]
    how = f"measured on {where}" if entry["measured"] else f"compiled for {where}, not measured"
    at = "for this case" if not far else f"for the nearest case, {entry['case']}"
    return Choice(config, f"{how}, {at}")


def distance(a: Mapping[str, float | str], b: Mapping[str, float | str]) -> float:
    """Between sizes: binary orders of magnitude, summed over all of them; four for each word that differs."""
    total = 0.0
    for name in a.keys() | b.keys():
        one, other = a.get(name), b.get(name)
        if one == other:
            continue
        numbers = all(isinstance(x, int | float) and x >= 0 for x in (one, other))
        total += abs(math.log2((one + 1) / (other + 1))) if numbers else 4.0
    return total


def folders() -> list[Path]:
    own = os.environ.get("KERNEL_BENCH_TUNED")
    return [*([Path(own)] if own else []), TUNED]


ENTRY = ("case", "features", "config")


@functools.cache
def stored(implementation: str) -> list[dict[str, Any]]:
    """All entries of an implementation: case, features, config, measured, kind, arch, device."""
    return [entry for folder in folders() for entry in _read(folder, implementation)]


def _read(folder: Path, implementation: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{implementation}.json")):
        try:
            file = json.loads(path.read_text())
            place = {name: file[name] for name in ("kind", "arch", "device", "measured")}
            yield from (place | {name: entry[name] for name in ENTRY} for entry in file["choices"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unsupported(f"stored choices {path} cannot be read: {error}; make them anew") from None
