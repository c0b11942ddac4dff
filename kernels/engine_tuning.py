"""Configurations of engines' Triton kernels: those that engines' own tuners try, and those that engines use.

The spaces are those of vLLM's benchmarks/kernels/benchmark_moe.py and benchmark_w8a8_block_fp8.py, and of
SGLang's tuning_fused_moe_triton.py and tuning_block_wise_kernel.py. Tiles whose K exceeds a block of scales
are left out: with block scales they are wrong, or the same as smaller ones.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.binding import BindingError
from kernels.op import Call, Prepared, Unsupported
from kernels.operands import Operands
from kernels.tuning import Target, Tunable, words
from shapes.case import text_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EngineEntry = Mapping[str, int | bool]
"""A configuration with an engine's names, as in its tables and in launches of its kernels."""

EntryAt = Callable[[int], EngineEntry]
"""Returns the configuration that the engine uses for a number of rows M."""

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The M for which the engines' tables have entries."""


@dataclass(frozen=True)
class EngineConfig:
    """A configuration with the engines' names. The last three are options of ROCm, left out where None."""

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
    def shared(self) -> int:
        """Bytes of shared memory for the FP8 tiles of all stages."""
        return (self.BLOCK_SIZE_M + self.BLOCK_SIZE_N) * self.BLOCK_SIZE_K * max(1, self.num_stages)

    def registers(self, lanes: int) -> int:
        """An estimate of the 32-bit registers of a thread: for two tiles of fp32, which hold the sums and the
        products of a block of scales, and 32 for addresses. lanes: threads of a warp or wavefront"""
        return 2 * self.BLOCK_SIZE_M * self.BLOCK_SIZE_N // (lanes * self.num_warps) + 32


@dataclass(frozen=True)
class EngineTable:
    """What an engine uses for a shape on this machine's device, where it has a table or a default."""

    entry: EngineEntry
    """The configuration at the M of the case."""
    origin: str
    """Where `entry` comes from, as `origin_of` says it."""
    files: Mapping[str, Mapping[int, EngineEntry]]
    """The files that the engine looks for, the main one first, by their names below its folder: by M, the
    configurations that it uses now. The M are those of LADDER and of the table."""


def _without_split(entry: EngineEntry) -> EngineEntry:
    """The entry as tables have it. SGLang's launches add a SPLIT_K of 1, which no table has."""
    return {name: value for name, value in entry.items() if (name, value) != ("SPLIT_K", 1)}


def nearest_of(table: Iterable[int], m: int) -> int:
    """The M of a table whose entry engines use for m rows: the first of the nearest ones."""
    return min(table, key=lambda key: abs(key - m))


def origin_of(table: Iterable[int] | None, m: int) -> str:
    """Says where the configuration for m rows comes from. table: its M, in order; None for no table"""
    return "the engine's default" if table is None else f"the engine's table at M = {nearest_of(table, m)}"


class EngineLookUp(ABC):
    """Asks an engine, by its own functions, which configuration its Triton kernel of an op uses."""

    @abstractmethod
    def m_of(self, sizes: Any) -> int:
        """The M by which the engine looks up an entry."""

    @abstractmethod
    def table(self, sizes: Any) -> Mapping[int, EngineEntry] | None:
        """The entries of the engine's file for the shape, by M; None where it has no such file."""

    @abstractmethod
    def entry(self, sizes: Any, m: int) -> EngineEntry:
        """The configuration of a call with m rows: that of the engine's table, or its default."""

    @abstractmethod
    def file_name(self, sizes: Any) -> str:
        """The name of the table's file, below the folder that the engine looks into."""

    def other_files(self, sizes: Any) -> Mapping[str, EntryAt]:
        """By name, other files that the engine reads for the shape, with the configurations that it uses."""
        return {}

    @abstractmethod
    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """Returns a function that makes a context for one call. In it the engine uses this configuration; if
        that is None, the engine chooses. Raises BindingError or Unsupported."""

    def engine_table(self, sizes: Any) -> EngineTable:
        """What the engine uses for a shape. Raises Unsupported or BindingError."""
        m = self.m_of(sizes)
        table = self.table(sizes)
        entry_at: EntryAt = functools.partial(self.entry, sizes)
        ladder = sorted({*LADDER, *(table or ())})
        files = {}
        for name, entry_of_file in {self.file_name(sizes): entry_at, **self.other_files(sizes)}.items():
            files[name] = {step: _without_split(entry_of_file(step)) for step in ladder}
        return EngineTable(_without_split(entry_at(m)), origin_of(table, m), files)

    def picked(self, sizes: Any, forced: EngineConfig | None) -> str:
        """A call's configuration and its source as text; empty if unknown. forced: as for `overridden`"""
        if forced is not None:
            return f"{words(forced)} (as told)"
        m = self.m_of(sizes)
        try:
            return f"{text_of(self.entry(sizes, m))} ({origin_of(self.table(sizes), m)})"
        except (BindingError, Unsupported):
            return ""


class EngineTuned(Tunable):
    """A row of an engine's Triton kernel. The engine chooses the configuration unless one is forced. `tune`
    writes what wins a race as tables of the engine."""

    Config = EngineConfig
    forced: EngineConfig | None = None
    tables: EngineLookUp
    """Looks up what the engine would choose."""
    depths: tuple[int, ...] = (128,)
    """The values of BLOCK_SIZE_K to try."""
    how_to_use: str
    """Tells the user how to make the engine read a file that was written."""

    def prepared(self, operands: Operands, call: Call) -> Prepared:
        """A call of the engine that allocates its output, with the forced configuration if there is one."""
        overridden = self.tables.overridden(self.forced)

        def configured() -> object:
            with overridden():
                return call()

        picked = functools.partial(self.tables.picked, operands.sizes, self.forced)
        return Prepared(operands, None, configured, picked=picked)

    def engine_table(self, sizes: DataclassInstance) -> EngineTable:
        """What the installed engine uses on this machine's device. Raises Unsupported or BindingError."""
        return self.tables.engine_table(sizes)

    def heuristic(self, target: Target, sizes: DataclassInstance) -> EngineConfig:
        raise TypeError(f"{self.name} runs what its engine chooses")

    def configurations(self, target: Target, sizes: DataclassInstance) -> Iterator[EngineConfig]:
        """Those that fit into shared memory and registers. Usual values of GROUP_SIZE_M come first."""
        tiles = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), self.depths)
        # The values of num_warps, num_stages and, on ROCm, of waves_per_eu, matrix_instr_nonkdim and kpack.
        options: Iterable[tuple[int, ...]]
        if target.kind == "rocm":
            groups = [1, 4, 8, 16, 32]
            options = itertools.product((4, 8), (2,), (0, 1, 2, 4), (16,), (2,))
            lanes, most_registers = 64, 512
        else:
            groups = [1, 16, 32, 64]
            options = itertools.product((4, 8), (3, 4, 2, 5))
            lanes, most_registers = 32, 255
        default_group = 1 if self.tables.m_of(sizes) <= 16 else 32
        groups.sort(key=lambda group: abs(group - default_group))
        for tile, values, group in itertools.product(tiles, options, groups):
            config = EngineConfig(*tile, group, *values)
            if config.shared <= target.shared and config.registers(lanes) <= most_registers:
                yield config
