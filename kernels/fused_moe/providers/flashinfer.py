"""FlashInfer's fused MoE: TensorRT-LLM's CUTLASS path on Hopper, and its generated kernels on Blackwell.

All of them take the up rows of w13 before the gate rows. Sources, 0.6.0 to 0.7.2.post1:
flashinfer/fused_moe/core.py, jit/fused_moe.py, csrc/fused_moe/cutlass_backend,
csrc/trtllm_fused_moe_kernel_launcher.cu, tests/moe. For how engines call them:
fused_moe/experts/trtllm_fp8_moe.py and quantization/utils/flashinfer_utils.py of vLLM 0.33;
srt/layers/moe/moe_runner/flashinfer_trtllm.py of SGLang 0.5.23. Untested on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels import vendor
from kernels.binding import Function
from kernels.formats import BLOCK, known_scales
from kernels.fused_moe.operands import SCALING, FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, Unsupported, implementation, sequence
from kernels.platform import version
from kernels.quantise import quantiser
from kernels.support import Support, need

EPILOGUE_ROWS = 64  # rows of the generated kernels' epilogue tiles, in whose order the rows of weights are

MAPS = 64  # bytes of a row in maps between rows and pairs: an allowance, not read in the library's source

# Values of FlashInfer's RoutingMethodType: the call routes by sigmoid, bias and groups; or it gets the picks.
DEEPSEEK_V3, TOP_K = 2, 5
MAJOR_K, BLOCK_MAJOR_K = 0, 2  # values of FlashInfer's WeightLayout: [N, K]; [K/128, N, 128]

# Limits of FlashInfer's routing for DeepSeek-V3.
MOST_GROUPS = 4  # groups that a token's picks lie in
MOST_PICKS = 8
MOST_OF_GROUP = 32  # experts of a group

TUNE = Function("flashinfer.autotuner.autotune", "flashinfer.autotune", positions=1)
CUTLASS = Function(
    "flashinfer.fused_moe.cutlass_fused_moe",
    needs="input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights "
    "output_dtype quant_scales use_deepseek_fp8_block_scale ep_size ep_rank output",
    wishes="tune_max_num_tokens",
)
TRTLLM_ARGUMENTS = (
    "routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale gemm2_weights "
    "gemm2_weights_scale num_experts top_k n_group topk_group intermediate_size local_expert_offset "
    "local_num_experts routed_scaling_factor routing_method_type use_shuffled_weight"
)
TRTLLM = Function(
    "flashinfer.fused_moe.trtllm_fp8_block_scale_moe",
    needs=f"routing_logits {TRTLLM_ARGUMENTS}",
    wishes="weight_layout tune_max_num_tokens num_fused_shared_experts output",
)
TRTLLM_WITH_OUTPUT = TRTLLM.needing("output", when="")
TRTLLM_ROUTED = Function(
    "flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe",
    needs=f"topk_ids {TRTLLM_ARGUMENTS} weight_layout tune_max_num_tokens output",
)
SHUFFLE = Function("flashinfer.shuffle_matrix_a", "flashinfer.fp4_quantization.shuffle_matrix_a", positions=2)
IN_BLOCKS = Function(
    "flashinfer.fused_moe.convert_to_block_layout",
    "flashinfer.fused_moe.core.convert_to_block_layout",
    positions=2,
)


@dataclass
class Weights:
    """The weights in the layout of a row."""

    w31: torch.Tensor  # w13 with its up rows before its gate rows
    w31_scale: torch.Tensor
    w2: torch.Tensor
    is_tuned: bool = False  # whether FlashInfer's autotuner has run on them


class FlashInferMoe(vendor.FlashInfer):
    activations = "fp8"

    def layout(self, sizes: FusedMoeSizes) -> int:
        """Of w13, which is two thirds of the weights. w2 is read in place."""
        return sizes.local_experts * sizes.expert_bytes * 2 // 3

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """For each pair, and for up to 128 rows of padding in each expert: x in FP8, gate and up in bf16, h
        in bf16 and FP8, the expert's output in bf16, scales in fp32, and MAPS; a copy of w13 in FP8 while it
        is reordered."""
        hidden, inter = sizes.hidden, sizes.inter
        rows = sizes.pairs + sizes.local_experts * BLOCK
        of_row = hidden * (1 + 2) + inter * (2 * 2 + 2 + 1) + (hidden + inter) // BLOCK * 4 + MAPS
        return rows * of_row + sizes.local_experts * 2 * inter * hidden


def up_first(operands: FusedMoeOperands) -> Weights:
    """The weights with up rows before gate rows, each FP8 [local, N, K]."""

    def swapped(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        return torch.cat([up, gate], 1)

    return Weights(swapped(operands.w13), swapped(operands.w13_scale), operands.w2)


def in_blocks(operands: FusedMoeOperands) -> Weights:
    """The weights of `up_first` as FP8 [local, K/128, N, 128], with rows in the order of epilogue tiles."""

    def reordered(weight: torch.Tensor) -> torch.Tensor:
        experts = []
        for expert in weight.view(torch.uint8):
            shuffled = SHUFFLE.bind(expert, EPILOGUE_ROWS)()
            experts.append(IN_BLOCKS.bind(shuffled, BLOCK)())
        return torch.stack(experts).view(weight.dtype)

    weights = up_first(operands)
    return Weights(reordered(weights.w31), weights.w31_scale, reordered(weights.w2))


def tuned(call: Call, weights: Weights) -> Call:
    """Returns the call, after making it once within FlashInfer's autotuner, which also builds kernels."""
    if not weights.is_tuned:
        weights.is_tuned = True
        with TUNE.bind(True)():
            call()
    return call


