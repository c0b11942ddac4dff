"""FlashInfer's MLA decode: its own kernels for Ampere and Hopper; for Blackwell CUTLASS's, TensorRT-LLM's and
those in the CuTe DSL.

Sources: flashinfer/mla/_core.py and csrc/cutlass_mla.cu of flashinfer 0.6.18; in its
include/flashinfer/attention mla.cuh and mla_hopper.cuh (which fill rows past the end with zeros) and
cutlass_mla.cuh; the Python of its tags v0.2.2 to v0.6.17 and of 0.7.2.post1; for how engines call it
v1/attention/backends/mla/flashinfer_mla.py and model_executor/warmup/kernel_warmup.py of vLLM 0.33, and
srt/layers/attention/trtllm_mla_backend.py of SGLang 0.5.23. Of these, fa2 and fa3 ran on an H200 (0.6.16)."""

from __future__ import annotations

from typing import Any, ClassVar

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, SINCE_AMPERE, FlashInfer
from shapes.case import MOST_QUERIES, Case

WORKSPACE = 128 << 20  # bytes that the wrappers ask for
PLAN_BYTES = 8 << 20  # what the wrapper allocates for its plan
TILE = 128  # tokens that the Blackwell kernels take at a time: their tables are padded to whole tiles
WRAPPER = Function("flashinfer.mla.BatchMLAPagedAttentionWrapper", positions=1, needs="backend")
PLAN = Function(
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan",
    needs="qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal "
    "sm_scale q_data_type kv_data_type",
)
INPUTS = "q_nope q_pe ckv_cache kpe_cache out"
RUN = Function("flashinfer.mla.BatchMLAPagedAttentionWrapper.run", needs=INPUTS, wishes="ckv_scale kpe_scale")
RUN_CUTLASS = Function(
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.run", needs=f"{INPUTS} kv_len page_table"
)
DECODE = Function(
    "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla",
    needs="query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables "
    "seq_lens max_seq_len bmm1_scale bmm2_scale backend",
    wishes="multi_ctas_kv_counter_buffer cum_seq_lens_q max_q_len",
)
COUNTER_BYTES = Function("flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes", positions=3)
# One of the two must exist: COUNTER_BYTES, or before 0.6.15, where DECODE takes no counters, DECODE alone.
COUNTER = (COUNTER_BYTES, DECODE)
AUTOTUNE = Function("flashinfer.autotune", "flashinfer.autotuner.autotune", needs="tune_mode")


class Fa2(FlashInfer):
    """`BatchMLAPagedAttentionWrapper`, planned before timing. It takes an FP8 cache on Hopper only, and
    dequantises that to bf16 before the products."""

    name = "flashinfer.fa2"
    since = "0.2.2"
    archs: ClassVar[tuple[str, ...]] = SINCE_AMPERE
    requires = "flashinfer 0.2.2 or later, sm_80 or later (FP8 cache: 0.6.14 or later, sm_90)"
    symbols = (WRAPPER, PLAN, RUN)

    def supports(self, case: Case, platform: Platform) -> Support:
        cache_fits = case.sizes.get("kv") != "fp8" or platform.arch == "sm_90"
        return Support.all_of(
            super().supports(case, platform),
            need(cache_fits, f"takes an FP8 cache on sm_90, not on {platform.arch}"),
        )

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.used_pages * 4

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + PLAN_BYTES

    def prepare(self, o: MlaDecodeOperands, out: torch.Tensor) -> Call:
        if o.is_fp8 and not RUN.takes("ckv_scale"):
            raise Unsupported(f"{RUN.release} takes no FP8 cache, as 0.6.14 does")
        wrapper = WRAPPER.bind(workspace(o), backend=self.name.removeprefix("flashinfer."))()
        lists = {"kv_indptr": layouts.page_starts(o, o.page), "kv_indices": layouts.page_list(o, o.page)}
        layouts.bound(PLAN, o, method_of=wrapper, **lists)()
        scales = {"ckv_scale": o.kv_scale, "kpe_scale": o.kv_scale} if o.is_fp8 else {}
        return RUN.bind(method_of=wrapper, **in_parts(o.packed, o.kv), out=out.flatten(0, 1), **scales)


