"""AITER's fused MoE: as engines call it, its one-stage assembly, its two CK stages, and its Triton product.

Sources, v0.1.5 to v0.1.20 and e404860: aiter/fused_moe.py, aiter/ops/{moe_op,quant,shuffle}.py,
csrc/py_itfs_cu/asm_fmoe.cu, op_tests/test_moe_blockscale.py and op_tests/triton_tests/moe/test_moe.py. For
how engines call it: fused_moe/experts/rocm_aiter_moe.py of vLLM 0.33, srt/layers/moe/moe_runner/aiter.py and
kernels/ops/moe/moe_sorting_small.py of SGLang 0.5.23.

With expert parallelism both engines give ids and a mask of all experts. The rows here, and SGLang after
DeepEP, give experts on other ranks one further id, which takes one more launch. Untested on hardware.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from kernels import platform as platforms
from kernels import vendor
from kernels.binding import BindingError, Function, Symbol, first_of
from kernels.block_scale_gemm.providers.aiter import SHUFFLE, marked_tiles
from kernels.formats import BLOCK, fp8_format
from kernels.fused_moe import layouts
from kernels.fused_moe.layouts import MOST_SEGMENTS, Alignment, W13AndW2, most_tiles
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, Prepared, Unsupported, implementation, sequence
from kernels.platform import Platform
from kernels.support import Support
from kernels.triton_runtime import require_interpreter

ONE_STAGE_ROWS = 32  # rows of a sorted block for the one-stage assembly

SORTED = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids", "out")
"""What SORT returns, by the names of the kernels' arguments."""
OF_EACH_CALL = dict.fromkeys(SORTED)  # None, in place of which each call of a kernel passes a tensor

MOST_ROWS = 128  # rows of the largest sorted block, for the memory plan
SORTED_BYTES = 12  # of a place in sorted blocks, at most: its token, its weight, its block's expert; 4 each
SPLIT_ROWS = 16  # rows of a block for which CK may split K
CACHED_PAIRS = 64  # pairs of an expert from which AITER's CK kernels cache its weights (`use_nt` is False)

SORTING_OF_VLLM, SORTING_OF_SGLANG = 0, 2
"""What the engines give as moe_sorting_dispatch_policy: VLLM_ROCM_AITER_MOE_DISPATCH_POLICY (envs.py) and
SGLANG_AITER_MOE_SORTING_DISPATCH_POLICY (srt/environ.py)."""

ACTIVATION = Symbol("aiter.ops.enum.ActivationType", "aiter.ActivationType")
QUANTISATION = Symbol("aiter.ops.enum.QuantType", "aiter.QuantType")
LAYER = Function(
    "aiter.fused_moe.fused_moe",
    needs="hidden_states w1 w2 topk_weight topk_ids expert_mask activation quant_type w1_scale w2_scale "
    "moe_sorting_dispatch_policy",
)
PADDED_TOKENS = Function("aiter.fused_moe.get_padded_M", positions=1)
CONFIGURATION = Function(
    "aiter.fused_moe.get_2stage_cfgs",
    needs="token model_dim inter_dim expert topk dtype q_dtype_a q_dtype_w q_type use_g1u1 activation "
    "doweight_stage1",
    wishes="hidden_pad intermediate_pad bias1 bias2 is_shuffled is_ep opus_weights_shuffled",
)
SORT = Function(
    "aiter.fused_moe.moe_sorting",
    needs="topk_ids topk_weights num_experts model_dim moebuf_dtype block_size expert_mask",
)
ONE_STAGE = Function(
    "aiter.ops.moe_op.fmoe_fp8_blockscale_g1u1",
    needs=f"{' '.join(SORTED)} input gate down topk input_scale fc1_scale fc2_scale",
    wishes="kernelName",  # versions before 0.1.10 require it
)
STAGE_ARGUMENTS = f"{' '.join(SORTED)} w1 w2 topk block_m quant_type activation"
GATE_UP = Function(
    "aiter.ops.moe_op.ck_moe_stage1_fwd",
    needs=f"{STAGE_ARGUMENTS} hidden_states a1_scale w1_scale",
    wishes="splitk dst_type use_non_temporal_load",
)
DOWN = Function(
    "aiter.ops.moe_op.ck_moe_stage2_fwd",
    needs=f"{STAGE_ARGUMENTS} inter_states a2_scale w2_scale",
    wishes="use_non_temporal_load",
)
QUANTISE = Function("aiter.ops.quant.per_group_quant_hip", needs="x quant_dtype group_size")
# SGLang's own sorting of few pairs, which replaces AITER's from 0.5.21. A version without it is known by what
# would call it: the runner, or before 0.5.15 the MoE method.
SMALL_SORT = Function(
    "sglang.kernels.ops.moe.moe_sorting_small.apply_aiter_small_moe_sort_patch", when="gfx950"
)
RUNNER = Symbol(
    "sglang.srt.layers.moe.moe_runner.aiter.AiterRunnerCore",
    "sglang.srt.layers.quantization.fp8.Fp8MoEMethod",
    when="gfx950",
)
SMALL_SORT_ARCHS = ("gfx950",)

