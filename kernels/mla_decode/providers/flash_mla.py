"""DeepSeek's FlashMLA, dense decode on Hopper, by itself and as vLLM ships it.

Sources: flash_mla/flash_mla_interface.py and csrc/api/dense_decode.h of deepseek-ai/FlashMLA at 9241ae3
(2026-04), and at 01a2772 (2025-04) and 42f3c57 (2025-09), when a call of its own made the metadata;
flash_mla/flash_mla_interface.py of sgl-flash-mla 1.0.0, which SGLang 0.5.23 requires, with how its
kernels/ops/attention/flash_mla_interface.py calls it; third_party/flashmla/flash_mla_interface.py and
v1/attention/ops/flashmla.py of vLLM 0.33, with how its v1/attention/backends/mla/flashmla.py calls them.
FlashMLA's version is always 1.0.0: only its functions tell one from another. It fills values past the end
with zeros itself (fill_oob_V in csrc/sm90/decode/dense/splitkv_mla.cuh). `flashmla` ran on an H100 and an
H200; as vLLM ships it, it is untested on hardware."""

from __future__ import annotations

from typing import Any

from kernels.binding import Function
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import WIDTH, MlaDecodeOperands, takes
from kernels.op import Prepared, Unsupported, implementation
from kernels.vendor import Vendor, Vllm
from shapes.case import MOST_QUERIES

PAGE = 64
ARGUMENTS = (
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal"
)
SCALES = "descale_q descale_k"
# sgl-flash-mla keeps dense decode as a kernel of before 2026-09, which runs only if the call says so.
DECODE = Function(
    "flash_mla.flash_mla_with_kvcache", needs=ARGUMENTS, wishes=f"use_legacy is_fp8_kvcache {SCALES}"
)
METADATA = Function("flash_mla.get_mla_metadata", positions=3)
METADATA_FP8 = Function(
    "flash_mla.get_mla_decoding_metadata",
    positions=3,
    needs="is_fp8_kvcache use_legacy",
    when="kv=fp8, with sgl-flash-mla",
)
VLLM = "vllm.third_party.flashmla.flash_mla_interface"
VLLM_OPS = "vllm.v1.attention.ops.flashmla"
VLLM_DECODE = Function(f"{VLLM}.flash_mla_with_kvcache", needs=ARGUMENTS)
VLLM_DECODE_FP8 = Function(
    f"{VLLM_OPS}.flash_mla_with_kvcache_fp8", needs=f"{ARGUMENTS} {SCALES}", when="kv=fp8"
)
VLLM_METADATA = Function(f"{VLLM}.get_mla_metadata", positions=3)
VLLM_METADATA_FP8 = Function(f"{VLLM_OPS}.get_mla_metadata_dense_fp8", positions=3, when="kv=fp8")
# What both rows declare.
DENSE: dict[str, Any] = {
    "kinds": ("cuda",),
    "archs": ("sm_90",),
    "activations": "fp8",
    "allocates": True,
    "fits": takes(page_multiple_of=PAGE, most_q=MOST_QUERIES),
    # Partial results of all parts; the page table; q in FP8.
    "workspace": lambda sizes: (
        layouts.partial_bytes((sizes.batch + layouts.HOPPER_UNITS) * sizes.q * sizes.heads)
        + sizes.batch * max(sizes.lengths()) // PAGE * 4
        + sizes.rows * WIDTH
    ),
}


@implementation(
    "flashmla",
    Vendor,
    library="flash_mla",
    requires="FlashMLA (from source, 2025-04 or later) or sgl-flash-mla, which an FP8 cache needs; sm_90",
    runtime="flash_mla",
    symbols=(DECODE, METADATA),
    **DENSE,
)
def flashmla(o: MlaDecodeOperands, out: None) -> Prepared:
    """What SGLang runs too. Only sgl-flash-mla, which SGLang requires, takes an FP8 cache.

    `get_mla_metadata` returns a schedule and the splits. Since 2026-01 the splits are None, and the schedule
    is empty until the first call fills it, before timing. The arguments go by position: the name of the
    second one differs between the older versions, and the newer versions ignore all."""
    schedule, splits = METADATA.bind(o.lengths, o.sizes.q * o.heads, 1)()
    of_fp8 = {}
    if o.is_fp8:
        if not DECODE.takes("descale_k"):
            raise Unsupported("this flash_mla has no dense decode on an FP8 cache; sgl-flash-mla has")
        # The empty schedule gets what the function for FP8 returns.
        filled = METADATA_FP8.bind(o.lengths, o.sizes.q * o.heads, 1, is_fp8_kvcache=True, use_legacy=True)()
        schedule.tile_scheduler_metadata, schedule.num_splits = filled
        of_fp8 = {"is_fp8_kvcache": True}
    return decoding(o, DECODE, schedule, splits, **of_fp8, use_legacy=True)


@implementation(
    "flashmla@vllm",
    Vllm,
    requires="vLLM for CUDA (read at 0.33), sm_90",
    symbols=(VLLM_DECODE, VLLM_METADATA, VLLM_DECODE_FP8, VLLM_METADATA_FP8),
    **DENSE,
)
def flashmla_of_vllm(o: MlaDecodeOperands, out: None) -> Prepared:
    """The build that vLLM carries, which has a function of its own for FP8."""
    metadata = VLLM_METADATA_FP8 if o.is_fp8 else VLLM_METADATA
    schedule, splits = metadata.bind(o.lengths, o.sizes.q * o.heads, 1)()
    return decoding(o, VLLM_DECODE_FP8 if o.is_fp8 else VLLM_DECODE, schedule, splits)


def decoding(
    o: MlaDecodeOperands, function: Function, schedule: object, splits: object, **further: Any
) -> Prepared:
    """The call of either build. schedule, splits: its metadata"""
    query = layouts.query_buffer(o)
    if o.is_fp8:
        # The scale of a query in FP8 is static, as in engines.
        further |= {"descale_q": o.scale_tensor(1.0), "descale_k": o.scale_tensor(o.kv_scale)}
    decode = layouts.bound(
        function,
        o,
        q=query,
        k_cache=o.kv.view(-1, PAGE, 1, WIDTH),
        block_table=layouts.finite_table(o, PAGE),
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        **further,
    )
    call = layouts.rounding_q(o, query, decode)
    return Prepared(o, None, call, result=lambda out_and_log_sums: out_and_log_sums[0])
