"""FlashInfer's fused MoE: TensorRT-LLM's CUTLASS path on Hopper, its generated kernels on Blackwell.

All take the up rows of w13 before the gate rows. Sources, 0.6.0 to 0.7.2.post1: flashinfer/fused_moe/
core.py, jit/fused_moe.py, csrc/fused_moe/cutlass_backend, csrc/trtllm_fused_moe_kernel_launcher.cu,
tests/moe. How engines call them: fused_moe/experts/trtllm_fp8_moe.py and quantization/utils/
flashinfer_utils.py of vLLM 0.33; srt/layers/moe/moe_runner/flashinfer_trtllm.py of SGLang 0.5.23. Untested on
hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import vendor
from kernels.binding import Function, Taken
from kernels.formats import BLOCK, known_scales
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import SCALING, FusedMoeSizes
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

EPILOGUE_ROWS = 64
"""Rows of an epilogue tile of the generated kernels, in whose order the rows of a weight lie."""

DEEPSEEK_V3, TOP_K = 2, 5
"""Of flashinfer's RoutingMethodType: sigmoid, bias, groups, top 8; and picks as they are."""

MAJOR_K, BLOCK_MAJOR_K = 0, 2
"""Of flashinfer's WeightLayout: [N, K], and [K/128, N, 128]."""

MOST_GROUPS, MOST_PICKS, MOST_OF_GROUP = 4, 8, 32
"""Groups and experts that its routing for DeepSeek-V3 chooses at most, and experts of a group."""

TUNE = Function("flashinfer.autotuner.autotune", "flashinfer.autotune", positions=1)
CUTLASS = Function(
    "flashinfer.fused_moe.cutlass_fused_moe",
    needs="input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights "
    "output_dtype quant_scales use_deepseek_fp8_block_scale ep_size ep_rank output",
    wishes="tune_max_num_tokens",
)
TRTLLM = Function(
    "flashinfer.fused_moe.trtllm_fp8_block_scale_moe",
    needs="routing_logits routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale "
    "gemm2_weights gemm2_weights_scale num_experts top_k n_group topk_group intermediate_size "
    "local_expert_offset local_num_experts routed_scaling_factor routing_method_type use_shuffled_weight",
    wishes="weight_layout tune_max_num_tokens num_fused_shared_experts output",
)
TRTLLM_INTO = TRTLLM.needing("output", when="")
TRTLLM_ROUTED = Function(
    "flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe",
    needs="topk_ids routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale "
    "gemm2_weights gemm2_weights_scale num_experts top_k n_group topk_group intermediate_size "
    "local_expert_offset local_num_experts routed_scaling_factor routing_method_type use_shuffled_weight "
    "weight_layout tune_max_num_tokens output",
)
SHUFFLE = Function("flashinfer.shuffle_matrix_a", "flashinfer.fp4_quantization.shuffle_matrix_a", positions=2)
BLOCKS = Function(
    "flashinfer.fused_moe.convert_to_block_layout",
    "flashinfer.fused_moe.core.convert_to_block_layout",
    positions=2,
)


class FlashInferMoe(vendor.FlashInfer):
    """What all share."""

    activations = "fp8"

    def layout(self, sizes: FusedMoeSizes) -> int:
        return sizes.local_experts * sizes.expert_bytes

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Rows of x per pair, quantised; gate and up, h, and what experts give, per pair; scales and maps.
        Beside them, while weights are laid out, a copy of them."""
        pairs = sizes.tokens * sizes.picks + sizes.local_experts * BLOCK
        of_pair = sizes.hidden * 3 + sizes.inter * 7 + (sizes.hidden + sizes.inter) // BLOCK * 4 + 64
        return pairs * of_pair + sizes.local_experts * 2 * sizes.inter * sizes.hidden


def up_first(rows: torch.Tensor, inter: int) -> torch.Tensor:
    """[local, 2 * inter, K], gate rows before up rows, as [up, gate]; of scales too, `inter` in blocks."""
    import torch

    return torch.cat([rows[:, inter:], rows[:, :inter]], 1)


def tune(prepared: Prepared) -> None:
    """A call within FlashInfer's autotuner, which also builds what is not built yet."""
    with TUNE.bind(True)():
        prepared.call()


class CutlassMoe(FlashInferMoe):
    """`cutlass_fused_moe`: x in bf16 is quantised, permuted and multiplied within, by grouped products of
    DeepSeek's block scales."""

    name = "flashinfer.cutlass"
    requires = "flashinfer-python 0.6.0 or later (read to 0.7.2), sm_90, CUDA 12.8"
    since = "0.6.0"
    boundaries = ("with_quant",)
    archs = ("sm_90",)
    symbols = (CUTLASS, TUNE)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _CutlassMoe | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        prepared = _CutlassMoe(operands, out, first)
        if first is None:
            tune(prepared)
        return prepared