PRODUCT = Function(
    "aiter.ops.triton.moe.moe_op.fused_moe",
    "aiter.ops.triton.moe_op.fused_moe",
    needs="A B C A_scale B_scale B_zp topk_weights topk_ids sorted_token_ids expert_ids "
    "num_tokens_post_padded mul_routed_weight top_k compute_type use_fp8_w8a8 use_int8_w8a16 use_int4_w4a16 "
    "block_shape config",
)
TRITON_CONFIGURATION = Function(
    "aiter.ops.triton.utils.moe_config_utils.get_optimal_moe_config", needs="dtype use_fp8_w8a8 M"
)


class AiterMoe(vendor.Aiter):
    """Rounds h to FP8, and x where the call takes it in bf16."""

    requires = (
        "AITER 0.1.5 or later (read to 0.1.20; github ROCm/aiter, distribution amd-aiter), gfx942 or gfx950"
    )
    activations = "fp8"


class Shuffled(AiterMoe):
    """Takes shuffled weights and allocates the output."""

    allocates = True

    def layout(self, sizes: FusedMoeSizes) -> int:
        return sizes.local_experts * sizes.expert_values

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Sorted pairs; x in FP8; h of every pair in bf16 and in FP8 with fp32 scales. Where there are no
        more pairs than experts, CK may split K, and needs gate and up in fp32 for a block of each pair."""
        pairs = sizes.pairs
        sorted_pairs = (pairs + (sizes.local_experts + 1) * MOST_ROWS) * SORTED_BYTES
        h = pairs * (sizes.inter * (2 + 1) + sizes.inter // BLOCK * 4)
        gate_up = 4 * pairs * SPLIT_ROWS * 2 * sizes.inter if pairs <= sizes.local_experts else 0
        return sorted_pairs + sizes.quantised_bytes + h + gate_up


class Dispatched(Shuffled):
    """AITER's `fused_moe`, the entry point that engines call."""

    boundaries = ("with_quant",)
    symbols: ClassVar = (SHUFFLE, ACTIVATION, QUANTISATION, LAYER, PADDED_TOKENS, CONFIGURATION)


def shuffled(operands: FusedMoeOperands) -> W13AndW2:
    """w13 and w2 in tiles, which are marked as such."""
    return marked_tiles(operands.w13), marked_tiles(operands.w2)


def masked_ids(operands: FusedMoeOperands) -> tuple[torch.Tensor, Call, torch.Tensor | None]:
    """`expert_ids` with AITER's mask: 1 for each expert of the rank, 0 for the id that stands for others."""
    return layouts.expert_ids(operands, [1] * operands.sizes.local_experts + [0])


