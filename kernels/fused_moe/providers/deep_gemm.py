"""DeepGEMM's grouped FP8 products, twice: with the suite's own kernels around them, and as engines run them.

Contiguous: the rows of the experts follow each other. The number of rows of each expert is a multiple of the
alignment. Masked: each expert has as many rows as there are tokens, and a count of those that hold a pair.

Sources, DeepGEMM 2.1.0 to 2.6.1 and sgl-deep-gemm 0.2.5: csrc/apis/{gemm,layout}.hpp, csrc/utils/layout.hpp,
csrc/jit_kernels; of the latter also deep_gemm/__init__.py and utils/layout.py. `deepgemm.contiguous` and
`deepgemm.masked` ran on an H100 and an H200 with sgl-deep-gemm 0.1.4.post1. vLLM 0.31 to 0.33:
model_executor/layers/fused_moe/experts/deep_gemm_moe.py (DeepGemmExperts.apply), before it
prepare_finalize/no_dp_ep.py, and what it calls in fused_moe/deep_gemm_utils.py,
quantization/utils/fp8_utils.py and utils/deep_gemm.py. Untested on hardware. SGLang 0.5.19 to 0.5.23:
srt/layers/moe/moe_runner/deep_gemm.py (pre_permute_standard_to_deep_gemm,
DeepGemmRunnerCore._run_masked_gemm, post_permute_deep_gemm_to_standard), kernels/ops/moe/ep_moe_kernels.py
and kernels/ops/quantization/per_token_group_quant.py. Untested on hardware.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from kernels import platform as machine
from kernels import vendor
from kernels.binding import Function, first_of
from kernels.block_scale_gemm.providers.deep_gemm import packs
from kernels.formats import BLOCK, native_scales
from kernels.fused_moe import layouts
from kernels.fused_moe.layouts import WORD, Alignment, W13AndW2, most_tiles, scale_columns
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import OPS, Call, Implementation, implementation, sequence
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.triton_runtime import require_interpreter
from shapes.case import Case

ALIGNMENTS = range(32, 225, 32)  # of an expert's rows, for the memory plan; a call asks the library


def places(name: str) -> tuple[str, str]:
    """The places of a function of DeepGEMM, and of sgl-deep-gemm."""
    return f"deep_gemm.{name}", f"deep_gemm.utils.layout.{name}"


# By position: versions kept the order of the first arguments, but not their names.
CONTIGUOUS = Function("deep_gemm.m_grouped_fp8_gemm_nt_contiguous", positions=4)
MASKED = Function(
    "deep_gemm.m_grouped_fp8_gemm_nt_masked", "deep_gemm.fp8_m_grouped_gemm_nt_masked", positions=5
)
TRANSFORM_ARGUMENTS = "sf mn k recipe num_groups is_sfa"
TRANSFORM = Function(
    "deep_gemm.transform_sf_into_required_layout", needs=TRANSFORM_ARGUMENTS, when="sm_100 and sm_103"
)
ALIGNMENT = Function(*places("get_mk_alignment_for_contiguous_layout"))
# DeepGEMM from 2.4.2 and sgl-deep-gemm advise an alignment, and have to be told which one is used.
ADVISE = Function(*places("get_theoretical_mk_alignment_for_contiguous_layout"), positions=1)
SET_ALIGNMENT = Function(*places("set_mk_alignment_for_contiguous_layout"), positions=1)

UTILS = "vllm.model_executor.layers.fused_moe.deep_gemm_utils"
FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
WITH_PACKED_SCALES = "sm_100, sm_103 and sm_120"
VLLM_QUANTISE = Function(f"{FP8}.per_token_group_quant_fp8", needs="x group_size column_major_scales")
VLLM_PERMUTE = Function(
    f"{UTILS}.deepgemm_moe_permute",
    needs="aq aq_scale topk_ids local_num_experts expert_map expert_tokens_meta aq_out",
    wishes="use_psum_layout",  # from 0.32 on
)
VLLM_ROWS = Function(
    f"{UTILS}.compute_aligned_M_and_alignment",
    needs="M num_topk local_num_experts alignment expert_tokens_meta",
)
VLLM_ALIGNMENT = Function(f"{DEEP_GEMM}.get_mk_alignment_for_contiguous_layout")
VLLM_ALIGNED = Function(f"{DEEP_GEMM}.mk_alignment_scope", positions=1)
VLLM_MULTIPLY = Function(
    f"{DEEP_GEMM}.m_grouped_fp8_gemm_nt_contiguous", positions=4, wishes="use_psum_layout"
)
VLLM_ACTIVATE = Function(
    f"{FP8}.silu_mul_per_token_group_quant_fp8_colmajor",
    needs="input output",
    wishes="expert_ends expert_alignment",
    when="sm_90",
)
VLLM_ACTIVATE_PACKED = Function(
    f"{FP8}.silu_mul_quant_fp8_packed_triton",
    needs="input output_q group_size",
    wishes="expert_ends expert_alignment",
    when=WITH_PACKED_SCALES,
)
VLLM_ADD_UP = Function(
    f"{UTILS}.deepgemm_unpermute_and_reduce", needs="a topk_ids topk_weights inv_perm expert_map output"
)
VLLM_TRANSFORM = Function(
    f"{DEEP_GEMM}.transform_sf_into_required_layout", needs=TRANSFORM_ARGUMENTS, when=WITH_PACKED_SCALES
)

SGLANG_OPS = "sglang.kernels.ops"
SGLANG_PLACE = Function(
    f"{SGLANG_OPS}.moe.ep_moe_kernels.moe_ep_deepgemm_preprocess",
    needs="topk_ids num_local_experts hidden_states top_k block_shape output_dtype",
)
SGLANG_ACTIVATE = Function(
    f"{SGLANG_OPS}.quantization.per_token_group_quant.per_token_group_quant",
    needs="input group_size scale_ue8m0 fuse_silu_and_mul masked_m column_major_scales",
)
SGLANG_ADD_UP = Function(
    f"{SGLANG_OPS}.moe.ep_moe_kernels.post_reorder_deepgemm",
    needs="down_output output src2dst topk_ids topk_weights topk num_tokens hidden_size "
    "routed_scaling_factor",
)
SGLANG_ALIGN = Function("deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor", positions=1, when="sm_90")


def packed_scale_bytes(sizes: FusedMoeSizes) -> int:
    """The packed scales of the weights: an upper bound, because on sm_90 scales are taken as they are."""
    w13 = 2 * sizes.inter * scale_columns(sizes.hidden, packed=True)
    return sizes.local_experts * 4 * (w13 + sizes.hidden * scale_columns(sizes.inter, packed=True))


def weight_scales(operands: FusedMoeOperands, transform: Function = TRANSFORM) -> W13AndW2:
    """The scales of w13 and w2: fp32 [local, rows/128, k/128], or packed for every row and MN-major."""
    w13, w13_scale, w2, w2_scale = operands.w13, operands.w13_scale, operands.w2, operands.w2_scale
    if not packs(w13.device):
        return w13_scale, w2_scale

    def packed(w: torch.Tensor, scale: torch.Tensor) -> Any:
        local, rows, k = w.shape
        recipe = (1, BLOCK, BLOCK)
        return transform.bind(sf=scale, mn=rows, k=k, recipe=recipe, num_groups=local, is_sfa=False)()

    return packed(w13, w13_scale), packed(w2, w2_scale)


def row_bytes(sizes: FusedMoeSizes) -> int:
    """Bytes of a row: x and h in FP8, gate, up and the expert's output in bf16, and scales in fp32."""
    return sizes.hidden * 3 + sizes.inter * 5 + (sizes.hidden + sizes.inter) // BLOCK * 4


