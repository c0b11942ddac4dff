"""FlashInfer's prefill over ragged keys: a row for each backend of its wrapper, and TensorRT-LLM's kernels.

Read at 0.6.18 and 0.7.2.post1: flashinfer/prefill.py, flashinfer/utils.py, flashinfer/cudnn/prefill.py; at
0.6.18 tests/attention/{test_cudnn_prefill_deepseek,test_blackwell_fmha,test_trtllm_gen_attention_prefill}.py;
signatures at the tags from 0.2.0. Kernels are built by nvcc at the first use, or downloaded. fa2, fa3 and
cuDNN ran on an H200 (0.6.16); others are untested on hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kernels.binding import Function, Used
from kernels.lazy import torch
from kernels.mha_prefill.layouts import bound
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, takes
from kernels.op import Call, implementation
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, SINCE_AMPERE, FlashInfer

WORKSPACE = 384 << 20  # room for partial results: vLLM's VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
PLAN_BYTES = 8 << 20  # what the wrapper allocates for its plan
WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"
PLACES = (f"flashinfer.{WRAPPER}", f"flashinfer.prefill.{WRAPPER}")
SIZES = "num_qo_heads num_kv_heads head_dim_qk head_dim_vo causal sm_scale q_data_type kv_data_type"


def method(name: str, needs: str = "", wishes: str = "") -> Function:
    """A method of the wrapper."""
    return Function(*(f"{place}.{name}" for place in PLACES), needs=needs, wishes=wishes)


MAKE = Function(*PLACES, needs="float_workspace_buffer kv_layout backend")
# The output's dtype, which 0.6.0 brought, differs from that of q with FP8 alone.
PLAN = method("plan", needs=f"qo_indptr kv_indptr {SIZES}", wishes="o_data_type")
PLAN_FP8 = PLAN.needing("o_data_type", when="dtype=fp8")
PLAN_CUDNN = PLAN.needing(
    "v_indptr o_indptr seq_lens seq_lens_q max_token_per_sequence max_sequence_kv", when="flashinfer.cudnn"
)
RUN = method("run", needs="q k v out")
RUN_FP8 = RUN.needing("q_scale k_scale v_scale", when="dtype=fp8")
TRTLLM = Function(
    "flashinfer.prefill.trtllm_ragged_attention_deepseek",
    "flashinfer.trtllm_ragged_attention_deepseek",
    needs="query key value out workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale "
    "o_sf_scale batch_size window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse",
    wishes="q_seq_lens_cpu kv_seq_lens_cpu skip_all_rows_active_check",
)
CUTE_DSL = TRTLLM.needing("backend", when="flashinfer.cute_dsl")


class Fa2(FlashInfer):
    """The wrapper with one of its backends, planned for the lengths before timing."""

    name = "flashinfer.fa2"
    since = "0.2.3"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_80 or later"
    archs: ClassVar[tuple[str, ...]] = SINCE_AMPERE
    symbols: ClassVar[Sequence[Used]] = (MAKE, PLAN, RUN)
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(*self.dtypes)(sizes)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        return WORKSPACE + PLAN_BYTES

    def prepare(self, o: MhaPrefillOperands, out: torch.Tensor) -> Call:
        return self.planned(o, out, PLAN_FP8 if o.is_fp8 else PLAN)

    def planned(
        self, o: MhaPrefillOperands, out: torch.Tensor, plan: Function, **of_plan: torch.Tensor
    ) -> Call:
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        backend = self.name.removeprefix("flashinfer.")
        wrapper = MAKE.bind(float_workspace_buffer=room, kv_layout="NHD", backend=backend)()
        scales = {name.replace("descale", "scale"): float(d) for name, d in o.descales.items()}
        bound(plan, o, out, method_of=wrapper, o_data_type=out.dtype, **of_plan)()
        return bound(RUN_FP8 if o.is_fp8 else RUN, o, out, method_of=wrapper, **scales)


class Fa3(Fa2):
    """It takes FP8 with equal head sizes only (csrc/batch_prefill_fp8_sm90.cu), so not here."""

    name = "flashinfer.fa3"
    requires = "flashinfer-python 0.2.3 or later, CUDA sm_90"
    archs = ("sm_90",)


class Cutlass(Fa2):
    """vLLM 0.33 asks for it in v1/attention/backends/mla/prefill/flashinfer.py."""

    name = "flashinfer.cutlass"
    since = "0.6.0"
    requires = "flashinfer-python 0.6.0 or later, CUDA sm_100 or sm_103"
    archs = BLACKWELL
    activations = "fp8"
    symbols = (MAKE, PLAN, RUN, PLAN_FP8, RUN_FP8)
    dtypes = ("bf16", "fp8")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """32 MiB more, and three tables of a plan (fmha_varlen and fmha_varlen_plan)."""
        return super().workspace(sizes) + (32 << 20) + 3 * 4 * 131072


class CudnnGraph(Fa2):
    """cuDNN's graph as FlashInfer builds it; the row `cudnn` is the same graph without FlashInfer. Offsets
    count tokens from 0.7.1 on, elements before (the docstrings of `plan` say so)."""

    name = "flashinfer.cudnn"
    since = "0.6.2"
    requires = "flashinfer-python 0.6.2 or later, nvidia-cudnn-frontend 1.13 or later, CUDA sm_90 or later"
    archs = ("sm_90", *BLACKWELL)
    also = ("cudnn",)
    symbols = (MAKE, PLAN_CUDNN, RUN)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        largest_offset = max(sizes.queries, sizes.keys) * sizes.heads * WIDTH
        in_range = need(largest_offset < 1 << 31, "its offsets in elements are int32: too many tokens")
        return Support.all_of(super().fits(sizes), in_range)

    def prepare(self, o: MhaPrefillOperands, out: torch.Tensor) -> Call:
        offsets = {"qo_indptr": o.cu_q, "kv_indptr": o.cu_k, "v_indptr": o.cu_k, "o_indptr": o.cu_q}
        if not RUN.takes("lse_base"):  # which 0.7.1 brought too
            widths = {"qo_indptr": WIDTH, "kv_indptr": WIDTH, "v_indptr": VALUE, "o_indptr": VALUE}
            offsets = {name: offset * (o.q.shape[1] * widths[name]) for name, offset in offsets.items()}
        lengths = {"seq_lens": o.cu_k.diff().view(-1, 1, 1, 1), "seq_lens_q": o.cu_q.diff().view(-1, 1, 1, 1)}
        return self.planned(o, out, PLAN_CUDNN, **offsets, **lengths)


@implementation(
    "flashinfer.trtllm",
    FlashInfer,
    since="0.2.14",
    requires="flashinfer-python 0.2.14 or later, CUDA sm_100 or sm_103",
    archs=BLACKWELL,
    activations="fp8",
    symbols=(TRTLLM,),
    fits=takes("bf16", "fp8"),
    workspace=lambda sizes: WORKSPACE + PLAN_BYTES,
)
def trtllm(operands: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """`trtllm_ragged_attention_deepseek`: TensorRT-LLM's kernels, downloaded as binaries."""
    return deepseek(operands, out, TRTLLM)


