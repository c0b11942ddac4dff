"""FlashInfer's prefill over ragged keys: its wrapper by backend, and TensorRT-LLM's kernels beside it.

Read at 0.6.18 and 0.7.2.post1: flashinfer/prefill.py, flashinfer/utils.py, flashinfer/cudnn/prefill.py; at
0.6.18 tests/attention/{test_cudnn_prefill_deepseek,test_blackwell_fmha,test_trtllm_gen_attention_prefill}.py;
signatures at the tags from 0.2.0. Kernels are built by nvcc at the first use, or downloaded. Over a cached
prefix vLLM attends to chunks without a mask and merges them (run_prefill_context_chunk in
v1/attention/backends/mla/prefill/{flashinfer,trtllm_ragged}.py of vLLM 0.33). fa2, fa3 and
cuDNN ran on an H200 (0.6.16); others are untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import Function
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

WORKSPACE = 384 << 20  # of partial results, as vLLM gives it (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)
PLAN_BYTES = 8 << 20  # that the wrapper allocates for its plan

WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"
PLACES = (f"flashinfer.{WRAPPER}", f"flashinfer.prefill.{WRAPPER}")
SIZES = "num_qo_heads num_kv_heads head_dim_qk head_dim_vo causal sm_scale q_data_type kv_data_type"


def method(name: str, needs: str = "", wishes: str = "") -> Function:
    """Of the wrapper."""
    return Function(*(f"{place}.{name}" for place in PLACES), needs=needs, wishes=wishes)


MAKE = Function(*PLACES, needs="float_workspace_buffer kv_layout backend")
# An output unlike q, from 0.6.0 on, is wanted for FP8 alone.
PLAN = method("plan", needs=f"qo_indptr kv_indptr {SIZES}", wishes="o_data_type")
PLAN_FP8 = PLAN.needing("o_data_type", when="dtype=fp8")
PLAN_CUDNN = PLAN.needing(
    "v_indptr o_indptr seq_lens seq_lens_q max_token_per_sequence max_sequence_kv", when="flashinfer.cudnn"
)
RUN = method("run", needs="q k v out")
RUN_FP8 = RUN.needing("q_scale k_scale v_scale", when="dtype=fp8")
RUN_0_7_1 = method("run", wishes="lse_base")
"""What came together with offsets in tokens for cuDNN."""

TRTLLM = Function(
    "flashinfer.prefill.trtllm_ragged_attention_deepseek",
    "flashinfer.trtllm_ragged_attention_deepseek",
    needs="query key value out workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale "
    "o_sf_scale batch_size window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse",
    wishes="q_seq_lens_cpu kv_seq_lens_cpu skip_all_rows_active_check",
)
CUTE_DSL = TRTLLM.needing("backend", when="flashinfer.cute_dsl")


class FlashInferPrefill(vendor.FlashInfer):
    """A kernel of FlashInfer.

    dtypes: of q, k and v
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, *self.dtypes)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        return WORKSPACE + PLAN_BYTES


def begins(o: MhaPrefillOperands) -> dict[str, object]:
    """Where each sequence begins, in tokens."""
    return {"qo_indptr": o.cu_q, "kv_indptr": o.cu_k}


def sizes_of(o: MhaPrefillOperands) -> dict[str, object]:
    heads = o.q.shape[1]
    return {"num_qo_heads": heads, "num_kv_heads": heads, "head_dim_qk": WIDTH, "head_dim_vo": VALUE}


def scoring(o: MhaPrefillOperands) -> dict[str, object]:
    """Causal, aligned to the last key; a scale of q . k as they are meant."""
    return {"causal": True, "sm_scale": o.scale}


def scales(o: MhaPrefillOperands) -> dict[str, float]:
    """By which a stored q, k and v are to be multiplied."""
    if o.q_descale is None:
        return {}
    return {"q_scale": float(o.q_descale), "k_scale": float(o.k_descale), "v_scale": float(o.v_descale)}


class _Ragged(Prepared):
    """A wrapper of one backend, planned for the lengths."""

    plan = PLAN

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, backend: str) -> None:
        import torch

        super().__init__(operands, out)
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        wrapper = MAKE.bind(float_workspace_buffer=room, kv_layout="NHD", backend=backend)()
        o, dtype = operands, operands.q.dtype
        plan, run = (self.plan, RUN) if dtype == out.dtype else (PLAN_FP8, RUN_FP8)
        dtypes = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": out.dtype}
        plan.bind(of=wrapper, **sizes_of(o), **scoring(o), **dtypes, **self.lengths(o))()
        self.run = run.bind(of=wrapper, q=o.q, k=o.k, v=o.v, out=out, **scales(o))

    def lengths(self, o: MhaPrefillOperands) -> dict[str, object]:
        return begins(o)

    def call(self) -> None:
        self.run()


class FlashInferFa2Prefill(FlashInferPrefill):
    name = "flashinfer.fa2"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_80 or later"
    archs = vendor.SINCE_AMPERE
    symbols = (MAKE, PLAN, RUN)
    since = "0.2.3"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "fa2")


class FlashInferFa3Prefill(FlashInferPrefill):
    """FP8 it has for equal head sizes only (csrc/batch_prefill_fp8_sm90.cu)."""

    name = "flashinfer.fa3"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_90"
    archs = ("sm_90",)
    symbols = (MAKE, PLAN, RUN)
    since = "0.2.3"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "fa3")


