"""FlashInfer's MLA decode: its own kernels for Ampere and Hopper, CUTLASS's, TensorRT-LLM's and those in the
CuTe DSL for Blackwell.

Sources: flashinfer/mla/_core.py and csrc/cutlass_mla.cu of flashinfer 0.6.18, mla.cuh, mla_hopper.cuh (which
fill rows past the end with zeros) and cutlass_mla.cuh in its include/flashinfer/attention; the Python of its
tags v0.2.2 to v0.6.17 and of 0.7.2.post1; for how engines call it v1/attention/backends/mla/flashinfer_mla.py
and model_executor/warmup/kernel_warmup.py of vLLM 0.33 and srt/layers/attention/trtllm_mla_backend.py of
SGLang 0.5.23. fa2 and fa3 ran on an H200 (0.6.16); others are untested on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kernels.binding import Function, Taken
from kernels.mla_decode.compute_units import compute_units
from kernels.mla_decode.layouts import (
    FiniteCache,
    cache_bytes,
    full_pages,
    one_token,
    page_list,
    page_starts,
    pages_of,
    parts,
    query_buffer,
    query_starts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, WIDTH, MlaDecodeSizes
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.platform import Platform, version
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, SINCE_AMPERE, FlashInfer
from shapes.case import Case

if TYPE_CHECKING:
    import torch

WORKSPACE = 128 << 20
"""Bytes that the wrappers ask for."""

TILE = 128
"""Tokens that the Blackwell kernels take at a time: their tables are padded to whole tiles."""

NOPE = 128
"""Width of a head's query before absorption, without the rope part."""

MOST_TUNED = 8192
"""Sequences of the largest batch that the autotuner tries (_TRTLLM_GEN_MLA_MAX_BATCH)."""

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
    wishes="multi_ctas_kv_counter_buffer",
)
COUNTER_BYTES = Function("flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes", positions=3)
COUNTER = (COUNTER_BYTES, DECODE)
"""Where a call takes no counters yet, before 0.6.15, nobody asks for their size."""

AUTOTUNE = Function("flashinfer.autotune", "flashinfer.autotuner.autotune", needs="tune_mode")