@implementation("aiter.dispatch", Dispatched, stationary=shuffled)
def dispatch(operands: FusedMoeOperands, out: None, weights: W13AndW2) -> Prepared:
    """`fused_moe` as vLLM calls it. It quantises, sorts, and computes in one or two stages, by its tuned
    configuration, or by its own rule where it has none for the sizes."""
    return dispatched(operands, weights, SORTING_OF_VLLM)


class DispatchedOfSglang(Dispatched, vendor.Sglang):
    """On gfx950 it needs SGLang too."""

    runtime = vendor.Sglang.runtime
    also = ()  # Sglang's own `also` is Triton, which this row does not need

    def installed(self, platform: Platform) -> Support:
        engine = platform.library("sglang")
        needed = [engine] if platform.arch in SMALL_SORT_ARCHS else []
        return Support.all_of(super().installed(platform), *needed)


@implementation(
    "aiter.dispatch@sglang",
    DispatchedOfSglang,
    requires="AITER 0.1.5 or later (read to 0.1.20), gfx942 or gfx950; on gfx950 SGLang (read at 0.5.23) too",
    symbols=(*Dispatched.symbols, (SMALL_SORT, RUNNER)),
    stationary=shuffled,
)
def dispatch_of_sglang(operands: FusedMoeOperands, out: None, weights: W13AndW2) -> Prepared:
    """`fused_moe` as SGLang calls it: with another way of sorting, and on gfx950 with SGLang's kernel that
    sorts up to 256 pairs, which replaces AITER's in the whole process."""
    # Raises for an SGLang that has neither: what it runs is unknown.
    sorts_in_sglang = platforms.of(operands.w13.device).arch in SMALL_SORT_ARCHS
    if sorts_in_sglang and first_of(SMALL_SORT, RUNNER) is SMALL_SORT:
        SMALL_SORT.bind()()
    return dispatched(operands, weights, SORTING_OF_SGLANG)


def dispatched(operands: FusedMoeOperands, weights: W13AndW2, sorting: int) -> Prepared:
    """The call of `fused_moe`. sorting: SORTING_OF_VLLM or SORTING_OF_SGLANG"""
    w13, w2 = weights
    ids, write_ids, mask = masked_ids(operands)
    layer = LAYER.bind(
        hidden_states=operands.x, topk_weight=operands.topk_weights, topk_ids=ids, expert_mask=mask,
        w1=w13, w2=w2, w1_scale=operands.w13_scale, w2_scale=operands.w2_scale,
        activation=ACTIVATION.find().Silu, quant_type=QUANTISATION.find().per_128x128,
        moe_sorting_dispatch_policy=sorting,
    )  # fmt: skip
    call = sequence(write_ids, layer)
    return Prepared(operands, None, call, picked=lambda: picked(operands.sizes, mask is not None))


def picked(sizes: FusedMoeSizes, is_masked: bool) -> str:
    """For the record: the configuration that `fused_moe` finds; empty where this version does not tell."""
    q_dtype = fp8_format(sizes.fp8).dtype
    try:
        tuned: Any = CONFIGURATION.bind(
            token=PADDED_TOKENS.bind(sizes.tokens)(), topk=sizes.picks, expert=sizes.local_experts,
            model_dim=sizes.hidden, inter_dim=sizes.inter, hidden_pad=0, intermediate_pad=0,
            dtype=torch.bfloat16, q_dtype_a=q_dtype, q_dtype_w=q_dtype, q_type=QUANTISATION.find().per_1x128,
            activation=ACTIVATION.find().Silu, use_g1u1=True, doweight_stage1=False, bias1=None, bias2=None,
            is_shuffled=True, is_ep=is_masked, opus_weights_shuffled=True,
        )()  # fmt: skip
    except (BindingError, Unsupported):
        return ""
    stages = [tuned.stage1] if tuned.run_1stage else [tuned.stage1, tuned.stage2]
    names = [getattr(stage, "keywords", {}).get("kernelName", "") for stage in stages]
    how = "one stage" if tuned.run_1stage else "two stages"
    return f"{how}, {'tuned: ' + ' '.join(names) if any(names) else 'not tuned'}"


