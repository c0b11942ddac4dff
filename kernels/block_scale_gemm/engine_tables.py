"""How the Triton GEMM that vLLM and SGLang have looks a configuration up, and how one is given to it: by its
own look-up, which answers with that one for the time of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import BindingError, Function
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.engine_tuning import EngineConfig, EngineTable, Entry, nearest_of, origin_of, product, table_of
from kernels.formats import BLOCK
from kernels.op import Unsupported
from kernels.tables.engine_json import file_name
from kernels.tuning import Demand
from shapes.case import text_of

LOOK_UP = "get_w8a8_block_fp8_configs"
"""Of the module of the product, in both engines."""


@dataclass(frozen=True)
class GemmTables:
    """Of an engine.

    multiply: its product
    own:      its table of a weight by M; None where it has none
    default:  what the product takes then, at every M (written out in it)
    device:   the device's name
    sides:    of a block, in names of files
    """

    multiply: Function
    own: Function
    default: EngineConfig
    device: Function
    sides: str

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """What to call within, each time anew. Raises BindingError where the product asks no such look-up."""
        if config is None:
            return contextlib.nullcontext
        product, entry = self.multiply.find(), config.entry
        if LOOK_UP not in product.__globals__ or LOOK_UP not in product.__code__.co_names:
            raise BindingError(f"{self.multiply.places[0]} does not ask {LOOK_UP}")

        @contextlib.contextmanager
        def given() -> Iterator[None]:
            names = product.__globals__
            looks_up = names[LOOK_UP]
            names[LOOK_UP] = lambda *_: {0: dict(entry)}
            try:
                yield
            finally:
                names[LOOK_UP] = looks_up

        return given

    def table(self, sizes: BlockScaleGemmSizes) -> dict[int, Entry] | None:
        found: dict[int, Entry] | None = self.own.bind(N=sizes.n, K=sizes.k, block_n=BLOCK, block_k=BLOCK)()
        return found

    def taken(self, own: dict[int, Entry] | None, m: int) -> Entry:
        return own[nearest_of(own, m)] if own else self.default.entry

    def engine_table(self, sizes: BlockScaleGemmSizes) -> EngineTable:
        own = self.table(sizes)
        device = str(self.device.bind()()).replace(" ", "_")
        file = file_name(f"N={sizes.n},K={sizes.k}", device, self.sides)
        return table_of(sizes.m, own, lambda m: self.taken(own, m), file)

    def picked(self, sizes: BlockScaleGemmSizes, forced: EngineConfig | None) -> str:
        """The configuration of a call, and where it is from."""
        if forced is not None:
            return f"{text_of(forced.entry)} (as told)"
        try:
            own = self.table(sizes)
        except (BindingError, Unsupported):
            return ""
        return f"{text_of(self.taken(own, sizes.m))} ({origin_of(own, sizes.m)})"


def products(config: EngineConfig, sizes: BlockScaleGemmSizes) -> list[Demand]:
    tiles = -(-sizes.m // config.BLOCK_SIZE_M)
    moved = float(sizes.quantised_bytes + sizes.n * sizes.k + 2 * sizes.m * sizes.n)
    return [product(config, "block_scaled_mm", tiles, sizes.m / tiles, sizes.n, sizes.k, moved)]
