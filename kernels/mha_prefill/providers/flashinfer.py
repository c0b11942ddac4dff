"""FlashInfer's prefill over ragged keys: its wrapper by backend, and TensorRT-LLM's kernels beside it.

Read at 0.6.18: flashinfer/prefill.py, flashinfer/utils.py, flashinfer/cudnn/prefill.py and tests/attention/
{test_cudnn_prefill_deepseek,test_blackwell_fmha,test_trtllm_gen_attention_prefill}.py; signatures at the tags
from 0.2.0. Kernels are built by nvcc at the first use, or downloaded. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import find, keywords
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

WORKSPACE = 384 << 20  # of partial results, as vLLM gives it (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)
PLAN = 8 << 20  # that the wrapper allocates for its plan


class FlashInferPrefill(vendor.FlashInfer):
    """A kernel of FlashInfer.

    dtypes: of q, k and v
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, *self.dtypes)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        return WORKSPACE + PLAN


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

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, backend: str) -> None:
        import torch

        super().__init__(operands, out)
        name = "BatchPrefillWithRaggedKVCacheWrapper"
        make = find(f"flashinfer.{name}", f"flashinfer.prefill.{name}")
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        wrapper = make(
            **keywords(make, {"float_workspace_buffer": room, "kv_layout": "NHD", "backend": backend})
        )
        o, dtype = operands, operands.q.dtype
        dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
        # An output unlike q, from 0.6.0, is wanted for FP8 only.
        output: dict[str, object] = {"o_data_type": out.dtype}
        needed, wished = (output, {}) if dtype != out.dtype else ({}, output)
        needed |= sizes_of(o) | scoring(o) | dtypes | self.lengths(o)
        wrapper.plan(**keywords(wrapper.plan, needed, wished))
        self.run = wrapper.run
        self.arguments = keywords(wrapper.run, {"q": o.q, "k": o.k, "v": o.v, "out": out, **scales(o)})

    def lengths(self, o: MhaPrefillOperands) -> dict[str, object]:
        return begins(o)

    def call(self) -> None:
        self.run(**self.arguments)


class FlashInferFa2Prefill(FlashInferPrefill):
    name = "flashinfer.fa2"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_80 or later"
    archs = vendor.SINCE_AMPERE

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "fa2")


class FlashInferFa3Prefill(FlashInferPrefill):
    """FP8 it has for equal head sizes only (csrc/batch_prefill_fp8_sm90.cu)."""

    name = "flashinfer.fa3"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_90"
    archs = ("sm_90",)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "fa3")


class CutlassPrefill(FlashInferPrefill):
    name = "flashinfer.cutlass"
    requires = "flashinfer-python 0.2.6 or later (FP8: 0.6.0 or later), CUDA sm_100 or sm_103"
    archs = vendor.BLACKWELL
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    activations = "fp8"

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Further 32 MiB of its own, and a plan of three tables (fmha_varlen and fmha_varlen_plan)."""
        return super().workspace(sizes) + (32 << 20) + 3 * 4 * 131072

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Ragged(operands, out, "cutlass")


def elements(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """Where each sequence begins, in elements, int32: of q, k, v and the output."""
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
    def lengths(self, o: MhaPrefillOperands) -> dict[str, object]:
        return {**elements(o), **sequence_lengths(o)}


class FlashInferCudnnPrefill(FlashInferPrefill):
    """cuDNN's graph as FlashInfer builds it; the row `cudnn` is the same graph without that."""

    name = "flashinfer.cudnn"
    requires = "flashinfer-python 0.6.2 or later, nvidia-cudnn-frontend 1.13 or later, CUDA sm_90 or later"
    archs = ("sm_90", *vendor.BLACKWELL)
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
    """What keeps versions that look for empty sequences from asking the device in every call."""
    import torch

    return {
        "q_seq_lens_cpu": torch.tensor([s.new for s in o.sequences], dtype=torch.int32),
        "kv_seq_lens_cpu": torch.tensor([s.length for s in o.sequences], dtype=torch.int32),
        "skip_all_rows_active_check": True,
    }


def product_scales(o: MhaPrefillOperands) -> dict[str, float]:
    """Of the first product, descales and softmax scale in one, and of the second."""
    return {"bmm1_scale": o.score_scale, "bmm2_scale": o.value_scale}


class _TrtLlmPrefill(Prepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, backend: str) -> None:
        import torch

        super().__init__(operands, out)
        o, name = operands, "trtllm_ragged_attention_deepseek"
        self.function = find(f"flashinfer.prefill.{name}", f"flashinfer.{name}")
        needed = {
            "query": o.q,
            "key": o.k,
            "value": o.v,
            "out": out,
            # Zeros: its counters start from them.
            "workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.uint8, device=out.device),
            "o_sf_scale": 1.0,
            "window_left": -1,
            "enable_pdl": False,
            "is_causal": scoring(o)["causal"],
            "return_lse": False,
            **product_scales(o),
            **trtllm_lengths(o),
        }
        if backend:
            needed["backend"] = backend
        self.arguments = keywords(self.function, needed, known_lengths(o))

    def call(self) -> None:
        self.function(**self.arguments)
