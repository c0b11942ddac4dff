"""DeepGEMM's MoE as SGLang runs it: its own kernels for quantising, placing, SiLU and the sum over picks.

Sources, SGLang 0.5.19 to 0.5.23: srt/layers/moe/moe_runner/deep_gemm.py (pre_permute_standard_to_deep_gemm,
DeepGemmRunnerCore._run_masked_gemm, post_permute_deep_gemm_to_standard), kernels/ops/moe/ep_moe_kernels.py
and kernels/ops/quantization/per_token_group_quant.py. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kernels import platform as platforms
from kernels.binding import Function
from kernels.formats import BLOCK
from kernels.fused_moe.between_products import WORD
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers.deep_gemm import (
    MASKED,
    TRANSFORM,
    packed_scale_bytes,
    packs,
    weight_scale,
)
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import OPS, Prepared
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.vendor import TRITON, DeepGemm, Sglang
from shapes.case import Case

if TYPE_CHECKING:
    import torch

CAPACITY = 256
"""Rows of an expert are more than there are tokens, in so many (moe_ep_deepgemm_preprocess)."""

KERNELS = "sglang.kernels.ops"
PLACE = Function(
    f"{KERNELS}.moe.ep_moe_kernels.moe_ep_deepgemm_preprocess",
    needs="topk_ids num_local_experts hidden_states top_k block_shape output_dtype",
)
ACTIVATE = Function(
    f"{KERNELS}.quantization.per_token_group_quant.per_token_group_quant",
    needs="input group_size scale_ue8m0 fuse_silu_and_mul masked_m column_major_scales",
)
ADD_UP = Function(
    f"{KERNELS}.moe.ep_moe_kernels.post_reorder_deepgemm",
    needs="down_output output src2dst topk_ids topk_weights topk num_tokens hidden_size "
    "routed_scaling_factor",
)
ALIGN = Function("deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor", positions=1, when="sm_90")


class DeepGemmMoeOfSglang(DeepGemm):
    """SGLang's runner without an all-to-all library before it, in its masked layout: as for decoding after
    DeepEP, where dispatching has quantised and placed. It takes that layout while it fits a quarter of free
    memory (SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION), and a contiguous one for longer prefill, which
    this row does not."""

    name = "deepgemm@sglang"
    requires = (
        "SGLang (0.5.19 to 0.5.23) with sgl-deep-gemm, sm_90, or sm_100 and sm_103 with power-of-two scales"
    )
    also: ClassVar = {"sglang": Sglang.install, **TRITON}
    others_since: ClassVar = {"sglang": "0.5.19"}
    boundaries = ("with_quant",)
    activations = "fp8"
    symbols = (MASKED, TRANSFORM, ALIGN, PLACE, ACTIVATE, ADD_UP)

    def supports(self, case: Case, platform: Platform) -> Support:
        hidden = cast(FusedMoeSizes, OPS[self.op].sizes(case.sizes)).hidden
        step = BLOCK * WORD if packs(platform.arch) else BLOCK
        return Support.all_of(
            super().supports(case, platform),
            need(hidden % step == 0, f"on {platform.arch} needs hidden to be a multiple of {step}"),
        )

    def layout(self, sizes: FusedMoeSizes) -> int:
        return packed_scale_bytes(sizes)

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Per row x, gate and up, h, what the expert gives, and scales; x quantised; per pair its row."""
        rows = sizes.local_experts * (sizes.tokens // CAPACITY + 1) * CAPACITY
        of_row = sizes.hidden * 3 + sizes.inter * 5 + (sizes.hidden + sizes.inter) // BLOCK * 8
        return rows * of_row + sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4 + sizes.picks * 4)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _DeepGemmMoeOfSglang | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        return _DeepGemmMoeOfSglang(operands, out, first)


class _DeepGemmMoeOfSglang(Prepared):
    operands: FusedMoeOperands
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, first: _DeepGemmMoeOfSglang | None
    ) -> None:
        import torch

        super().__init__(operands, out)
        o, sizes = operands, operands.sizes
        self.packed = packs(platforms.of(out.device).arch)
        hidden, inter, experts = sizes.hidden, sizes.inter, sizes.local_experts
        same = first if first is not None and first.operands.w13 is o.w13 else None
        self.w13_scale = same.w13_scale if same else weight_scale(o.w13_scale, 2 * inter, hidden, self.packed)
        self.w2_scale = same.w2_scale if same else weight_scale(o.w2_scale, hidden, inter, self.packed)
        rows = (sizes.tokens // CAPACITY + 1) * CAPACITY

        def empty(columns: int) -> torch.Tensor:
            return torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=out.device)

        self.gate_up, self.given = empty(2 * inter), empty(hidden)
        # A hint for its choice of tiles, of all experts and routed picks, as SGLang counts them.
        self.expected = max(1, -(-sizes.tokens * sizes.picks // (sizes.experts + sizes.shared)))
        self.place = PLACE.bind(
            topk_ids=o.topk_ids,
            num_local_experts=experts,
            hidden_states=o.x,
            top_k=sizes.picks,
            block_shape=[BLOCK, BLOCK],
            output_dtype=o.w13.dtype,
        )
        self.multiply = MASKED.find()
        self.align = (lambda scale: scale) if self.packed else ALIGN.find()
        self.activate: Callable[..., Any] = ACTIVATE.bind(
            input=self.gate_up,
            group_size=BLOCK,
            scale_ue8m0=self.packed,
            fuse_silu_and_mul=True,
            masked_m=None,
            column_major_scales=True,
        )
        self.add_up: Callable[..., Any] = ADD_UP.bind(
            down_output=self.given,
            output=out,
            src2dst=None,
            topk_ids=o.topk_ids,
            topk_weights=o.topk_weights,
            topk=sizes.picks,
            num_tokens=sizes.tokens,
            hidden_size=hidden,
            routed_scaling_factor=1.0,  # the operands' weights have it
        )

    def call(self) -> None:
        o = self.operands
        counts, _, row_of, a, a_scale = self.place()
        w13, w2 = (o.w13, self.w13_scale), (o.w2, self.w2_scale)
        self.multiply((a, self.align(a_scale)), w13, self.gate_up, counts, self.expected)
        h_q, h_scale = self.activate(masked_m=counts)
        self.multiply((h_q, self.align(h_scale)), w2, self.given, counts, self.expected)
        self.add_up(src2dst=row_of)