class _CutlassMoe(Prepared):
    operands: FusedMoeOperands
    w31: torch.Tensor
    w31_scale: torch.Tensor

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, first: _CutlassMoe | None) -> None:
        super().__init__(operands, out)
        o, sizes = operands, operands.sizes
        same = first if first is not None and first.operands.w13 is o.w13 else None
        self.w31 = same.w31 if same else up_first(o.w13, sizes.inter)
        self.w31_scale = same.w31_scale if same else up_first(o.w13_scale, sizes.inter // BLOCK)
        self.layer = CUTLASS.bind(
            input=o.x,
            token_selected_experts=o.topk_ids,
            token_final_scales=o.topk_weights,
            fc1_expert_weights=self.w31,
            fc2_expert_weights=o.w2,
            output_dtype=out.dtype,
            quant_scales=[self.w31_scale, o.w2_scale],
            use_deepseek_fp8_block_scale=True,
            # The rank's experts are the first ones: an id of -1 is outside them.
            ep_size=sizes.ep,
            ep_rank=0,
            output=out,
            tune_max_num_tokens=sizes.tokens,
        )

    def call(self) -> None:
        self.layer()


class TrtLlmMoe(FlashInferMoe):
    """`trtllm_fp8_block_scale_moe`: routing and everything after it, of x that the suite's own kernel
    quantises before, as engines do; with weights as vLLM has them. It is built for all of compute capability
    10 (gen_trtllm_gen_fused_moe_sm100_module)."""

    name = "flashinfer.trtllm"
    requires = (
        "flashinfer-python 0.6.0 or later (0.6.15 for a fused shared expert; read to 0.7.2), sm_100 or sm_103"
    )
    since = "0.6.0"
    boundaries = ("with_routing",)
    archs = vendor.BLACKWELL
    allocates = True
    symbols: ClassVar[Sequence[Taken]] = (TRTLLM, TUNE, SHUFFLE, BLOCKS)

    def fits(self, sizes: FusedMoeSizes) -> Support:
        groups, limit = sizes.group_limit
        reachable = limit * sizes.experts // groups
        return Support.all_of(
            need(not (sizes.shared and sizes.ep > 1), "fuses a shared expert only where ep=1"),
            need(sizes.experts % 4 == 0, f"routes to a multiple of 4 experts, not {sizes.experts}"),
            need(limit <= MOST_GROUPS, f"routes to at most {MOST_GROUPS} groups, not {limit}"),
            need(
                groups == 1 or 2 <= sizes.experts // groups <= MOST_OF_GROUP,
                f"takes groups of 2 to {MOST_OF_GROUP} experts, not of {sizes.experts // groups}",
            ),
            need(
                sizes.topk <= MOST_PICKS and sizes.topk < reachable,
                f"picks at most {MOST_PICKS}, and fewer than the {reachable} in reach, not {sizes.topk}",
            ),
        )

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return super().workspace(sizes) + sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _TrtLlmMoe | None, operands: FusedMoeOperands, out: torch.Tensor | None
    ) -> Prepared:
        prepared = self.bound(operands, out, first)
        if first is None:
            tune(prepared)
        return prepared

    def bound(
        self, operands: FusedMoeOperands, out: torch.Tensor | None, first: _TrtLlmMoe | None
    ) -> _TrtLlmMoe:
        if operands.sizes.shared and not TRTLLM.takes("num_fused_shared_experts"):
            raise Unsupported(f"flashinfer {self.version} fuses no shared expert; 0.6.15 does")
        return _TrtLlmMoe(operands, first)


class TrtLlmOfSglang(TrtLlmMoe):
    """The same as SGLang calls it: weights as checkpoints have them but for the order of gate and up, another
    kernel, and an output that is given. The shared expert is a dense MLP of its own there."""

    name = "flashinfer.trtllm@sglang"
    requires = "flashinfer-python 0.6.14 or later (read to 0.7.2), sm_100 or sm_103"
    allocates = False
    since = "0.6.14"
    symbols = (TRTLLM_INTO, TUNE)

    def fits(self, sizes: FusedMoeSizes) -> Support:
        return Support.all_of(super().fits(sizes), need(not sizes.shared, "takes no shared expert"))

    def layout(self, sizes: FusedMoeSizes) -> int:
        """The first weight: the second is read in place."""
        return super().layout(sizes) * 2 // 3

    def bound(
        self, operands: FusedMoeOperands, out: torch.Tensor | None, first: _TrtLlmMoe | None
    ) -> _TrtLlmMoe:
        return _TrtLlmOfSglang(operands, first, out)