@implementation(
    "flashinfer.cutlass",
    FlashInferMoe,
    requires="flashinfer-python 0.6.0 or later (read to 0.7.2), sm_90, CUDA 12.8",
    since="0.6.0",
    boundaries=("with_quant",),
    archs=("sm_90",),
    symbols=(CUTLASS, TUNE),
    stationary=up_first,
)
def cutlass(operands: FusedMoeOperands, out: torch.Tensor, weights: Weights) -> Call:
    """`cutlass_fused_moe`: the call quantises and permutes x in bf16, and multiplies it by grouped products
    with DeepSeek's block scales."""
    layer = CUTLASS.bind(
        input=operands.x, output=out, output_dtype=out.dtype, tune_max_num_tokens=operands.sizes.tokens,
        token_selected_experts=operands.topk_ids, token_final_scales=operands.topk_weights,
        fc1_expert_weights=weights.w31, fc2_expert_weights=operands.w2,
        quant_scales=[weights.w31_scale, operands.w2_scale], use_deepseek_fp8_block_scale=True,
        # The rank holds the first experts. An id of -1 is none of them, so that the kernel skips it.
        ep_size=operands.sizes.ep, ep_rank=0,
    )  # fmt: skip
    return tuned(layer, weights)


class TrtLlm(FlashInferMoe):
    """TensorRT-LLM's generated kernels. Another kernel quantises x first, as in engines: here the suite's."""

    archs = vendor.BLACKWELL

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return super().workspace(sizes) + sizes.quantised_bytes


def fits_routing(sizes: FusedMoeSizes) -> Support:
    """Whether its routing for DeepSeek-V3 takes these sizes."""
    groups, limit = sizes.group_limit
    reachable = limit * sizes.experts // groups  # experts of the groups that a token may choose
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


@implementation(
    "flashinfer.trtllm",
    TrtLlm,
    requires=(
        "flashinfer-python 0.6.0 or later (0.6.15 for a fused shared expert; read to 0.7.2), sm_100 or sm_103"
    ),
    since="0.6.0",
    boundaries=("with_routing",),
    allocates=True,
    symbols=(TRTLLM, TUNE, SHUFFLE, IN_BLOCKS),
    fits=fits_routing,
    layout=lambda sizes: sizes.local_experts * sizes.expert_bytes,
    stationary=in_blocks,
)
def trtllm(operands: FusedMoeOperands, out: None, weights: Weights) -> Call:
    """`trtllm_fp8_block_scale_moe`: routing and everything after it, with weights in vLLM's layout.
    FlashInfer builds it for all GPUs of compute capability 10 (gen_trtllm_gen_fused_moe_sm100_module)."""
    sizes = operands.sizes
    if sizes.shared and not TRTLLM.takes("num_fused_shared_experts"):
        raise Unsupported(f"flashinfer {version('flashinfer') or ''} fuses no shared expert; 0.6.15 does")
    shared = {"num_fused_shared_experts": sizes.shared} if sizes.shared else {}
    layout = {"use_shuffled_weight": True, "weight_layout": BLOCK_MAJOR_K}
    routing = routing_by_logits(operands)
    return layer(TRTLLM, operands, weights, **routing, **shared, **layout, tune_max_num_tokens=sizes.tokens)


