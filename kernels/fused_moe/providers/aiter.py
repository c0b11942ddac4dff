"""AITER's fused MoE on MI300X and MI355X: as engines call it, its one-stage assembly, its two CK stages.

Weights lie in tiles of 16x16 (`shuffle_weight`), scales as in checkpoints. Sources, v0.1.5 to v0.1.20 and
e404860: aiter/fused_moe.py, aiter/ops/{moe_op,quant,shuffle}.py, csrc/py_itfs_cu/asm_fmoe.cu and
op_tests/test_moe_blockscale.py. For how engines call it: fused_moe/experts/rocm_aiter_moe.py of vLLM 0.33,
srt/layers/moe/moe_runner/aiter.py and kernels/ops/moe/moe_sorting_small.py of SGLang 0.5.23. With expert
parallelism both give ids of all experts with a mask of all; SGLang after DeepEP, and the rows here, an id of
its own to what lies on other ranks, which takes one launch more. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import platform as platforms
from kernels import vendor
from kernels.binding import BindingError, Function, Symbol, Taken, first_of
from kernels.formats import BLOCK, fp8_format
from kernels.fused_moe.expert_ids import ExpertIds
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared, Unsupported
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch

ONE_STAGE_ROWS = 32
"""Pairs of an expert that a program of the one-stage assembly takes: rows of a sorted block."""

PAIRS = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids", "out")
"""What sorting gives, by the names of the kernels' arguments."""

MOST_ROWS = 128
"""Rows of the largest sorted block, for the memory plan."""

STREAMED = 64
"""Pairs of an expert below which AITER has its CK kernels read weights past the caches (`use_nt`)."""

SORTING_OF_VLLM, SORTING_OF_SGLANG = 0, 2
"""VLLM_ROCM_AITER_MOE_DISPATCH_POLICY (envs.py), SGLANG_AITER_MOE_SORTING_DISPATCH_POLICY (srt/environ.py):
what they give as moe_sorting_dispatch_policy."""

SHUFFLE = Function("aiter.ops.shuffle.shuffle_weight", needs="x layout")
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
    needs=f"{' '.join(PAIRS)} input gate down topk input_scale fc1_scale fc2_scale",
    wishes="kernelName",  # which versions before 0.1.10 want
)
OF_STAGES = f"{' '.join(PAIRS)} w1 w2 topk block_m quant_type activation"
GATE_UP = Function(
    "aiter.ops.moe_op.ck_moe_stage1_fwd",
    needs=f"{OF_STAGES} hidden_states a1_scale w1_scale",
    wishes="splitk dst_type use_non_temporal_load",
)
DOWN = Function(
    "aiter.ops.moe_op.ck_moe_stage2_fwd",
    needs=f"{OF_STAGES} inter_states a2_scale w2_scale",
    wishes="use_non_temporal_load",
)
QUANTISE = Function("aiter.ops.quant.per_group_quant_hip", needs="x quant_dtype group_size")
# SGLang's sorting of few pairs, in AITER's place; before 0.5.21 its runner had none, before 0.5.15 it had no
# runner for AITER.
SMALL_SORT = Function(
    "sglang.kernels.ops.moe.moe_sorting_small.apply_aiter_small_moe_sort_patch", when="gfx950"
)
WITHOUT_SMALL_SORT = Symbol(
    "sglang.srt.layers.moe.moe_runner.aiter.AiterRunnerCore",
    "sglang.srt.layers.quantization.fp8.Fp8MoEMethod",
    when="gfx950",
)
SORTED_BY_SGLANG = ("gfx950",)


def two_stage_rows(tokens: int) -> int:
    """Rows of a sorted block for CK's block-scale kernels where nothing is tuned: `get_2stage_cfgs`."""
    return 64 if tokens > 32 else 16


