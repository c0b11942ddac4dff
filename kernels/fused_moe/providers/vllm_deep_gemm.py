"""DeepGEMM's MoE as vLLM runs it: its own kernels for quantising, permuting, SiLU and the sum over picks.

Sources, vLLM 0.31 to 0.33: model_executor/layers/fused_moe/experts/deep_gemm_moe.py (DeepGemmExperts.apply),
with prepare_finalize/no_dp_ep.py before it and fused_moe/deep_gemm_utils.py, quantization/utils/fp8_utils.py
and utils/deep_gemm.py for what it calls. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernels import platform as platforms
from kernels.binding import Function
from kernels.formats import BLOCK
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers.deep_gemm import packed_scale_bytes
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.align import tiles_for
from kernels.op import Prepared
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, TRITON, Vllm
from shapes.case import Case

if TYPE_CHECKING:
    import torch

UTILS = "vllm.model_executor.layers.fused_moe.deep_gemm_utils"
FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
PACKED = "sm_100, sm_103 and sm_120"

QUANTISE = Function(f"{FP8}.per_token_group_quant_fp8", needs="x group_size column_major_scales")
PERMUTE = Function(
    f"{UTILS}.deepgemm_moe_permute",
    needs="aq aq_scale topk_ids local_num_experts expert_map expert_tokens_meta aq_out",
    wishes="use_psum_layout",  # from 0.32 on
)
ROWS = Function(
    f"{UTILS}.compute_aligned_M_and_alignment",
    needs="M num_topk local_num_experts alignment expert_tokens_meta",
)
ALIGNMENT = Function(f"{DEEP_GEMM}.get_mk_alignment_for_contiguous_layout")
ALIGNED = Function(f"{DEEP_GEMM}.mk_alignment_scope", positions=1)
MULTIPLY = Function(f"{DEEP_GEMM}.m_grouped_fp8_gemm_nt_contiguous", positions=4, wishes="use_psum_layout")
ACTIVATE = Function(
    f"{FP8}.silu_mul_per_token_group_quant_fp8_colmajor",
    needs="input output",
    wishes="expert_ends expert_alignment",
    when="sm_90",
)
ACTIVATE_PACKED = Function(
    f"{FP8}.silu_mul_quant_fp8_packed_triton",
    needs="input output_q group_size",
    wishes="expert_ends expert_alignment",
    when=PACKED,
)
ADD_UP = Function(
    f"{UTILS}.deepgemm_unpermute_and_reduce", needs="a topk_ids topk_weights inv_perm expert_map output"
)
TRANSFORM = Function(
    f"{DEEP_GEMM}.transform_sf_into_required_layout", needs="sf mn k recipe num_groups is_sfa", when=PACKED
)


def is_packed(arch: str) -> bool:
    """Whether scales are exponents, four in an int32 (DeepGemmQuantScaleFMT.UE8M0); on sm_90 they are fp32,
    and those of activations rounded up to powers of two."""
    return arch != "sm_90"


class DeepGemmMoeOfVllm(Vllm):
    """vLLM's choice on sm_120, and elsewhere what stands behind FlashInfer's and Triton's. Off sm_90 weights
    must have scales of powers of two, to which vLLM rounds them as it loads. Experts' rows are told by their
    ends on sm_90, sm_100 and sm_103 (its psum layout), by an id for each row on sm_120 and before vLLM
    0.32."""

    name = "deepgemm@vllm"
    requires = "vLLM for CUDA (0.31 to 0.33), sm_90 or, with power-of-two scales, sm_100, sm_103 or sm_120"
    library = "vllm"
    since = "0.31"
    kinds = ("cuda",)
    archs = ("sm_90", *BLACKWELL, "sm_120")
    also = TRITON
    boundaries = ("with_quant",)
    activations = "fp8"
    symbols = (
        QUANTISE, PERMUTE, ROWS, ALIGNMENT, ALIGNED, MULTIPLY, ACTIVATE, ACTIVATE_PACKED, ADD_UP, TRANSFORM
    )  # fmt: skip

    def supports(self, case: Case, platform: Platform) -> Support:
        scales = case.sizes.get("scales", "ue8m0")
        return Support.all_of(
            super().supports(case, platform),
            need(
                scales == "ue8m0" or not is_packed(platform.arch),
                f"{platform.arch} takes power-of-two scales (scales=ue8m0), not {scales}",
            ),
        )

    def layout(self, sizes: FusedMoeSizes) -> int:
        return packed_scale_bytes(sizes)

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Per row x, gate and up, h, what the expert gives, and scales; x quantised."""
        rows = tiles_for(BLOCK, sizes) * BLOCK
        of_row = sizes.hidden * 3 + sizes.inter * 5 + (sizes.hidden + sizes.inter) // BLOCK * 4 + 4
        return rows * of_row + sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4 + sizes.picks * 4)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _DeepGemmMoeOfVllm | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        return _DeepGemmMoeOfVllm(operands, out, first)


