"""TokenSpeed's kernel for MLA decode in the CuTe DSL, on an FP8 cache on Blackwell.

Sources: tokenspeed_mla/mla_decode.py and mla_decode_fp8.py of tokenspeed-mla 2.0.4, with how
v1/attention/backends/mla/tokenspeed_mla.py of vLLM 0.33 calls it. Untested on hardware."""

from __future__ import annotations

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import WIDTH, MlaDecodeOperands, takes
from kernels.op import Prepared, implementation
from kernels.vendor import BLACKWELL, Vendor

QUERIES = 8  # query tokens of a request for which vLLM's workspace has room
DECODE = Function(
    "tokenspeed_mla.tokenspeed_mla_decode",
    needs="query kv_cache workspace_buffer kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len "
    "softmax_scale output_scale",
    wishes="enable_pdl causal_mask",
)
UNITS = Function("tokenspeed_mla.get_num_sm", positions=1)


@implementation(
    "tokenspeed_mla",
    Vendor,
    library="tokenspeed_mla",
    requires="tokenspeed-mla (read at 2.0.4), an FP8 cache, sm_100 or sm_103",
    runtime="tokenspeed_mla",
    kinds=("cuda",),
    archs=BLACKWELL,
    activations="fp8",
    allocates=True,
    symbols=(DECODE, UNITS),
    fits=takes("fp8", most_heads=128, page_multiple_of=32, most_q=QUERIES),
    # Partial results; the copy of the cache; q in FP8.
    workspace=lambda sizes: (
        layouts.partial_bytes(layouts.MOST_UNITS * sizes.heads * QUERIES)
        + layouts.cache_bytes(sizes)
        + sizes.rows * WIDTH
    ),
)
def decode(o: MlaDecodeOperands, out: None) -> Prepared:
    """vLLM runs it where a user asks for it. It gets a cache without NaN."""
    cache, query = layouts.FiniteCache(o), layouts.query_buffer(o)
    device, heads = o.q.device, o.heads
    page = 64 if o.page % 64 == 0 else 32  # the sizes of pages that vLLM gives it
    room = layouts.partial_bytes(UNITS.bind(device)() * heads * QUERIES)
    call = layouts.bound(
        DECODE,
        o,
        query=query,
        kv_cache=cache.kv.view(-1, page, WIDTH),
        workspace_buffer=torch.empty(room, dtype=torch.int8, device=device),
        block_tables=layouts.finite_table(o, page, min_tokens=o.sizes.model_len),
        softmax_scale=o.scale * o.kv_scale,
        output_scale=o.kv_scale,
        enable_pdl=False,
        causal_mask=True,
    )
    return cache.prepared(None, layouts.rounding_q(o, query, call))
