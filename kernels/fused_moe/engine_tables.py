"""How vLLM and SGLang, whose Triton MoE began as one, look a configuration up and let one be given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import BindingError, Function
from kernels.engine_tuning import EngineConfig, EngineTable, Entry, nearest_of, origin_of, product, table_of
from kernels.formats import BLOCK
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Unsupported
from kernels.tuning import Demand
from shapes.case import text_of

DTYPE = "fp8_w8a8"


@dataclass(frozen=True)
class MoeTables:
    """Functions of an engine.

    take:     the configuration of a call: of its table, else by default
    own:      its table by M; None where it has none
    name:     of the table's file
    override: a context in which it takes a given configuration
    folder:   in which its files lie, below the one that it is told
    """

    take: Function
    own: Function
    name: Function
    override: Function
    folder: Callable[[], str] = str

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """What to call within, each time anew."""
        if config is None:
            return contextlib.nullcontext
        return self.override.bind(config.entry)

    def taken(self, sizes: FusedMoeSizes, m: int, **more: object) -> Any:
        return self.take.bind(
            w1_shape=(sizes.local_experts, 2 * sizes.inter, sizes.hidden),
            w2_shape=(sizes.local_experts, sizes.hidden, sizes.inter),
            top_k=sizes.picks,
            dtype=DTYPE,
            M=m,
            block_shape=[BLOCK, BLOCK],
            **more,
        )()

    def table(self, sizes: FusedMoeSizes, **more: object) -> dict[int, Entry] | None:
        found: dict[int, Entry] | None = self.own.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_n=BLOCK, block_k=BLOCK, **more
        )()
        return found

    def file(self, sizes: FusedMoeSizes, **more: object) -> str:
        named = self.name.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_shape=[BLOCK, BLOCK], **more
        )
        return self.folder() + str(named())

    def engine_table(self, sizes: FusedMoeSizes) -> EngineTable:
        own = self.table(sizes)
        further = {}
        if "down_moe" in self.own.wishes and (down := self.table(sizes, down_moe=True)) not in (None, own):
            # Of the second product; where a written folder has none, the first one's serves both.
            further[self.file(sizes, down_moe=True)] = lambda m: down[nearest_of(down, m)]
        return table_of(sizes.tokens, own, lambda m: self.taken(sizes, m), self.file(sizes), further)

    def picked(self, sizes: FusedMoeSizes, forced: EngineConfig | None) -> str:
        """The configuration of a call, and where it is from."""
        if forced is not None:
            return f"{text_of(forced.entry)} (as told)"
        try:
            taken, own = self.taken(sizes, sizes.tokens), self.table(sizes)
        except (BindingError, Unsupported):
            return ""
        return f"{text_of(taken)} ({origin_of(own, sizes.tokens)})"


def products(config: EngineConfig, sizes: FusedMoeSizes) -> list[Demand]:
    """Of both launches. Each expert's rows begin a tile of their own."""
    pairs, hidden, inter = sizes.routed.pairs, sizes.hidden, sizes.inter
    tiles = sum(-(-load // config.BLOCK_SIZE_M) for load in sizes.routed.loads())
    rows = pairs / max(1, tiles)
    weights = sizes.routed.hit * inter * hidden
    up = 2 * weights + sizes.tokens * hidden + 4 * pairs * inter
    down = weights + pairs * inter + 2 * pairs * hidden
    return [
        product(config, "fused_moe_kernel", tiles, rows, 2 * inter, hidden, up),
        product(config, "fused_moe_kernel", tiles, rows, hidden, inter, down),
    ]