# With the suite's own kernels


def aligned(mean_rows: int) -> tuple[int, Call]:
    """The alignment for experts of so many rows on average, and the call that tells it to the library. It is
    the number of rows of a tile: on sm_90 128, else what the library advises, as in vLLM. The library has one
    alignment for all calls, so that it is set again before each product."""
    if first_of(ADVISE, ALIGNMENT) is ALIGNMENT:
        return int(ALIGNMENT.bind()()), lambda: None
    alignment = int(ADVISE.bind(mean_rows)())
    return alignment, SET_ALIGNMENT.bind(alignment)


def around_products(name: str, product: Function, is_masked: bool) -> type[Implementation]:
    """Declares a row of the suite's own kernels around two products of DeepGEMM. is_masked: whether pairs are
    in the masked layout; else they are in the contiguous one"""

    def groups_of(sizes: FusedMoeSizes, alignment: int) -> tuple[int, int]:
        """The number of groups of rows, each of which has scales of its own, and the rows of a group."""
        if is_masked:
            return sizes.local_experts, -(-sizes.tokens // alignment) * alignment
        return 1, most_tiles(alignment, sizes) * alignment

    def workspace(sizes: FusedMoeSizes) -> int:
        """For as many rows as any alignment needs: `row_bytes` and the row's expert. The row of each pair."""
        rows = max(math.prod(groups_of(sizes, alignment)) for alignment in ALIGNMENTS)
        counts = layouts.MOST_SEGMENTS * sizes.local_experts + 1
        return rows * (row_bytes(sizes) + 4) + 4 * (sizes.pairs + counts)

    @implementation(
        name,
        vendor.DeepGemm,
        requires=(
            "DeepGEMM 2.1.0 or later (read to 2.6.1) or sgl-deep-gemm (read to 0.2.5), with Triton and nvcc; "
            "sm_90, sm_100 or sm_103"
        ),
        activations="fp8",
        also=("triton",),
        symbols=(product, TRANSFORM, (ADVISE, ALIGNMENT), (SET_ALIGNMENT, ALIGNMENT)),
        stationary=weight_scales,
        layout=packed_scale_bytes,
        workspace=workspace,
    )
    def row(operands: FusedMoeOperands, out: torch.Tensor, scales: W13AndW2) -> Call:
        import triton

        from kernels.fused_moe.triton import rows_jit

        require_interpreter(out.device)
        sizes, device, topk_ids = operands.sizes, out.device, operands.topk_ids
        hidden, experts, pairs = sizes.hidden, sizes.local_experts, sizes.pairs
        packed = packs(device)
        mean_rows = max(1, -(-sizes.routed.pairs // max(1, sizes.routed.hit)))  # of an expert that is hit
        alignment, set_alignment = aligned(mean_rows)
        groups, capacity = groups_of(sizes, alignment)
        a = torch.empty(groups, capacity, hidden, dtype=operands.w13.dtype, device=device)
        a_scale = layouts.scale_rows(groups, capacity, hidden, packed, device)
        place: Call
        used_rows: tuple[object, ...]  # the arguments of `product` that tell which rows have an expert
        if is_masked:
            counts = torch.empty(experts, dtype=torch.int32, device=device)
            row_of = torch.empty(pairs, dtype=torch.int32, device=device)
            constants = {"pairs": pairs, "CAPACITY": capacity, "CHUNK": layouts.chunk_for(pairs, device)}
            kernel = rows_jit.masked_kernel[(experts,)]
            place = functools.partial(kernel, topk_ids, counts, row_of, **constants)
            used_rows = (counts, mean_rows)
        else:
            place = Alignment(sizes, alignment, topk_ids, by_pair=True)
            row_of, used_rows = place.row_of, (place.expert_of,)
        x_q = operands.x_q.view(torch.uint8)
        gather = functools.partial(
            rows_jit.gather_kernel[(pairs,)],
            x_q, operands.x_scale, topk_ids, row_of, a.view(torch.uint8), a_scale,
            CAPACITY=capacity, PACKED=packed, BLOCK=BLOCK, PICKS=sizes.picks, HIDDEN=hidden,
            BLOCK_D=triton.next_power_of_2(hidden),
            WORDS=triton.next_power_of_2(scale_columns(hidden, packed=True)),
        )  # fmt: skip
        suite = layouts.AroundProducts(operands, out, row_of, groups, capacity, packed)
        w13_scale, w2_scale = scales

        def multiply(x: tuple[torch.Tensor, torch.Tensor], w: object, y: torch.Tensor) -> Call:
            """x, w: FP8 values, and scales"""
            if not is_masked:  # there is one group, and the library has no dimension for it
                x, y = (x[0][0], x[1][0]), y[0]
            return product.bind(x, w, y, *used_rows)

        up = multiply((a, a_scale), (operands.w13, w13_scale), suite.gate_up)
        down = multiply((suite.h_q, suite.h_scale), (operands.w2, w2_scale), suite.expert_out)
        return sequence(place, gather, set_alignment, up, suite.activate, set_alignment, down, suite.add_up)

    return row


# Engines take `m_grouped_fp8_gemm_nt_contiguous` for prefill. As in vLLM, there are as many rows as any picks
# may need. The kernel skips the rows after the last expert's on sm_90, and multiplies them on sm_100.
contiguous = around_products("deepgemm.contiguous", CONTIGUOUS, is_masked=False)

# Engines take `m_grouped_fp8_gemm_nt_masked` for decode. Pairs need not be counted before they are placed,
# and the kernel skips unused rows, which cost only memory.
masked = around_products("deepgemm.masked", MASKED, is_masked=True)


# As engines run them


@implementation(
    "deepgemm@vllm",
    vendor.Vllm,
    requires="vLLM for CUDA (0.31 to 0.33), sm_90 or, with power-of-two scales, sm_100, sm_103 or sm_120",
    since="0.31",
    kinds=("cuda",),
    archs=("sm_90", *vendor.BLACKWELL, "sm_120"),
    boundaries=("with_quant",),
    activations="fp8",
    symbols=(
        *(VLLM_QUANTISE, VLLM_PERMUTE, VLLM_ROWS, VLLM_ALIGNMENT, VLLM_ALIGNED, VLLM_MULTIPLY),
        *(VLLM_ACTIVATE, VLLM_ACTIVATE_PACKED, VLLM_ADD_UP, VLLM_TRANSFORM),
    ),
    supports=vendor.takes_scales,
    stationary=functools.partial(weight_scales, transform=VLLM_TRANSFORM),
    layout=packed_scale_bytes,
    workspace=lambda sizes: (
        most_tiles(BLOCK, sizes) * BLOCK * (row_bytes(sizes) + 4) + sizes.quantised_bytes + sizes.pairs * 4
    ),
)
def of_vllm(operands: FusedMoeOperands, out: torch.Tensor, scales: W13AndW2) -> Call:
    """vLLM has kernels of its own for quantising, permuting, SiLU and the sum over picks. Except on sm_90, it
    rounds the scales of weights to powers of two when it loads them, so that they must be powers of two here.
    On sm_90 only the scales of activations are rounded up to powers of two. The products get the end of each
    expert's rows (vLLM's psum layout). On sm_120 and before vLLM 0.32 they get the expert of each row."""
    sizes, arch, w13, w2 = operands.sizes, machine.of(out.device).arch, operands.w13, operands.w2
    w13_scale, w2_scale = scales
    by_ends = arch != "sm_120" and VLLM_PERMUTE.takes("use_psum_layout")
    of_experts = {"local_num_experts": sizes.local_experts, "expert_tokens_meta": None}
    most = VLLM_ALIGNMENT.bind()()[0]  # a call may use a smaller alignment, which `permute` returns
    rows = VLLM_ROWS.bind(M=sizes.tokens, num_topk=sizes.picks, alignment=most, **of_experts)()[0]
    gate_up, expert_out = out.new_empty(rows, 2 * sizes.inter), out.new_empty(rows, sizes.hidden)
    h_q, x_of_rows = w13.new_empty(rows, sizes.inter), w13.new_empty(rows, sizes.hidden)
    quantise = VLLM_QUANTISE.bind(x=operands.x, group_size=BLOCK, column_major_scales=False)
    of_picks = {"topk_ids": operands.topk_ids, "expert_map": None}
    # Each call passes its own tensors in place of None: aq, aq_scale and inv_perm.
    permute: Callable[..., Any] = VLLM_PERMUTE.bind(
        aq=None, aq_scale=None, aq_out=x_of_rows, use_psum_layout=by_ends, **of_picks, **of_experts
    )
    with_alignment, multiply = VLLM_ALIGNED.find(), VLLM_MULTIPLY.find()
    layout = {"use_psum_layout": True} if by_ends else {}
    activate: Callable[..., Any]
    if packs(out.device):
        activate = VLLM_ACTIVATE_PACKED.bind(input=gate_up, output_q=h_q, group_size=BLOCK)
    else:
        activate = VLLM_ACTIVATE.bind(input=gate_up, output=h_q)
    add_up: Callable[..., Any] = VLLM_ADD_UP.bind(
        a=expert_out, topk_weights=operands.topk_weights, inv_perm=None, output=out, **of_picks
    )

    def call() -> None:
        x_q, x_scale = quantise()
        a, a_scale, ends_or_experts, row_of, alignment = permute(aq=x_q, aq_scale=x_scale)
        used_rows = {"expert_ends": ends_or_experts, "expert_alignment": alignment} if by_ends else {}
        with with_alignment(alignment):
            multiply((a, a_scale), (w13, w13_scale), gate_up, ends_or_experts, **layout)
            h = activate(**used_rows)
            multiply(h, (w2, w2_scale), expert_out, ends_or_experts, **layout)
        add_up(inv_perm=row_of)

    return call


def has_whole_words(case: Case, platform: Platform) -> Support:
    """Whether the scales of x fill whole int32 words where they are packed."""
    sizes: Any = OPS["fused_moe"].sizes(case.sizes)
    step = BLOCK * WORD if native_scales(platform.arch) == "ue8m0" else BLOCK
    return need(sizes.hidden % step == 0, f"on {platform.arch} needs hidden to be a multiple of {step}")


def rows_of_sglang(sizes: FusedMoeSizes) -> int:
    """The rows of an expert: the least multiple of 256 above the tokens (moe_ep_deepgemm_preprocess)."""
    return (sizes.tokens // 256 + 1) * 256


def workspace_of_sglang(sizes: FusedMoeSizes) -> int:
    """The rows, with aligned copies of the scales that are in row_bytes; x in FP8; the row of each pair."""
    of_row = row_bytes(sizes) + (sizes.hidden + sizes.inter) // BLOCK * 4
    rows = sizes.local_experts * rows_of_sglang(sizes)
    return rows * of_row + sizes.quantised_bytes + sizes.pairs * 4


@implementation(
    "deepgemm@sglang",
    vendor.DeepGemm,
    requires=(
        "SGLang (0.5.19 to 0.5.23) with sgl-deep-gemm, sm_90, or sm_100 and sm_103 with power-of-two scales"
    ),
    also=("sglang", "triton"),
    others_since={"sglang": "0.5.19"},
    boundaries=("with_quant",),
    activations="fp8",
    symbols=(MASKED, TRANSFORM, SGLANG_ALIGN, SGLANG_PLACE, SGLANG_ACTIVATE, SGLANG_ADD_UP),
    supports=has_whole_words,
    stationary=weight_scales,
    layout=packed_scale_bytes,
    workspace=workspace_of_sglang,
)
def of_sglang(operands: FusedMoeOperands, out: torch.Tensor, scales: W13AndW2) -> Call:
    """SGLang's runner where no all-to-all library comes before it, in the masked layout and with kernels of
    its own for quantising, placing, SiLU and the sum over picks. Behind DeepEP, which quantises and places,
    SGLang decodes in this layout too. For prefill that would take more than a quarter of free memory in it
    (SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION), SGLang takes a contiguous layout; this row does not."""
    sizes, packed = operands.sizes, packs(out.device)
    w13, w2, (w13_scale, w2_scale) = operands.w13, operands.w2, scales
    rows = rows_of_sglang(sizes)
    gate_up = out.new_empty(sizes.local_experts, rows, 2 * sizes.inter)
    expert_out = out.new_empty(sizes.local_experts, rows, sizes.hidden)
    # A hint for the choice of tiles: the mean rows of an expert. SGLang divides by the experts of all ranks.
    mean_rows = max(1, -(-sizes.pairs // (sizes.experts + sizes.shared)))
    place = SGLANG_PLACE.bind(
        topk_ids=operands.topk_ids, top_k=sizes.picks, num_local_experts=sizes.local_experts,
        hidden_states=operands.x, output_dtype=w13.dtype, block_shape=[BLOCK, BLOCK],
    )  # fmt: skip
    multiply = MASKED.find()
    align = (lambda scale: scale) if packed else SGLANG_ALIGN.find()
    activate: Callable[..., Any] = SGLANG_ACTIVATE.bind(
        input=gate_up, fuse_silu_and_mul=True, masked_m=None,  # each call passes its own, and src2dst below
        group_size=BLOCK, scale_ue8m0=packed, column_major_scales=True,
    )  # fmt: skip
    add_up: Callable[..., Any] = SGLANG_ADD_UP.bind(
        down_output=expert_out, output=out, src2dst=None,
        topk_ids=operands.topk_ids, topk_weights=operands.topk_weights, topk=sizes.picks,
        num_tokens=sizes.tokens, hidden_size=sizes.hidden,
        routed_scaling_factor=1.0,  # the weights of the operands include it
    )  # fmt: skip

    def call() -> None:
        counts, _expected_m, row_of, a, a_scale = place()
        multiply((a, align(a_scale)), (w13, w13_scale), gate_up, counts, mean_rows)
        h_q, h_scale = activate(masked_m=counts)
        multiply((h_q, align(h_scale)), (w2, w2_scale), expert_out, counts, mean_rows)
        add_up(src2dst=row_of)

    return call