def is_streamed(sizes: FusedMoeSizes) -> bool:
    """What AITER's dispatch gives its CK kernels as use_non_temporal_load: by the tokens up to which it
    looks configurations up."""
    tokens = PADDED_TOKENS.bind(sizes.tokens)()
    return bool(tokens * sizes.picks // sizes.local_experts < STREAMED)


class _AiterBoundMoe(Prepared):
    """The shuffled weights, those of `first` where they are the same; ids, and the mask of experts."""

    operands: FusedMoeOperands
    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        super().__init__(operands)
        same = first if first is not None and first.operands.w13 is operands.w13 else None
        self.w13 = same.w13 if same else shuffled(operands.w13)
        self.w2 = same.w2 if same else shuffled(operands.w2)
        self.local = ExpertIds(operands)
        self.mask = expert_mask(self.local, operands.sizes)


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """FP8 [local, N, K] in tiles of 16 rows and 32 of K, marked as that: else kernels for plain rows run."""
    laid = SHUFFLE.bind(x=weight, layout=(16, 16))()
    laid.is_shuffled = True
    return laid


def expert_mask(local: ExpertIds, sizes: FusedMoeSizes) -> torch.Tensor | None:
    """int32: 1 for experts that are here, 0 for the one that stands for all others."""
    return local.per_expert([1] * sizes.local_experts + [0])


def block_major(x_scale: torch.Tensor) -> torch.Tensor:
    """fp32 [hidden/128, tokens]: the order in which the assembly reads scales of x."""
    return x_scale.t().contiguous()


class _Dispatch(_AiterBoundMoe):
    sorting = SORTING_OF_VLLM

    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        super().__init__(operands, first)
        self.layer = LAYER.bind(
            hidden_states=operands.x,
            w1=self.w13,
            w2=self.w2,
            topk_weight=operands.topk_weights,
            topk_ids=self.local.ids,
            expert_mask=self.mask,
            activation=ACTIVATION.find().Silu,
            quant_type=QUANTISATION.find().per_128x128,
            w1_scale=operands.w13_scale,
            w2_scale=operands.w2_scale,
            moe_sorting_dispatch_policy=self.sorting,
        )

    def call(self) -> None:
        self.local.write()
        self.out = self.layer()

    def picked(self) -> str:
        """The configuration that `fused_moe` looks up for these sizes; empty where it cannot be asked."""
        try:
            tuned = configuration(self.operands.sizes, self.mask is not None)
        except (BindingError, Unsupported):
            return ""
        stages = [tuned.stage1, *([] if tuned.run_1stage else [tuned.stage2])]
        names = [getattr(stage, "keywords", {}).get("kernelName", "") for stage in stages]
        how = "one stage" if tuned.run_1stage else "two stages"
        return f"{how}, {'tuned: ' + ' '.join(names) if any(names) else 'not tuned'}"


class _DispatchOfSglang(_Dispatch):
    sorting = SORTING_OF_SGLANG

    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        if platforms.of(operands.w13.device).arch in SORTED_BY_SGLANG:
            runner = first_of(SMALL_SORT, WITHOUT_SMALL_SORT)
            if runner is SMALL_SORT:
                SMALL_SORT.bind()()
        super().__init__(operands, first)


def configuration(sizes: FusedMoeSizes, masked: bool) -> Any:  # of AITER
    """AITER's MOEMetadata for these sizes (stage1, stage2, run_1stage, ...), found as `fused_moe` finds it.
    Raises BindingError or Unsupported where this version does not tell."""
    import torch

    q_dtype = fp8_format(sizes.fp8).dtype
    return CONFIGURATION.bind(
        token=PADDED_TOKENS.bind(sizes.tokens)(),
        model_dim=sizes.hidden,
        inter_dim=sizes.inter,
        expert=sizes.local_experts,
        topk=sizes.picks,
        dtype=torch.bfloat16,
        q_dtype_a=q_dtype,
        q_dtype_w=q_dtype,
        q_type=QUANTISATION.find().per_1x128,
        use_g1u1=True,
        activation=ACTIVATION.find().Silu,
        doweight_stage1=False,
        hidden_pad=0,
        intermediate_pad=0,
        bias1=None,
        bias2=None,
        is_shuffled=True,
        is_ep=masked,
        opus_weights_shuffled=True,
    )()


class _Sorted(_AiterBoundMoe):
    """For kernels below `fused_moe`, which take quantised x and sorted pairs."""

    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None, rows: int) -> None:
        import torch

        super().__init__(operands, first)
        sizes = operands.sizes
        self.sort = SORT.bind(
            topk_ids=self.local.ids,
            topk_weights=operands.topk_weights,
            num_experts=sizes.local_experts + self.local.apart,
            model_dim=sizes.hidden,
            moebuf_dtype=torch.bfloat16,
            block_size=rows,
            expert_mask=self.mask,
        )

    def sorted_pairs(self) -> dict[str, torch.Tensor]:
        """Sorted afresh, by the names of the kernels' arguments; `out` is zeroed, as they add to it."""
        self.local.write()
        return dict(zip(PAIRS, self.sort(), strict=True))