def sorter(operands: FusedMoeOperands, rows: int) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that sorts the pairs into blocks of so many rows, for the kernels that `fused_moe` calls. It
    returns arguments of these kernels by name (SORTED); `out` is zeros, because they add to it."""
    sizes = operands.sizes
    ids, write_ids, mask = masked_ids(operands)
    experts = sizes.local_experts if mask is None else len(mask)
    sort = SORT.bind(
        topk_ids=ids, topk_weights=operands.topk_weights, num_experts=experts, expert_mask=mask,
        model_dim=sizes.hidden, moebuf_dtype=torch.bfloat16, block_size=rows,
    )  # fmt: skip

    def sorted_pairs() -> dict[str, torch.Tensor]:
        write_ids()
        return dict(zip(SORTED, sort(), strict=True))

    return sorted_pairs


@implementation("aiter.asm", Shuffled, symbols=(SHUFFLE, SORT, ONE_STAGE), stationary=shuffled)
def asm(operands: FusedMoeOperands, out: None, weights: W13AndW2) -> Prepared:
    """Sorting, then `fmoe_fp8_blockscale_g1u1`: gate, up, SiLU, requantising and down in one assembly kernel
    that adds to the output with atomics."""
    w13, w2 = weights
    sorted_pairs = sorter(operands, ONE_STAGE_ROWS)
    x_scale = operands.x_scale.t().contiguous()  # [hidden/128, tokens], as the assembly reads it
    kernel: Callable[..., Any] = ONE_STAGE.bind(
        **OF_EACH_CALL, input=operands.x_q, input_scale=x_scale, topk=operands.sizes.picks,
        gate=w13, fc1_scale=operands.w13_scale, down=w2, fc2_scale=operands.w2_scale, kernelName="",
    )  # fmt: skip

    def call() -> object:
        pairs = sorted_pairs()
        kernel(**pairs)
        return pairs["out"]

    return Prepared(operands, None, call, inputs={**operands.live_tensors(), "x_scale": x_scale.t()})


@implementation(
    "aiter.ck",
    Shuffled,
    symbols=(SHUFFLE, ACTIVATION, QUANTISATION, PADDED_TOKENS, SORT, GATE_UP, QUANTISE, DOWN),
    stationary=shuffled,
)
def ck(operands: FusedMoeOperands, out: None, weights: W13AndW2) -> Call:
    """Sorting, CK's gate and up with SiLU in bf16, requantising, and CK's down, with CK's own choice of
    kernels. K is not split; AITER's dispatch splits it where there are fewer pairs than experts."""
    sizes, x_q, (w13, w2) = operands.sizes, operands.x_q, weights
    rows = 64 if sizes.tokens > 32 else 16  # what `get_2stage_cfgs` takes where nothing is tuned
    sorted_pairs = sorter(operands, rows)
    h = x_q.new_empty(sizes.tokens, sizes.picks, sizes.inter, dtype=torch.bfloat16)
    quantise: Callable[..., Any] = QUANTISE.bind(x=h, quant_dtype=x_q.dtype, group_size=BLOCK)
    # AITER's dispatch decides by the padded number of tokens, with which it looks up configurations.
    pairs_of_expert = PADDED_TOKENS.bind(sizes.tokens)() * sizes.picks // sizes.local_experts
    of_both_stages = {
        **OF_EACH_CALL, "w1": w13, "w2": w2, "topk": sizes.picks, "block_m": rows,
        "quant_type": QUANTISATION.find().per_1x128, "activation": ACTIVATION.find().Silu,
        "use_non_temporal_load": pairs_of_expert < CACHED_PAIRS,
    }  # fmt: skip
    x_and_scales = {"hidden_states": x_q, "a1_scale": operands.x_scale, "w1_scale": operands.w13_scale}
    # Each call passes h in FP8 and its scales, which are new tensors, in place of None.
    h_and_scales = {"inter_states": None, "a2_scale": None, "w2_scale": operands.w2_scale}
    gate_up: Callable[..., Any] = GATE_UP.bind(**of_both_stages, **x_and_scales, splitk=0, dst_type=h.dtype)
    down: Callable[..., Any] = DOWN.bind(**of_both_stages, **h_and_scales)

    def call() -> object:
        pairs = sorted_pairs()
        # The first stage gets no routing weights, because the second applies them.
        gate_up(**pairs | {"out": h, "sorted_weights": None})
        h_q, h_scale = quantise()
        down(**pairs | {"inter_states": h_q, "a2_scale": h_scale})
        return pairs["out"]

    return call


