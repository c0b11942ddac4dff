"""CUTLASS's kernel for MLA decode on Blackwell, as vLLM builds and calls it.

Sources: sm100_cutlass_mla_decode in _custom_ops.py of vLLM 0.33, with how its
v1/attention/backends/mla/cutlass_mla.py calls it. It takes no scales, so that an FP8 cache would need scales
of 1. Untested on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.mla_decode.compute_units import compute_units
from kernels.mla_decode.layouts import FiniteCache, cache_bytes, full_pages, parts
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, Vllm

if TYPE_CHECKING:
    import torch

HEADS = 128
"""Its output has so many, and vLLM pads the query to them."""

TILE = 128
"""Tokens that it takes at a time: tables are padded to whole tiles."""

SPLITS = -1
"""It chooses them."""

WORKSPACE = 128 << 20
"""Bytes that vLLM begins with."""

DECODE = Function("vllm._custom_ops.sm100_cutlass_mla_decode", positions=10)
WORKSPACE_SIZE = Function(
    "vllm._custom_ops.sm100_cutlass_mla_get_workspace_size", positions=3, needs="num_kv_splits"
)


class CutlassMlaOfVllm(Vllm):
    """The first of vLLM's choices on Blackwell before FlashInfer's. It gets a cache without NaN."""

    name = "vllm.cutlass_mla"
    requires = "vLLM for CUDA (read at 0.33), sm_100 or sm_103"
    kinds = ("cuda",)
    archs = BLACKWELL
    symbols = (DECODE, WORKSPACE_SIZE)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}"),
            need(sizes.heads <= HEADS, f"takes up to {HEADS} heads, not {sizes.heads}"),
            need(TILE % sizes.page == 0, f"needs a page that divides {TILE}"),
        )

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.batch * math.ceil(sizes.model_len / sizes.page) * 4

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        padded = sizes.batch * HEADS * 2 * (WIDTH + LATENT)
        return WORKSPACE + cache_bytes(sizes) + padded

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _CutlassMlaOfVllm(operands, out)


class _CutlassMlaOfVllm(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        import torch

        super().__init__(operands, out)
        batch, heads = operands.q.shape[:2]
        self.query = operands.q.new_zeros(batch, HEADS, WIDTH)
        self.padded = out if heads == HEADS else out.new_empty(batch, HEADS, LATENT)
        of_device = WORKSPACE_SIZE.bind(TILE, batch, compute_units(out.device), num_kv_splits=SPLITS)()
        room = torch.empty(max(WORKSPACE, of_device), dtype=torch.uint8, device=out.device)
        nope, rope = parts(self.query)
        # It splits a single sequence by the width of the table (set_split_kv in sm100_mla.hpp).
        table = full_pages(operands, operands.page, TILE // operands.page, tokens=operands.sizes.model_len)
        unwanted_lse = torch.empty(0, device=out.device)
        self.decode = DECODE.bind(
            self.padded,
            unwanted_lse,
            nope,
            rope,
            self.kv,
            operands.lengths,
            table,
            room,
            operands.scale,
            SPLITS,
        )
        self.load(operands.live_tensors())

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"q": self.query[:, : self.operands.q.shape[1]], "kv": self.kv}

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        if hasattr(self, "query"):  # not yet, where the cache is made
            super().load(live)

    def call(self) -> None:
        self.decode()

    def result(self) -> torch.Tensor:
        return self.padded[:, : self.operands.q.shape[1]]