class Planned(FlashInfer):
    """`BatchMLAPagedAttentionWrapper`, planned before timing. An FP8 cache is dequantised on the way, on
    Hopper only: products are of bf16."""

    symbols: ClassVar[Sequence[Taken]] = (WRAPPER, PLAN, RUN)

    def supports(self, case: Case, platform: Platform) -> Support:
        return Support.all_of(
            super().supports(case, platform),
            need(
                case.sizes.get("kv") != "fp8" or platform.arch == "sm_90",
                f"takes an FP8 cache on sm_90, not on {platform.arch}",
            ),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + (8 << 20)

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.used_pages * 4


@implementation(
    "flashinfer.fa2",
    Planned,
    since="0.2.2",
    archs=SINCE_AMPERE,
    requires="flashinfer 0.2.2 or later, sm_80 or later (FP8 cache: 0.6.14 or later, sm_90)",
)
def fa2(operands: MlaDecodeOperands, out: torch.Tensor) -> Call:
    return planned(operands, out, "fa2")


@implementation(
    "flashinfer.fa3",
    Planned,
    since="0.2.3",
    archs=("sm_90",),
    requires="flashinfer 0.2.3 or later, sm_90 (FP8 cache: 0.6.14 or later)",
)
def fa3(operands: MlaDecodeOperands, out: torch.Tensor) -> Call:
    return planned(operands, out, "fa3")


def planned(operands: MlaDecodeOperands, out: torch.Tensor, backend: str) -> Call:
    if operands.kv.element_size() == 1 and not RUN.takes("ckv_scale"):
        raise Unsupported(f"flashinfer {version('flashinfer')} takes no FP8 cache, as 0.6.14 does")
    wrapper = WRAPPER.bind(workspace(operands), backend=backend)()
    PLAN.bind(of=wrapper, **plan(operands))()
    q_nope, q_pe = parts(operands.q)
    ckv, kpe = parts(operands.kv)
    return RUN.bind(
        of=wrapper, q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, out=out, **scales(operands)
    )


class CutlassMlaDecode(FlashInfer):
    """CUTLASS's kernel through the same wrapper, without a plan. Up to 0.6.18 its call first joins the two
    parts of q and of the whole cache in new memory, which is in its time; 0.7 takes them where they are
    neighbours. The softmax scale is built in. No engine runs it: vLLM has the kernel itself."""

    name = "flashinfer.cutlass"
    requires = "flashinfer 0.2.6 or later, sm_100 or sm_103, 128 heads"
    since = "0.2.6"
    symbols = (WRAPPER, RUN_CUTLASS)
    archs = BLACKWELL

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.heads == 128, f"takes 128 heads, not {sizes.heads}"),
            need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}"),
            need(TILE % sizes.page == 0, f"needs a page that divides {TILE}"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + 2 * cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _CutlassMlaDecode(operands, out)


class _CutlassMlaDecode(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        q_nope, q_pe = parts(operands.q)
        ckv, kpe = parts(self.kv)
        self.run = RUN_CUTLASS.bind(
            of=WRAPPER.bind(workspace(operands), backend="cutlass")(),
            q_nope=q_nope,
            q_pe=q_pe,
            ckv_cache=ckv,
            kpe_cache=kpe,
            out=out,
            kv_len=operands.lengths,
            page_table=full_pages(operands, operands.page, TILE // operands.page),
        )

    def call(self) -> None:
        self.run()


class TrtLlmMlaDecode(FlashInfer):
    """TensorRT-LLM's kernels, which come compiled: SGLang's choice on Blackwell. They are not known to mask
    values, so that they get a cache without NaN. On an FP8 cache the call rounds q to FP8 first, which
    engines fuse into the kernel before. As engines do, it keeps the counters by which work groups find each
    other, where FlashInfer takes them (0.6.15): it would make and zero them in each call. How many work
    groups share a sequence follows from the server's context length, for which engines record the call."""

    name = "flashinfer.trtllm"
    requires = "flashinfer 0.6.0 or later, sm_100 or sm_103"
    since = "0.6.0"
    symbols: ClassVar[Sequence[Taken]] = (DECODE, COUNTER)
    archs = BLACKWELL
    activations = "fp8"
    allocates = True  # versions differ in the shape of the output that they take

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.heads <= 64 or sizes.heads == 128, f"takes up to 64 heads, or 128, not {sizes.heads}"),
            need(sizes.page % 32 == 0, "needs a page that is a multiple of 32"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + cache_bytes(sizes) + sizes.batch * sizes.heads * (LATENT + ROPE)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _PagedMlaDecode(operands, "trtllm-gen")


class CuteDslMlaDecode(TrtLlmMlaDecode):
    """FlashInfer's kernels in the CuTe DSL: what vLLM runs where TensorRT-LLM's may not take the heads, and
    SGLang as cutedsl_mla. It loads whole pages, so that it gets a cache without NaN."""

    name = "flashinfer.cute_dsl"
    requires = "flashinfer 0.6.13 or later with nvidia-cutlass-dsl, sm_100 or sm_103"
    since = "0.6.13"
    symbols: ClassVar[Sequence[Taken]] = (DECODE,)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.heads <= 128, f"takes up to 128 heads, not {sizes.heads}"),
            need(sizes.page % 32 == 0, "needs a page that is a multiple of 32"),
        )

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _PagedMlaDecode(operands, "cute-dsl")


class AutoMlaDecode(CuteDslMlaDecode):
    """vLLM's choice on Blackwell, which leaves the kernel to FlashInfer: TensorRT-LLM's or the CuTe DSL's,
    whichever its autotuner measures to be faster, before timing as vLLM does when it starts."""

    name = "flashinfer.auto"
    symbols = (DECODE, COUNTER, AUTOTUNE)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Also q and outputs of the batches that the autotuner tries."""
        return super().workspace(sizes) + MOST_TUNED * sizes.heads * 2 * (WIDTH + LATENT)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        is_tiled = tiles_heads(operands.q.shape[1])
        prepared = _PagedMlaDecode(operands, "auto" if is_tiled else "cute-dsl")
        with AUTOTUNE.bind(tune_mode=True)():
            prepared.call()
        return prepared


class _PagedMlaDecode(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, backend: str) -> None:
        super().__init__(operands, None)
        page, model_len = 64 if operands.page % 64 == 0 else 32, operands.sizes.model_len
        self.query = query_buffer(operands)
        of_scores, of_values = product_scales(operands)
        has_counters = backend != "cute-dsl" and DECODE.takes("multi_ctas_kv_counter_buffer")
        self.decode = DECODE.bind(
            query=one_token(self.query),
            kv_cache=pages_of(self.kv, page)[:, None],
            workspace_buffer=workspace(operands),
            qk_nope_head_dim=NOPE,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            block_tables=full_pages(operands, page, TILE // page, tokens=model_len),
            seq_lens=operands.lengths,
            max_seq_len=model_len,
            bmm1_scale=of_scores,
            bmm2_scale=of_values,
            backend=backend,
            **({"multi_ctas_kv_counter_buffer": counters(operands)} if has_counters else {}),
        )
        self.answer: torch.Tensor | None = None

    def call(self) -> None:
        if self.query is not self.operands.q:
            self.query.copy_(self.operands.q)
        self.answer = self.decode()

    def result(self) -> torch.Tensor:
        assert self.answer is not None, "nothing was called"
        return self.answer.view(*self.operands.q.shape[:2], LATENT)


def tiles_heads(heads: int) -> bool:
    """Whether vLLM trusts TensorRT-LLM's kernels with so many (_trtllm_gen_mla_decode_supports_num_heads)."""
    return heads % min(heads, 16 if heads <= 32 else 64) == 0


def counters(operands: MlaDecodeOperands) -> torch.Tensor:
    """uint8, zeros: each launch leaves them as it found them."""
    import torch

    batch, heads = operands.q.shape[:2]
    device = operands.q.device
    size = COUNTER_BYTES.bind(batch, heads, compute_units(device))()
    return torch.zeros(size, dtype=torch.uint8, device=device)


def workspace(operands: MlaDecodeOperands) -> torch.Tensor:
    """Zeros, because semaphores lie in it, and int8, which the CuTe DSL wants."""
    import torch

    return torch.zeros(WORKSPACE, dtype=torch.int8, device=operands.q.device)


def plan(operands: MlaDecodeOperands) -> dict[str, object]:
    return {
        "qo_indptr": query_starts(operands),
        "kv_indptr": page_starts(operands, operands.page),
        "kv_indices": page_list(operands, operands.page),
        "kv_len_arr": operands.lengths,
        "num_heads": operands.q.shape[1],
        "head_dim_ckv": LATENT,
        "head_dim_kpe": ROPE,
        "page_size": operands.page,
        "causal": False,
        "sm_scale": operands.scale,
        "q_data_type": operands.q.dtype,
        "kv_data_type": operands.kv.dtype,
    }


def scales(operands: MlaDecodeOperands) -> dict[str, object]:
    """Of both parts of an FP8 cache."""
    if operands.kv.element_size() > 1:
        return {}
    return {"ckv_scale": operands.kv_scale, "kpe_scale": operands.kv_scale}


def product_scales(operands: MlaDecodeOperands) -> tuple[float, float]:
    """Of q . kv before softmax, and of weights . kv after it; q in FP8 has the scale 1, as in engines."""
    return operands.scale * operands.kv_scale, operands.kv_scale