def triton_bytes(sizes: FusedMoeSizes) -> int:
    """For each pair gate and up in bf16, h in FP8 with fp32 scales, the expert's output in bf16, and its row.
    Of `Alignment`, for any size of tiles, the slots, the expert of each tile, the counts of segments, and the
    number of tiles; the number of slots."""
    gate_up, h = 2 * 2 * sizes.inter, sizes.inter + sizes.inter // BLOCK * 4
    of_pair = gate_up + h + 2 * sizes.hidden + 4
    slots = max(most_tiles(rows, sizes) * (rows + 1) for rows in (16, 64, 128, 256))
    return sizes.pairs * of_pair + 4 * (slots + MOST_SEGMENTS * sizes.local_experts + 2)


@implementation(
    "aiter.triton",
    AiterMoe,
    also=("triton",),
    symbols=(PRODUCT, TRITON_CONFIGURATION),
    workspace=triton_bytes,
)
def triton_products(operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
    """`moe_op.fused_moe` twice, with the configuration that AITER has for so many tokens: gate and up of
    quantised x, then down, of weights that are not shuffled. AITER leaves sorting, SiLU, requantising and the
    sum over picks to its caller; they are the suite's own kernels."""
    import triton.language as tl

    require_interpreter(out.device)
    sizes, device, w13, w2 = operands.sizes, out.device, operands.w13, operands.w2
    config = TRITON_CONFIGURATION.bind(dtype=w13.dtype, use_fp8_w8a8=True, M=sizes.tokens)()
    rows = config["BLOCK_SIZE_M"]
    sort = Alignment(sizes, rows, operands.topk_ids)
    used_slots = torch.empty(1, dtype=torch.int32, device=device)
    row_of = torch.arange(sizes.pairs, dtype=torch.int32, device=device)
    suite = layouts.AroundProducts(operands, out, row_of, groups=1, rows=sizes.pairs)

    def product(result: torch.Tensor, **factors: object) -> Call:
        """factors: A and B with their scales, and top_k: the number of pairs that share a row of A"""
        return PRODUCT.bind(
            **factors, C=result.view(sizes.tokens, sizes.picks, -1), compute_type=tl.bfloat16, B_zp=None,
            topk_ids=operands.topk_ids, topk_weights=operands.topk_weights, mul_routed_weight=False,
            sorted_token_ids=sort.slots, expert_ids=sort.expert_of, num_tokens_post_padded=used_slots,
            use_fp8_w8a8=True, use_int8_w8a16=False, use_int4_w4a16=False,
            block_shape=[BLOCK, BLOCK], config=config,
        )  # fmt: skip

    x_and_scale = {"A": operands.x_q, "A_scale": operands.x_scale}
    h_and_scale = {"A": suite.h_q[0], "A_scale": suite.h_scale[0]}
    up = product(suite.gate_up, **x_and_scale, B=w13, B_scale=operands.w13_scale, top_k=sizes.picks)
    down = product(suite.expert_out, **h_and_scale, B=w2, B_scale=operands.w2_scale, top_k=1)
    count = functools.partial(torch.mul, sort.used_tiles, rows, out=used_slots)
    call = sequence(sort, count, up, suite.activate, down, suite.add_up)
    tiles = "x".join(str(config.get(f"BLOCK_SIZE_{side}")) for side in "MNK")
    return Prepared(operands, out, call, picked=lambda: f"tiles of {tiles}")