class TrtLlmRoutedOfSglang(TrtLlmOfSglang):
    """`trtllm_fp8_block_scale_routed_moe`: what SGLang runs with expert parallelism, after a top-k kernel of
    its own. Picks of other ranks' experts are -1 here, which it skips as SGLang's rows of padding."""

    name = "flashinfer.trtllm_routed@sglang"
    requires = "flashinfer-python 0.6.18 or later (read to 0.7.2), sm_100 or sm_103"
    since = "0.6.18"  # before, it takes ids and weights packed into one number
    boundaries = ("with_quant",)
    symbols = (TRTLLM_ROUTED, TUNE)

    def fits(self, sizes: FusedMoeSizes) -> Support:
        return Support.all_of(
            need(not sizes.shared, "takes no shared expert"),
            need(sizes.experts % 4 == 0, f"takes a multiple of 4 experts, not {sizes.experts}"),
        )

    def bound(
        self, operands: FusedMoeOperands, out: torch.Tensor | None, first: _TrtLlmMoe | None
    ) -> _TrtLlmMoe:
        return _TrtLlmRoutedOfSglang(operands, first, out)


class _TrtLlmMoe(Prepared):
    operands: FusedMoeOperands
    w31: torch.Tensor
    w31_scale: torch.Tensor
    w2: torch.Tensor

    def __init__(
        self, operands: FusedMoeOperands, first: _TrtLlmMoe | None, out: torch.Tensor | None = None
    ) -> None:
        import torch

        from kernels.quantise import quantiser

        super().__init__(operands, out)
        o, sizes = operands, operands.sizes
        same = first if first is not None and first.operands.w13 is o.w13 else None
        self.w31 = same.w31 if same else self.laid_out(up_first(o.w13, sizes.inter))
        self.w31_scale = same.w31_scale if same else up_first(o.w13_scale, sizes.inter // BLOCK)
        self.w2 = same.w2 if same else self.laid_out(o.w2)
        self.x_q = torch.empty_like(o.x, dtype=o.w13.dtype)
        self.x_scale = torch.empty(sizes.hidden // BLOCK, sizes.tokens, device=o.x.device)
        self.quantise = quantiser(o.x, self.x_q, self.x_scale.t(), known_scales(sizes.scales))
        self.layer = self.bind()

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        return blocked(weight)

    def bind(self) -> Callable[[], Any]:
        sizes = self.operands.sizes
        shared = {"num_fused_shared_experts": sizes.shared} if sizes.shared else {}
        return TRTLLM.bind(
            **self.arguments(),
            **shared,
            use_shuffled_weight=True,
            weight_layout=BLOCK_MAJOR_K,
            tune_max_num_tokens=sizes.tokens,
        )

    def arguments(self) -> dict[str, object]:
        """Those that do not depend on the engine."""
        o, sizes = self.operands, self.operands.sizes
        return {
            **self.routing(),
            "hidden_states": self.x_q,
            "hidden_states_scale": self.x_scale,
            "gemm1_weights": self.w31,
            "gemm1_weights_scale": self.w31_scale,
            "gemm2_weights": self.w2,
            "gemm2_weights_scale": o.w2_scale,
            "num_experts": sizes.experts,
            "top_k": sizes.topk,
            "intermediate_size": sizes.inter,
            "local_expert_offset": 0,
            "local_num_experts": sizes.routed.local,
        }

    def routing(self) -> dict[str, object]:
        groups, limit = self.operands.sizes.group_limit
        return {
            "routing_logits": self.operands.logits,
            "routing_bias": self.operands.bias,
            "n_group": groups,
            "topk_group": limit,
            "routed_scaling_factor": SCALING,
            "routing_method_type": DEEPSEEK_V3,
        }

    def call(self) -> None:
        self.quantise()
        self.out = self.layer()


class _TrtLlmOfSglang(_TrtLlmMoe):
    function: ClassVar = TRTLLM_INTO

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def bind(self) -> Callable[[], Any]:
        return self.function.bind(
            **self.arguments(),
            use_shuffled_weight=False,
            weight_layout=MAJOR_K,
            tune_max_num_tokens=next_power_of_two(self.operands.sizes.tokens),
            output=self.out,
        )

    def call(self) -> None:
        self.quantise()
        self.layer()


class _TrtLlmRoutedOfSglang(_TrtLlmOfSglang):
    function = TRTLLM_ROUTED

    def routing(self) -> dict[str, object]:
        return {
            "topk_ids": (self.operands.topk_ids, self.operands.topk_weights),
            "routing_bias": None,
            "n_group": None,
            "topk_group": None,
            "routed_scaling_factor": 1.0,  # the operands' weights have it
            "routing_method_type": TOP_K,
        }


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def blocked(weight: torch.Tensor) -> torch.Tensor:
    """FP8 [local, N, K] as [local, K/128, N, 128], rows in the order of the epilogue's tiles."""
    import torch

    bits = weight.view(torch.uint8)
    laid = [BLOCKS.bind(SHUFFLE.bind(expert, EPILOGUE_ROWS)(), BLOCK)() for expert in bits]
    return torch.stack(laid).view(weight.dtype)