class Fa3(Fa2):
    name = "flashinfer.fa3"
    since = "0.2.3"
    archs = ("sm_90",)
    requires = "flashinfer 0.2.3 or later, sm_90 (FP8 cache: 0.6.14 or later)"


@implementation(
    "flashinfer.cutlass",
    FlashInfer,
    since="0.2.6",
    archs=BLACKWELL,
    requires="flashinfer 0.2.6 or later, sm_100 or sm_103, 128 heads",
    symbols=(WRAPPER, RUN_CUTLASS),
    fits=lambda sizes: Support.all_of(
        need(sizes.heads == 128, f"takes 128 heads, not {sizes.heads}"),
        takes("bf16", page_divides=TILE, why_most_q="no engine calls it with more")(sizes),
    ),
    workspace=lambda sizes: WORKSPACE + 2 * layouts.cache_bytes(sizes),
)
def cutlass(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """CUTLASS's kernel through the same wrapper, without a plan. Up to 0.6.18 its call first joins the two
    parts of q and of the whole cache in new memory, which is in the measured time; 0.7 uses neighbouring
    parts in place. The softmax scale is built in. No engine runs it: vLLM has the kernel itself."""
    cache = layouts.FiniteCache(o)
    run = RUN_CUTLASS.bind(
        method_of=WRAPPER.bind(workspace(o), backend="cutlass")(),
        **in_parts(o.packed, cache.kv),
        out=out[:, 0],
        kv_len=o.lengths,
        page_table=layouts.finite_table(o, o.page, TILE // o.page),
    )
    return cache.prepared(out, run)


def in_parts(q: torch.Tensor, kv: torch.Tensor) -> dict[str, torch.Tensor]:
    q_nope, q_pe = layouts.latent_and_rope(q)
    ckv, kpe = layouts.latent_and_rope(kv)
    return {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe}


class BatchMla(FlashInfer):
    """`trtllm_batch_decode_with_kv_cache_mla`. How many work groups share a sequence follows from the
    server's context length, for which engines record the call."""

    archs = BLACKWELL
    activations = "fp8"
    allocates = True  # versions differ in the shape of the output that they take

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return takes(page_multiple_of=32, most_q=MOST_QUERIES)(sizes)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + layouts.cache_bytes(sizes) + sizes.rows * WIDTH


@implementation(
    "flashinfer.trtllm",
    BatchMla,
    since="0.6.0",
    requires="flashinfer 0.6.0 or later, sm_100 or sm_103",
    symbols=(DECODE, COUNTER),
    fits=lambda sizes: need(
        sizes.heads <= 64 or sizes.heads == 128, f"takes up to 64 heads, or 128, not {sizes.heads}"
    ),
)
def trtllm(operands: MlaDecodeOperands, out: None) -> Prepared:
    """TensorRT-LLM's kernels, which come compiled: SGLang's choice on Blackwell. They are not known to mask
    values, so they get a cache without NaN. As engines do, the row keeps the counters by which the work
    groups of a sequence meet (0.6.15 or later): else FlashInfer would make and zero some in each call."""
    return batch_decode(operands, "trtllm-gen")


CUTE_DSL = "flashinfer 0.6.13 or later with nvidia-cutlass-dsl, sm_100 or sm_103"


@implementation(
    "flashinfer.cute_dsl",
    BatchMla,
    since="0.6.13",
    requires=CUTE_DSL,
    symbols=(DECODE,),
    fits=takes(most_heads=128, most_q=MOST_QUERIES),
)
def cute_dsl(operands: MlaDecodeOperands, out: None) -> Prepared:
    """FlashInfer's kernels in the CuTe DSL: vLLM's choice where it does not trust TensorRT-LLM's, and the
    backend cutedsl_mla of SGLang. They load whole pages, so they get a cache without NaN."""
    return batch_decode(operands, "cute-dsl")


@implementation(
    "flashinfer.auto",
    BatchMla,
    since="0.6.13",
    requires=CUTE_DSL,
    symbols=(DECODE, COUNTER, AUTOTUNE),
    fits=takes(most_heads=128, most_q=MOST_QUERIES),
    # With q and outputs of the autotuner's batches, of up to 8192 sequences (_TRTLLM_GEN_MLA_MAX_BATCH).
    workspace=lambda sizes: BatchMla().workspace(sizes) + 8192 * sizes.q * sizes.heads * 2 * (WIDTH + LATENT),
)
def auto(operands: MlaDecodeOperands, out: None) -> Prepared:
    """vLLM's choice on Blackwell, which leaves the kernel to FlashInfer: TensorRT-LLM's or the CuTe DSL's,
    whichever FlashInfer's autotuner measures to be faster. It tunes before timing, as in vLLM at the start of
    the server.

    vLLM gives several query tokens of a sequence packed, where FlashInfer takes that (cum_seq_lens_q).
    FlashInfer does not tune such a call, and takes TensorRT-LLM's kernels wherever it can."""
    trusted = trusts_trtllm(operands.heads)
    # Until 0.6.15 the CuTe DSL's kernels refuse packed query tokens.
    packed = operands.sizes.q > 1 and trusted and DECODE.takes("cum_seq_lens_q")
    prepared = batch_decode(operands, "auto" if trusted else "cute-dsl", packed)
    with AUTOTUNE.bind(tune_mode=True)():
        prepared.call()
    return prepared


def batch_decode(o: MlaDecodeOperands, backend: str, packed: bool = False) -> Prepared:
    """The call of DECODE with a backend. packed: it gets q packed, and where each sequence begins in that"""
    cache, query = layouts.FiniteCache(o), layouts.query_buffer(o)
    page = 64 if o.page % 64 == 0 else 32
    further: dict[str, Any] = {}
    if packed:
        further |= {"cum_seq_lens_q": layouts.query_starts(o), "max_q_len": o.sizes.q}
    if backend != "cute-dsl" and DECODE.takes("multi_ctas_kv_counter_buffer"):
        size = COUNTER_BYTES.bind(len(o.q), o.heads, layouts.compute_units(o.q.device))()
        # Each launch leaves the counters at zero, as it found them.
        further["multi_ctas_kv_counter_buffer"] = torch.zeros(size, dtype=torch.uint8, device=o.q.device)
    decode = layouts.bound(
        DECODE,
        o,
        query=query.flatten(0, 1) if packed else query,
        kv_cache=cache.kv.view(-1, 1, page, WIDTH),
        workspace_buffer=workspace(o),
        qk_nope_head_dim=128,  # of a head's query before absorption
        block_tables=layouts.finite_table(o, page, TILE // page, min_tokens=o.sizes.model_len),
        bmm1_scale=o.scale * o.kv_scale,  # of q . kv; q in FP8 has the scale 1, as in engines
        bmm2_scale=o.kv_scale,  # of weights . kv
        backend=backend,
        **further,
    )
    shape = (*o.q.shape[:3], LATENT)
    return cache.prepared(None, layouts.rounding_q(o, query, decode), lambda returned: returned.view(shape))


def trusts_trtllm(heads: int) -> bool:
    """Whether vLLM trusts TensorRT-LLM's kernels with so many heads: if these fit into one tile or fill whole
    tiles (_trtllm_gen_mla_decode_supports_num_heads)."""
    tile = 16 if heads <= 32 else 64
    return heads < tile or heads % tile == 0


def workspace(operands: MlaDecodeOperands) -> torch.Tensor:
    """Scratch memory of the kernels: zeros, because semaphores lie in it, and int8 for the CuTe DSL."""
    return torch.zeros(WORKSPACE, dtype=torch.int8, device=operands.q.device)