def weight_scale(scale: torch.Tensor, rows: int, k: int, packed: bool) -> torch.Tensor:
    """fp32 [local, rows/128, k/128] as it is, or for every row, MN-major and packed."""
    if not packed:
        return scale
    recipe = (1, BLOCK, BLOCK)
    return TRANSFORM.bind(sf=scale, mn=rows, k=k, recipe=recipe, num_groups=len(scale), is_sfa=False)()


class _DeepGemmMoeOfVllm(Prepared):
    operands: FusedMoeOperands
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, first: _DeepGemmMoeOfVllm | None
    ) -> None:
        import torch

        super().__init__(operands, out)
        o, sizes = operands, operands.sizes
        arch = platforms.of(out.device).arch
        packed = is_packed(arch)
        hidden, inter, experts = sizes.hidden, sizes.inter, sizes.local_experts
        same = first if first is not None and first.operands.w13 is o.w13 else None
        self.w13_scale = same.w13_scale if same else weight_scale(o.w13_scale, 2 * inter, hidden, packed)
        self.w2_scale = same.w2_scale if same else weight_scale(o.w2_scale, hidden, inter, packed)
        self.by_ends = arch != "sm_120" and PERMUTE.takes("use_psum_layout")
        rows, _ = ROWS.bind(
            M=sizes.tokens,
            num_topk=sizes.picks,
            local_num_experts=experts,
            alignment=ALIGNMENT.bind()()[0],
            expert_tokens_meta=None,
        )()

        def empty(columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=out.device)

        self.gate_up, self.given = empty(2 * inter), empty(hidden)
        h_q = empty(inter, o.w13.dtype)
        self.quantise = QUANTISE.bind(x=o.x, group_size=BLOCK, column_major_scales=False)
        self.permute: Callable[..., Any] = PERMUTE.bind(
            aq=None,
            aq_scale=None,
            topk_ids=o.topk_ids,
            local_num_experts=experts,
            expert_map=None,
            expert_tokens_meta=None,
            aq_out=empty(hidden, o.w13.dtype),
            use_psum_layout=self.by_ends,
        )
        self.aligned, self.multiply = ALIGNED.find(), MULTIPLY.find()
        self.flags = {"use_psum_layout": True} if self.by_ends else {}
        self.activate: Callable[..., Any] = (
            ACTIVATE_PACKED.bind(input=self.gate_up, output_q=h_q, group_size=BLOCK)
            if packed
            else ACTIVATE.bind(input=self.gate_up, output=h_q)
        )
        self.add_up: Callable[..., Any] = ADD_UP.bind(
            a=self.given,
            topk_ids=o.topk_ids,
            topk_weights=o.topk_weights,
            inv_perm=None,
            expert_map=None,
            output=out,
        )

    def call(self) -> None:
        o = self.operands
        x_q, x_scale = self.quantise()
        a, a_scale, owners, row_of, aligned = self.permute(aq=x_q, aq_scale=x_scale)
        ends = {"expert_ends": owners, "expert_alignment": aligned} if self.by_ends else {}
        with self.aligned(aligned):
            self.multiply((a, a_scale), (o.w13, self.w13_scale), self.gate_up, owners, **self.flags)
            h = self.activate(**ends)
            self.multiply(h, (o.w2, self.w2_scale), self.given, owners, **self.flags)
        self.add_up(inv_perm=row_of)
