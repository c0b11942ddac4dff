"""How vLLM and SGLang look up the configuration of their Triton GEMM, and how one is forced: the engine's own
look-up returns it for the time of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import BindingError, Function
from kernels.block_scale_gemm.operands import BlockScaleGemmSizes
from kernels.engine_tuning import EngineConfig, EngineEntry, EngineLookUp, nearest_of
from kernels.formats import BLOCK
from kernels.tables.engine_json import RULES, file_name
from kernels.tuning import values

LOOK_UP = "get_w8a8_block_fp8_configs"
"""The function that both engines call for a table, in the module of the product."""


@dataclass(frozen=True)
class GemmTables(EngineLookUp):
    """The functions of an engine."""

    engine: str
    """`vllm` or `sglang`. RULES has what no function of the engine returns."""
    multiply: Function
    """The product."""
    own: Function
    """Returns its table for a weight by M, or None."""
    device: Function
    """Returns the device's name."""

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """Raises BindingError where the product does not call the look-up."""
        if config is None:
            return contextlib.nullcontext
        multiply, entry = self.multiply.find(), values(config)
        names = multiply.__globals__
        if LOOK_UP not in names or LOOK_UP not in multiply.__code__.co_names:
            raise BindingError(f"{self.multiply.places[0]} does not ask {LOOK_UP}")

        @contextlib.contextmanager
        def given() -> Iterator[None]:
            looks_up = names[LOOK_UP]
            names[LOOK_UP] = lambda *_: {0: dict(entry)}
            try:
                yield
            finally:
                names[LOOK_UP] = looks_up

        return given

    def rows(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.m

    def table(self, sizes: BlockScaleGemmSizes) -> Mapping[int, EngineEntry] | None:
        found: Mapping[int, EngineEntry] | None = self.own.bind(
            N=sizes.n, K=sizes.k, block_n=BLOCK, block_k=BLOCK
        )()
        return found or None  # engines treat an empty table as none

    def taken(self, sizes: BlockScaleGemmSizes, m: int) -> EngineEntry:
        own = self.table(sizes)
        return RULES[self.engine].gemm_default if own is None else own[nearest_of(own, m)]

    def file(self, sizes: BlockScaleGemmSizes) -> str:
        device = str(self.device.bind()()).replace(" ", "_")
        return file_name(f"N={sizes.n},K={sizes.k}", device, RULES[self.engine].block)
