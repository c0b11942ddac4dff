"""Rows of engines' Triton kernels: which configurations their engines' own tuners try, and what an engine
reads of its tables at present.

The spaces are those of vLLM's benchmarks/kernels/benchmark_moe.py and benchmark_w8a8_block_fp8.py, and of
SGLang's tuning_fused_moe_triton.py and tuning_block_wise_kernel.py, without what cannot be right or cannot
differ with block scales: tiles whose K is more than a block of scales.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.binding import BindingError
from kernels.op import Prepared, Unsupported
from kernels.tuning import Demand, Target, Tunable
from shapes.case import text_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kernels.operands import Operands

Entry = Mapping[str, int | bool]
"""A configuration in an engine's words, as its tables and its kernels' launches have it."""

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The M of the engines' tables."""


@dataclass(frozen=True)
class EngineConfig:
    """A configuration in the engines' words. The last three are options of ROCm; None is left out."""

    BLOCK_SIZE_M: int
    BLOCK_SIZE_N: int
    BLOCK_SIZE_K: int
    GROUP_SIZE_M: int
    num_warps: int
    num_stages: int
    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None
    kpack: int | None = None

    @property
    def entry(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.BLOCK_SIZE_M, self.BLOCK_SIZE_N, self.BLOCK_SIZE_K

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the FP8 tiles of all stages take."""
        rows, columns, depth = self.tile
        return (rows + columns) * depth * max(1, self.num_stages)

    def registers(self, lanes: int) -> int:
        """About how many registers a thread needs: for two tiles of fp32, which are the sums and the products
        of one block of scales, and for addresses. lanes: threads of a warp or wavefront"""
        return 2 * self.BLOCK_SIZE_M * self.BLOCK_SIZE_N // (lanes * self.num_warps) + 32


@dataclass(frozen=True)
class EngineTable:
    """What an engine reads for a shape on the device that is here.

    now:    the configuration that it takes at the M of the case
    origin: where it takes that from
    files:  the files that it looks for, as it names them below its folder, the main one first. Each has what
            the engine takes at present, from its table or by default, at LADDER and at the table's own M
    """

    now: Entry
    origin: str
    files: Mapping[str, Mapping[int, Entry]]


def table_of(m: int, own: Iterable[int] | None, files: Mapping[str, Callable[[int], Entry]]) -> EngineTable:
    """own: the M of the engine's table; None where it has none. files: what it takes at an M, by file"""
    ms = sorted({*LADDER, *(own or ())})
    taken = {name: {each: _stored(take(each)) for each in ms} for name, take in files.items()}
    now = next(iter(files.values()))(m)
    return EngineTable(_stored(now), origin_of(own, m), taken)


def _stored(entry: Entry) -> Entry:
    """As tables have it: SGLang's launches add a SPLIT_K of 1, which no table says."""
    return {name: value for name, value in entry.items() if (name, value) != ("SPLIT_K", 1)}


def nearest_of(own: Iterable[int], m: int) -> int:
    """The M whose entry the engines take: of two that are as near, the first in the file."""
    return min(own, key=lambda each: abs(each - m))


def origin_of(own: Iterable[int] | None, m: int) -> str:
    return "the engine's default" if own is None else f"the engine's table at M = {nearest_of(own, m)}"


class EngineLookUp(ABC):
    """How an engine looks up the configuration of its Triton kernel for an op, by its own functions."""

    @abstractmethod
    def rows(self, sizes: Any) -> int:
        """M, by which the engine looks an entry up."""

    @abstractmethod
    def table(self, sizes: Any) -> Mapping[int, Entry] | None:
        """The engine's entries by M; None where it has no table of the shape."""

    @abstractmethod
    def taken(self, sizes: Any, m: int) -> Entry:
        """The configuration of a call: of the engine's table, else its default."""

    @abstractmethod
    def file(self, sizes: Any) -> str:
        """The name of the table's file, below the folder that the engine looks into."""

    def further(self, sizes: Any) -> Mapping[str, Callable[[int], Entry]]:
        """Other files that the engine reads beside, each with what it takes of it at an M."""
        return {}

    @abstractmethod
    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context, a new one for each call, in which the engine takes this configuration; None: its
        own. Raises BindingError or Unsupported."""

    @abstractmethod
    def demands(self, config: EngineConfig, sizes: Any) -> list[Demand]:
        """As `Tunable.demands`."""

    def engine_table(self, sizes: Any) -> EngineTable:
        """What the engine reads for a shape. Raises Unsupported or BindingError."""
        main: Callable[[int], Entry] = functools.partial(self.taken, sizes)
        files = {self.file(sizes): main, **self.further(sizes)}
        return table_of(self.rows(sizes), self.table(sizes), files)

    def picked(self, sizes: Any, forced: EngineConfig | None) -> str:
        """The configuration of a call, and where it is from; empty where the engine does not tell."""
        if forced is not None:
            return f"{text_of(forced.entry)} (as told)"
        m = self.rows(sizes)
        try:
            return f"{text_of(self.taken(sizes, m))} ({origin_of(self.table(sizes), m)})"
        except (BindingError, Unsupported):
            return ""


class EngineTuned(Tunable):
    """A row of an engine's Triton kernel. Where it is told no configuration the engine takes its own, and the
    suite's stored choices are not asked. Winners are written as the engine's tables.

    tables: how its engine looks a configuration up
    depths: BLOCK_SIZE_K of its space
    reads:  what to do so that the engine reads a file that was written, for people
    """

    Config = EngineConfig
    forced: EngineConfig | None = None
    tables: EngineLookUp
    depths: tuple[int, ...] = (128,)
    reads: str

    def engine_table(self, sizes: DataclassInstance) -> EngineTable:
        """Asks the installed engine, which must see the device. Raises Unsupported or BindingError."""
        return self.tables.engine_table(sizes)

    def demands(self, config: EngineConfig, target: Target, sizes: DataclassInstance) -> list[Demand]:
        return self.tables.demands(config, sizes)

    def heuristic(self, target: Target, sizes: DataclassInstance) -> EngineConfig:
        raise TypeError(f"{self.name} runs what its engine chooses")

    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterator[EngineConfig]:
        """Those that shared memory and registers have room for. Of GROUP_SIZE_M those come first that are
        nearest to the engines' defaults."""
        rocm, few = target.kind == "rocm", self.tables.rows(sizes) <= 16
        tiles = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), self.depths)
        groups = sorted(
            (1, 4, 8, 16, 32) if rocm else (1, 16, 32, 64), key=lambda g: abs(g - (1 if few else 32))
        )
        options: Iterable[tuple[int, ...]] = itertools.product((4, 8), (2,) if rocm else (3, 4, 2, 5))
        if rocm:
            options = [(*each, waves, 16, 2) for each in options for waves in (0, 1, 2, 4)]
        for tile, option, group in itertools.product(tiles, list(options), groups):
            config = EngineConfig(*tile, group, *option)
            lanes, limit = (64, 512) if rocm else (32, 255)
            if config.shared <= target.shared and config.registers(lanes) <= limit:
                yield config


class EngineCall(Prepared):
    """A call of an engine's Triton kernel, with the configuration that it is told, or else the engine's."""

    def __init__(self, operands: Operands, tables: EngineLookUp, config: EngineConfig | None) -> None:
        super().__init__(operands)
        self.tables, self.config = tables, config
        self.overridden = tables.overridden(config)

    def picked(self) -> str:
        return self.tables.picked(self.operands.sizes, self.config)


def product(
    config: EngineConfig, kernel: str, tiles: int, read_rows: float, n: int, k: int, moved: float
) -> Demand:
    """What a launch of [rows, k] x [n, k]^T in tiles asks for.

    tiles:     how many tiles of rows have work
    read_rows: how many rows of a tile exist
    moved:     bytes of all operands and the output, each once
    """
    rows, columns, depth = config.tile
    steps = math.ceil(k / depth)
    step = (read_rows + columns) * depth
    return Demand(
        kernel=kernel,
        programs=tiles * math.ceil(n / columns),
        flops=2.0 * rows * columns * depth * steps,
        dtype="fp8",
        read=step * steps,
        in_flight=step * min(max(1, config.num_stages - 1), steps),
        overlaps=config.num_stages > 1,
        moved=moved,
    )
