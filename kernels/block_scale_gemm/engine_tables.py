"""How vLLM and SGLang look up the configuration of the Triton GEMM that both have, and how one is given to
it: by their own look-up, which answers with that one for the time of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import BindingError, Function
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.engine_tuning import EngineConfig, EngineEntry, EngineLookUp, nearest_of
from kernels.formats import BLOCK
from kernels.tables.engine_json import RULES, file_name

LOOK_UP = "get_w8a8_block_fp8_configs"
"""The function that answers, in the module of the product, of both engines."""


@dataclass(frozen=True)
class GemmTables(EngineLookUp):
    """The functions of an engine.

    engine:   `vllm` or `sglang`, of which RULES has what no function tells
    multiply: its product
    own:      gives its table of a weight, by M, or None
    device:   gives the device's name
    """

    engine: str
    multiply: Function
    own: Function
    device: Function

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """Raises BindingError where the product asks no such look-up."""
        if config is None:
            return contextlib.nullcontext
        multiply, entry = self.multiply.find(), config.entry
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
        return found or None  # engines take an empty table for none

    def taken(self, sizes: BlockScaleGemmSizes, m: int) -> EngineEntry:
        own = self.table(sizes)
        return RULES[self.engine].gemm_default if own is None else own[nearest_of(own, m)]

    def file(self, sizes: BlockScaleGemmSizes) -> str:
        device = str(self.device.bind()()).replace(" ", "_")
        return file_name(f"N={sizes.n},K={sizes.k}", device, RULES[self.engine].block)