class TrtLlmOfSglang(TrtLlm):
    def fits(self, sizes: FusedMoeSizes) -> Support:
        return need(not sizes.shared, "takes no shared expert")


@implementation(
    "flashinfer.trtllm@sglang",
    TrtLlmOfSglang,
    requires="flashinfer-python 0.6.14 or later (read to 0.7.2), sm_100 or sm_103",
    since="0.6.14",
    boundaries=("with_routing",),
    symbols=(TRTLLM_WITH_OUTPUT, TUNE),
    fits=fits_routing,
    stationary=up_first,
)
def trtllm_of_sglang(operands: FusedMoeOperands, out: torch.Tensor, weights: Weights) -> Call:
    """`trtllm_fp8_block_scale_moe` as SGLang calls it, without the shared expert. It gets an output to write,
    and weights as in checkpoints but for the order of gate and up. For these it runs another kernel."""
    routing = routing_by_logits(operands)
    return layer(TRTLLM_WITH_OUTPUT, operands, weights, **routing, **as_in_sglang(operands, out))


@implementation(
    "flashinfer.trtllm_routed@sglang",
    TrtLlmOfSglang,
    requires="flashinfer-python 0.6.18 or later (read to 0.7.2), sm_100 or sm_103",
    since="0.6.18",  # before, it takes an id and a weight packed into one number
    boundaries=("with_quant",),
    symbols=(TRTLLM_ROUTED, TUNE),
    fits=lambda sizes: need(sizes.experts % 4 == 0, f"takes a multiple of 4 experts, not {sizes.experts}"),
    stationary=up_first,
)
def trtllm_routed_of_sglang(operands: FusedMoeOperands, out: torch.Tensor, weights: Weights) -> Call:
    """`trtllm_fp8_block_scale_routed_moe`, which SGLang calls after a top-k kernel of its own. An expert on
    another rank has the id -1, which the kernel skips, as it skips SGLang's rows of padding."""
    return layer(
        TRTLLM_ROUTED, operands, weights, **as_in_sglang(operands, out),
        topk_ids=(operands.topk_ids, operands.topk_weights), routing_method_type=TOP_K,
        routing_bias=None, n_group=None, topk_group=None,
        routed_scaling_factor=1.0,  # the weights of the operands include it
    )  # fmt: skip


def routing_by_logits(operands: FusedMoeOperands) -> dict[str, object]:
    groups, limit = operands.sizes.group_limit
    return {
        "routing_logits": operands.logits, "routing_bias": operands.bias,
        "routing_method_type": DEEPSEEK_V3, "routed_scaling_factor": SCALING,
        "n_group": groups, "topk_group": limit,
    }  # fmt: skip


def as_in_sglang(operands: FusedMoeOperands, out: torch.Tensor) -> dict[str, object]:
    return {
        "use_shuffled_weight": False,
        "weight_layout": MAJOR_K,
        "output": out,
        "tune_max_num_tokens": 1 << (operands.sizes.tokens - 1).bit_length(),  # the next power of two
    }


def layer(function: Function, operands: FusedMoeOperands, weights: Weights, **arguments: object) -> Call:
    """A call that quantises x and computes the layer. arguments: those that differ between rows"""
    x, sizes = operands.x, operands.sizes
    x_q = torch.empty_like(x, dtype=operands.w13.dtype)
    x_scale = torch.empty(sizes.hidden // BLOCK, sizes.tokens, device=x.device)
    quantise = quantiser(x, x_q, x_scale.t(), known_scales(sizes.scales))
    compute = function.bind(
        **arguments, hidden_states=x_q, hidden_states_scale=x_scale,
        gemm1_weights=weights.w31, gemm1_weights_scale=weights.w31_scale,
        gemm2_weights=weights.w2, gemm2_weights_scale=operands.w2_scale,
        num_experts=sizes.experts, local_expert_offset=0, local_num_experts=sizes.routed.local,
        top_k=sizes.topk, intermediate_size=sizes.inter,
    )  # fmt: skip
    return tuned(sequence(quantise, compute), weights)