class CutlassPrefill(FlashInferPrefill):
    """What vLLM's prefill backend FLASHINFER asks for (v1/attention/backends/mla/prefill/flashinfer.py of
    0.33)."""

    name = "flashinfer.cutlass"
    requires = "flashinfer-python 0.6.0 or later, CUDA sm_100 or sm_103"
    archs = vendor.BLACKWELL
    symbols = (MAKE, PLAN, RUN, PLAN_FP8, RUN_FP8)
    since = "0.6.0"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    activations = "fp8"

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Further 32 MiB of its own, and a plan of three tables (fmha_varlen and fmha_varlen_plan)."""
        return super().workspace(sizes) + (32 << 20) + 3 * 4 * 131072

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "cutlass")


def tokens(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """Where each sequence begins, in tokens, int32: of q, k, v and the output."""
    return {"qo_indptr": o.cu_q, "kv_indptr": o.cu_k, "v_indptr": o.cu_k, "o_indptr": o.cu_q}


def elements(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """The same in elements."""
    heads = o.q.shape[1]
    return {
        "qo_indptr": o.cu_q * (heads * WIDTH),
        "kv_indptr": o.cu_k * (heads * WIDTH),
        "v_indptr": o.cu_k * (heads * VALUE),
        "o_indptr": o.cu_q * (heads * VALUE),
    }


def sequence_lengths(o: MhaPrefillOperands) -> dict[str, object]:
    """int32 [batch, 1, 1, 1], and the longest."""
    most_new, longest = o.longest
    return {
        "seq_lens": o.cu_k.diff().view(-1, 1, 1, 1),
        "seq_lens_q": o.cu_q.diff().view(-1, 1, 1, 1),
        "max_token_per_sequence": most_new,
        "max_sequence_kv": longest,
    }


class _Cudnn(_Ragged):
    """Offsets are in tokens from 0.7.1 on, in elements before (`plan` of both says so)."""

    plan = PLAN_CUDNN

    def lengths(self, o: MhaPrefillOperands) -> dict[str, object]:
        offsets = tokens(o) if RUN_0_7_1.takes("lse_base") else elements(o)
        return {**offsets, **sequence_lengths(o)}


class FlashInferCudnnPrefill(FlashInferPrefill):
    """cuDNN's graph as FlashInfer builds it; the row `cudnn` is the same graph without that."""

    name = "flashinfer.cudnn"
    requires = "flashinfer-python 0.6.2 or later, nvidia-cudnn-frontend 1.13 or later, CUDA sm_90 or later"
    archs = ("sm_90", *vendor.BLACKWELL)
    symbols = (MAKE, PLAN_CUDNN, RUN)
    since = "0.6.2"
    also: ClassVar = {"cudnn": vendor.Cudnn.install}

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        most = max(sizes.queries, sizes.keys) * sizes.heads * WIDTH
        return Support.all_of(
            super().fits(sizes), need(most < 1 << 31, "its offsets in elements are int32: too many tokens")
        )

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Cudnn(operands, out, "cudnn")


class TrtLlmPrefill(FlashInferPrefill):
    """`trtllm_ragged_attention_deepseek`: TensorRT-LLM's kernels, downloaded as binaries."""

    name = "flashinfer.trtllm"
    requires = "flashinfer-python 0.2.14 or later, CUDA sm_100 or sm_103"
    archs = vendor.BLACKWELL
    symbols = (TRTLLM,)
    since = "0.2.14"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    activations = "fp8"
    backend: ClassVar[str] = ""

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _TrtLlmPrefill(operands, out, self.backend)


class CuteDsl(TrtLlmPrefill):
    """The same entry with FlashInfer's own kernels in CuTe. At this width they are of FP8: none is published
    for bf16, and one compiled would want 256 KiB of shared memory
    (flashinfer/attention/cute_dsl/fmha.py, flashinfer/cute_dsl/attention/fmha/fmha.py)."""

    name = "flashinfer.cute_dsl"
    requires = "flashinfer-python 0.6.10 or later, CUDA sm_100 or sm_103"
    symbols = (CUTE_DSL,)
    since = "0.6.10"
    dtypes = ("fp8",)
    backend = "cute-dsl"


def trtllm_lengths(o: MhaPrefillOperands) -> dict[str, object]:
    most_new, longest = o.longest
    return {
        "seq_lens": o.cu_k.diff(),
        "max_q_len": most_new,
        "max_kv_len": longest,
        "batch_size": len(o.sequences),
        "cum_seq_lens_q": o.cu_q,
        "cum_seq_lens_kv": o.cu_k,
    }


def known_lengths(o: MhaPrefillOperands) -> dict[str, object]:
    """What keeps versions that look for empty sequences from asking the device in every call: where they can
    be told that there are none, that, as vLLM does; else the lengths."""
    import torch

    if TRTLLM.takes("skip_all_rows_active_check"):
        return {"skip_all_rows_active_check": True}
    return {
        "q_seq_lens_cpu": torch.tensor([s.new for s in o.sequences], dtype=torch.int32),
        "kv_seq_lens_cpu": torch.tensor([s.length for s in o.sequences], dtype=torch.int32),
    }


def product_scales(o: MhaPrefillOperands) -> dict[str, float]:
    """Of the first product, descales and softmax scale in one, and of the second."""
    return {"bmm1_scale": o.score_scale, "bmm2_scale": o.value_scale}


class _TrtLlmPrefill(Prepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, backend: str) -> None:
        import torch

        super().__init__(operands, out)
        o, function = operands, CUTE_DSL if backend else TRTLLM
        self.attend = function.bind(
            query=o.q,
            key=o.k,
            value=o.v,
            out=out,
            # Zeros: its counters start from them.
            workspace_buffer=torch.zeros(WORKSPACE, dtype=torch.uint8, device=out.device),
            o_sf_scale=1.0,
            window_left=-1,
            enable_pdl=False,
            is_causal=scoring(o)["causal"],
            return_lse=False,
            **product_scales(o),
            **trtllm_lengths(o),
            **known_lengths(o),
            **({"backend": backend} if backend else {}),
        )

    def call(self) -> None:
        self.attend()