class _OneStage(_Sorted):
    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        super().__init__(operands, first, ONE_STAGE_ROWS)
        self.x_scale = block_major(operands.x_scale)
        self.kernel = ONE_STAGE.bind(
            **dict.fromkeys(PAIRS),
            input=operands.x_q,
            gate=self.w13,
            down=self.w2,
            topk=operands.sizes.picks,
            input_scale=self.x_scale,
            fc1_scale=operands.w13_scale,
            fc2_scale=operands.w2_scale,
            kernelName="",
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {**self.operands.live_tensors(), "x_scale": self.x_scale.t()}

    def call(self) -> None:
        pairs = self.sorted_pairs()
        self.kernel(**pairs)
        self.out = pairs["out"]


class _TwoStages(_Sorted):
    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        import torch

        o, sizes = operands, operands.sizes
        rows = two_stage_rows(sizes.tokens)
        super().__init__(operands, first, rows)
        shape = (sizes.tokens, sizes.picks, sizes.inter)
        self.h = torch.empty(shape, dtype=torch.bfloat16, device=o.x_q.device)
        self.quantise = QUANTISE.bind(x=self.h, quant_dtype=o.x_q.dtype, group_size=BLOCK)
        both = {
            **dict.fromkeys(PAIRS),
            "w1": self.w13,
            "w2": self.w2,
            "topk": sizes.picks,
            "block_m": rows,
            "quant_type": QUANTISATION.find().per_1x128,
            "activation": ACTIVATION.find().Silu,
            "use_non_temporal_load": is_streamed(sizes),
        }
        self.gate_up = GATE_UP.bind(
            **both,
            hidden_states=o.x_q,
            a1_scale=o.x_scale,
            w1_scale=o.w13_scale,
            splitk=0,
            dst_type=self.h.dtype,
        )
        self.down = DOWN.bind(**both, inter_states=None, a2_scale=None, w2_scale=o.w2_scale)

    def call(self) -> None:
        pairs = self.sorted_pairs()
        self.gate_up(**pairs | unweighted(self.h))
        h_q, h_scale = self.quantise()
        self.down(**pairs | {"inter_states": h_q, "a2_scale": h_scale})
        self.out = pairs["out"]


def unweighted(h: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The first stage's output; routing weights count once, after the second."""
    return {"out": h, "sorted_weights": None}


class AiterMoe(vendor.Aiter):
    """Rounds h to FP8, and x where the call takes it in bf16."""

    requires = (
        "AITER 0.1.5 or later (read to 0.1.20; github ROCm/aiter, distribution amd-aiter), gfx942 or gfx950"
    )
    activations = "fp8"


class Shuffled(AiterMoe):
    """Variants that take shuffled weights and give an output of their own. `Bound` is what prepare gives."""

    allocates = True
    Bound: ClassVar[type[_AiterBoundMoe]]

    def layout(self, sizes: FusedMoeSizes) -> int:
        return sizes.local_experts * 3 * sizes.hidden * sizes.inter

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Sorted pairs; x quantised; h of every pair in bf16 and in FP8. Where pairs are fewer than experts,
        CK may split K: gate and up of padded pairs in fp32."""
        pairs = sizes.tokens * sizes.picks
        ordered = (pairs + (sizes.local_experts + 1) * MOST_ROWS) * 12
        x = sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4)
        h = pairs * (sizes.inter * 3 + sizes.inter // BLOCK * 4)
        split = pairs * 16 * 2 * sizes.inter * 4 if pairs <= sizes.local_experts else 0
        return ordered + x + h + split

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        return self.Bound(operands, None)

    def prepare_turn(
        self, first: _AiterBoundMoe | None, operands: FusedMoeOperands, out: torch.Tensor | None
    ) -> Prepared:
        return self.Bound(operands, first)


class DispatchMoe(Shuffled):
    """`fused_moe` as vLLM calls it: quantises, sorts, and takes one stage or two by its tuned
    configurations, or by its own rule where it has none for the size."""

    name = "aiter.dispatch"
    boundaries = ("with_quant",)
    symbols: ClassVar[Sequence[Taken]] = (
        SHUFFLE,
        ACTIVATION,
        QUANTISATION,
        LAYER,
        PADDED_TOKENS,
        CONFIGURATION,
    )
    Bound = _Dispatch


class DispatchOfSglang(DispatchMoe, vendor.Sglang):
    """`fused_moe` as SGLang calls it: another way of sorting, and on gfx950 its own kernel that sorts up to
    256 pairs, which it puts in the place of AITER's for the whole process."""

    name = "aiter.dispatch@sglang"
    requires = (
        "AITER 0.1.5 or later (read to 0.1.20), gfx942 or gfx950; on gfx950 SGLang (read at 0.5.23) too"
    )
    runtime = vendor.Sglang.runtime
    library = DispatchMoe.library
    kinds = DispatchMoe.kinds
    install = DispatchMoe.install
    also: ClassVar[Mapping[str, str]] = {}
    symbols = (*DispatchMoe.symbols, (SMALL_SORT, WITHOUT_SMALL_SORT))
    Bound = _DispatchOfSglang

    def installed(self, platform: Platform) -> Support:
        sorts = platform.arch in SORTED_BY_SGLANG
        engine = platform.library("sglang", install=vendor.Sglang.install) if sorts else Support(True)
        return Support.all_of(super().installed(platform), engine)


class OneStage(Shuffled):
    """Sorting, then `fmoe_fp8_blockscale_g1u1`: gate, up, SiLU, requantising and down in one assembly kernel
    that adds to the output with atomics."""

    name = "aiter.asm"
    symbols = (SHUFFLE, SORT, ONE_STAGE)
    Bound = _OneStage


class TwoStages(Shuffled):
    """Sorting, CK's gate and up with SiLU in bf16, requantising, CK's down; CK's own choice of kernels. K is
    not split, as AITER's dispatch splits it where pairs are fewer than experts."""

    name = "aiter.ck"
    symbols = (SHUFFLE, ACTIVATION, QUANTISATION, PADDED_TOKENS, SORT, GATE_UP, QUANTISE, DOWN)
    Bound = _TwoStages
