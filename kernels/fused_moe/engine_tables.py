"""How vLLM and SGLang look up the configuration of their Triton MoE, and how one is forced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import Function
from kernels.engine_tuning import EngineConfig, EngineEntry, EngineLookUp, TakeEntry, nearest_of
from kernels.formats import BLOCK
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.tuning import values

DTYPE = "fp8_w8a8"


@dataclass(frozen=True)
class MoeTables(EngineLookUp):
    """The functions of an engine."""

    take: Function
    """Returns the configuration of a call: that of its table, or its default."""
    own: Function
    """Returns its table by M, or None."""
    name: Function
    """Returns the name of the table's file."""
    override: Function
    """Makes a context in which the engine uses a given configuration."""
    folder: Callable[[], str] = str
    """Returns the folder of the files, below the one that the engine is told."""

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        return contextlib.nullcontext if config is None else self.override.bind(values(config))

    def rows(self, sizes: FusedMoeSizes) -> int:
        return sizes.tokens

    def taken(self, sizes: FusedMoeSizes, m: int) -> EngineEntry:
        found: EngineEntry = self.take.bind(
            w1_shape=(sizes.local_experts, 2 * sizes.inter, sizes.hidden),
            w2_shape=(sizes.local_experts, sizes.hidden, sizes.inter),
            top_k=sizes.picks,
            dtype=DTYPE,
            M=m,
            block_shape=[BLOCK, BLOCK],
        )()
        return found

    def table(self, sizes: FusedMoeSizes, **more: object) -> Mapping[int, EngineEntry] | None:
        found: Mapping[int, EngineEntry] | None = self.own.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_n=BLOCK, block_k=BLOCK, **more
        )()
        return found or None  # engines treat an empty table as none

    def file(self, sizes: FusedMoeSizes, **more: object) -> str:
        named = self.name.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_shape=[BLOCK, BLOCK], **more
        )
        return self.folder() + str(named())

    def further(self, sizes: FusedMoeSizes) -> Mapping[str, TakeEntry]:
        """The table of the second product, if the engine has one that differs. Otherwise that of the first
        product serves both."""
        if "down_moe" not in self.own.wishes:
            return {}
        down = self.table(sizes, down_moe=True)
        if down is None or down == self.table(sizes):
            return {}
        return {self.file(sizes, down_moe=True): lambda m: down[nearest_of(down, m)]}
