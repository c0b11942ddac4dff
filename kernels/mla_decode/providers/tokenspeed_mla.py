"""TokenSpeed's kernel for MLA decode in the CuTe DSL, on an FP8 cache on Blackwell.

Sources: tokenspeed_mla/mla_decode.py and mla_decode_fp8.py of tokenspeed-mla 2.0.4, with how
v1/attention/backends/mla/tokenspeed_mla.py of vLLM 0.33 calls it. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.mla_decode.compute_units import MOST_UNITS
from kernels.mla_decode.layouts import (
    FiniteCache,
    OneToken,
    cache_bytes,
    full_pages,
    one_token,
    pages_of,
    query_buffer,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, WIDTH, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, Vendor

if TYPE_CHECKING:
    import torch

PAGES = (32, 64)
"""That vLLM gives it."""

MOST_HEADS = 128

QUERIES = 8
"""Query tokens of a request that vLLM has room for in the workspace."""

DECODE = Function(
    "tokenspeed_mla.tokenspeed_mla_decode",
    needs="query kv_cache workspace_buffer kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len "
    "softmax_scale output_scale",
    wishes="enable_pdl causal_mask",
)
UNITS = Function("tokenspeed_mla.get_num_sm", positions=1)


class TokenspeedMlaDecode(Vendor):
    """vLLM's choice where it is asked for. The call rounds q to FP8 first, which vLLM fuses into the kernel
    before. It gets a cache without NaN."""

    name = "tokenspeed_mla"
    library = "tokenspeed_mla"
    requires = "tokenspeed-mla (read at 2.0.4), an FP8 cache, sm_100 or sm_103"
    runtime = "tokenspeed_mla"
    install = "pip install tokenspeed-mla"
    kinds = ("cuda",)
    archs = BLACKWELL
    activations = "fp8"
    allocates = True
    symbols = (DECODE, UNITS)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.kv == "fp8", f"takes an FP8 cache, not {sizes.kv}"),
            need(sizes.heads <= MOST_HEADS, f"takes up to {MOST_HEADS} heads, not {sizes.heads}"),
            need(sizes.page % PAGES[0] == 0, f"needs a page that is a multiple of {PAGES[0]}"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        partial = MOST_UNITS * sizes.heads * QUERIES * (LATENT + 1) * 4
        return partial + cache_bytes(sizes) + sizes.batch * sizes.heads * WIDTH

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _TokenspeedMlaDecode(operands)


class _TokenspeedMlaDecode(OneToken, FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        import torch

        super().__init__(operands, None)
        device, heads = operands.q.device, operands.q.shape[1]
        page = PAGES[1] if operands.page % PAGES[1] == 0 else PAGES[0]
        self.query = query_buffer(operands)
        room = UNITS.bind(device)() * heads * QUERIES * (LATENT + 1) * 4
        self.decode = DECODE.bind(
            query=one_token(self.query),
            kv_cache=pages_of(self.kv, page),
            workspace_buffer=torch.empty(room, dtype=torch.int8, device=device),
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            block_tables=full_pages(operands, page, tokens=operands.sizes.model_len),
            seq_lens=operands.lengths,
            max_seq_len=operands.sizes.model_len,
            softmax_scale=operands.scale * operands.kv_scale,
            output_scale=operands.kv_scale,
            enable_pdl=False,
            causal_mask=True,
        )

    def call(self) -> None:
        self.query.copy_(self.operands.q)
        self.answer = self.decode()
