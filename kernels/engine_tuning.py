"""Rows of engines' Triton kernels: which configurations their engines' own tuners try, and what an engine
reads of its tables at present.

The spaces are those of vLLM's benchmarks/kernels/benchmark_moe.py and benchmark_w8a8_block_fp8.py, and of
SGLang's tuning_fused_moe_triton.py and tuning_block_wise_kernel.py, without what cannot be right or cannot
differ with block scales: tiles whose K is more than a block of scales.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.tuning import Demand, Target, Tunable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Entry = Mapping[str, int | bool]
"""A configuration in an engine's words, as its tables and its kernels' launches have it."""

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The M of the engines' tables."""


@dataclass(frozen=True)
class EngineConfig:
    """A configuration in the engines' words, None where it says nothing: the last three are of ROCm."""

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
        """Of a thread, about: two tiles of fp32, sums and the products of one block of scales, beside
        addresses. lanes: threads of a warp or wavefront"""
        return 2 * self.BLOCK_SIZE_M * self.BLOCK_SIZE_N // (lanes * self.num_warps) + 32


@dataclass(frozen=True)
class EngineTable:
    """What an engine reads for a shape on the device that is here.

    now:    the configuration that it takes at M of the case
    origin: where it takes that from
    files:  its files as it names them, below the folder that it looks into; of each, by M, what it takes at
            present, be it of a table or its default: at LADDER and at the table's own M
    """

    now: Entry
    origin: str
    files: Mapping[str, Mapping[int, Entry]]


def table_of(
    m: int,
    own: Iterable[int] | None,
    at: Callable[[int], Entry],
    file: str,
    more: Mapping[str, Callable[[int], Entry]] | None = None,
) -> EngineTable:
    """own: M of the engine's table; None where it has none. at: what it takes at an M. more: of further files
    that it reads beside."""
    ms = sorted({*LADDER, *(own or ())})
    takes = {file: at, **(more or {})}
    files = {name: {each: _said(take(each)) for each in ms} for name, take in takes.items()}
    return EngineTable(_said(at(m)), origin_of(own, m), files)


def _said(entry: Entry) -> Entry:
    """As tables have it: without a SPLIT_K of 1, which launches have that say nothing of it."""
    return {name: value for name, value in entry.items() if (name, value) != ("SPLIT_K", 1)}


def nearest_of(own: Iterable[int], m: int) -> int:
    """The M whose entry the engines take: of two that are as near, the first in the file."""
    return min(own, key=lambda each: abs(each - m))


def origin_of(own: Iterable[int] | None, m: int) -> str:
    return "the engine's default" if own is None else f"the engine's table at M = {nearest_of(own, m)}"


class EngineTuned(Tunable):
    """A row of an engine's Triton kernel: where it is told no configuration the engine takes its own, and the
    suite's stored choices are not asked. Winners are written as the engine's tables.

    depths: BLOCK_SIZE_K of its space
    reads:  how its engine comes to read a written file, for people
    """

    Config = EngineConfig
    forced: EngineConfig | None = None
    depths: tuple[int, ...] = (128,)
    reads: str

    @abstractmethod
    def rows(self, sizes: DataclassInstance) -> int:
        """M, by which the engine looks an entry up."""

    @abstractmethod
    def engine_table(self, sizes: DataclassInstance) -> EngineTable:
        """Asks the installed engine, which must see the device. Raises Unsupported or BindingError."""

    @abstractmethod
    def products(self, config: EngineConfig, sizes: DataclassInstance) -> list[Demand]:
        """Of each launch of its kernel, as Tunable.demands: what the estimate ranks by, with no compiling."""

    def heuristic(self, target: Target, sizes: DataclassInstance) -> EngineConfig:
        raise TypeError(f"{self.name} runs what its engine chooses")

    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterator[EngineConfig]:
        """Those that shared memory and registers have room for, GROUP_SIZE_M from what the engines' defaults
        have on."""
        rocm, few = target.kind == "rocm", self.rows(sizes) <= 16
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


def product(
    config: EngineConfig, kernel: str, tiles: int, read_rows: float, n: int, k: int, moved: float
) -> Demand:
    """A launch of [rows, k] x [n, k]^T in tiles. tiles: of rows, that have work; read_rows: of a tile, that
    exist; moved: bytes of all, each once"""
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