@implementation(
    "flashinfer.cute_dsl",
    FlashInfer,
    since="0.6.10",
    requires="flashinfer-python 0.6.10 or later, CUDA sm_100 or sm_103",
    archs=BLACKWELL,
    activations="fp8",
    symbols=(CUTE_DSL,),
    fits=takes("fp8"),
    workspace=lambda sizes: WORKSPACE + PLAN_BYTES,
)
def cute_dsl(operands: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """The same function with FlashInfer's own kernels in CuTe. At this width they take FP8 alone: none is
    published for bf16, and one that is compiled would need 256 KiB of shared memory
    (flashinfer/attention/cute_dsl/fmha.py, flashinfer/cute_dsl/attention/fmha/fmha.py)."""
    return deepseek(operands, out, CUTE_DSL, backend="cute-dsl")


def deepseek(o: MhaPrefillOperands, out: torch.Tensor, function: Function, **further: Any) -> Call:
    """The call of `trtllm_ragged_attention_deepseek`, which has several kernels behind it."""
    # In some versions every call looks for empty sequences, for which it fetches the lengths from the device.
    # They are told that there are none, as by vLLM, or get the lengths on the host.
    if TRTLLM.takes("skip_all_rows_active_check"):
        further["skip_all_rows_active_check"] = True
    else:
        further["q_seq_lens_cpu"] = torch.tensor([s.new for s in o.sequences], dtype=torch.int32)
        further["kv_seq_lens_cpu"] = torch.tensor([s.length for s in o.sequences], dtype=torch.int32)
    return bound(
        function,
        o,
        out,
        # Zeros, because counters in it start at 0.
        workspace_buffer=torch.zeros(WORKSPACE, dtype=torch.uint8, device=out.device),
        seq_lens=o.cu_k.diff(),
        bmm1_scale=o.score_scale,
        bmm2_scale=o.value_scale,
        o_sf_scale=1.0,
        window_left=-1,
        enable_pdl=False,
        return_lse=False,
        **further,
    )
