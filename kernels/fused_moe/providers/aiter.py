"""AITER's fused MoE on MI300X and MI355X: as engines call it, its one-stage assembly, its two CK stages.

Weights lie in tiles of 16x16 (`shuffle_weight`), scales as in checkpoints. Sources, v0.1.5 to v0.1.20:
aiter/fused_moe.py, aiter/ops/{moe_op,quant,shuffle}.py, csrc/py_itfs_cu/asm_fmoe.cu and
op_tests/test_moe_blockscale.py; vLLM 0.32's fused_moe/experts/rocm_aiter_moe.py for how engines call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import vendor
from kernels.binding import find, keywords
from kernels.formats import BLOCK, fp8_format
from kernels.fused_moe.expert_ids import ExpertIds
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared, Unsupported

if TYPE_CHECKING:
    import torch

ONE_STAGE_ROWS = 32
"""Pairs of an expert that a program of the one-stage assembly takes: rows of a sorted block."""

PAIRS = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids", "out")
"""What sorting gives, by the names of the kernels' arguments."""

MOST_ROWS = 128
"""Rows of the largest sorted block, for the memory plan."""


def two_stage_rows(tokens: int) -> int:
    """Rows of a sorted block for CK's block-scale kernels where nothing is tuned: `get_2stage_cfgs`."""
    return 64 if tokens > 32 else 16


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
    shuffle = find("aiter.ops.shuffle.shuffle_weight")
    laid = shuffle(**keywords(shuffle, {"x": weight, "layout": (16, 16)}))
    laid.is_shuffled = True
    return laid


def expert_mask(local: ExpertIds, sizes: FusedMoeSizes) -> torch.Tensor | None:
    """int32: 1 for experts that are here, 0 for the one that stands for all others."""
    return local.per_expert([1] * sizes.local_experts + [0])


def block_major(x_scale: torch.Tensor) -> torch.Tensor:
    """fp32 [hidden/128, tokens]: the order in which the assembly reads scales of x."""
    return x_scale.t().contiguous()


def enum(name: str) -> Any:  # of pybind11
    return find(f"aiter.{name}", f"aiter.ops.enum.{name}")


class _Dispatch(_AiterBoundMoe):
    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        super().__init__(operands, first)
        o = operands
        self.fused_moe = find("aiter.fused_moe.fused_moe")
        arguments = {
            "hidden_states": o.x,
            "w1": self.w13,
            "w2": self.w2,
            "topk_weight": o.topk_weights,
            "topk_ids": self.local.ids,
            "expert_mask": self.mask,
            "activation": enum("ActivationType").Silu,
            "quant_type": enum("QuantType").per_128x128,
            "w1_scale": o.w13_scale,
            "w2_scale": o.w2_scale,
        }
        self.arguments = keywords(self.fused_moe, arguments)

    def call(self) -> None:
        self.local.write()
        self.out = self.fused_moe(**self.arguments)

    def picked(self) -> str:
        """The configuration that `fused_moe` looks up for these sizes; empty where it cannot be asked."""
        try:
            tuned = configuration(self.operands.sizes, self.mask is not None)
        except Unsupported:
            return ""
        stages = [tuned.stage1, *([] if tuned.run_1stage else [tuned.stage2])]
        names = [getattr(stage, "keywords", {}).get("kernelName", "") for stage in stages]
        how = "one stage" if tuned.run_1stage else "two stages"
        return f"{how}, {'tuned: ' + ' '.join(names) if any(names) else 'not tuned'}"


def configuration(sizes: FusedMoeSizes, masked: bool) -> Any:  # of AITER
    """AITER's MOEMetadata for these sizes (stage1, stage2, run_1stage, ...), found as `fused_moe` finds it.
    Raises Unsupported where this version does not tell."""
    import torch

    look_up, padded = find("aiter.fused_moe.get_2stage_cfgs"), find("aiter.fused_moe.get_padded_M")
    q_dtype = fp8_format(sizes.fp8).dtype
    needed = {
        "token": padded(sizes.tokens),
        "model_dim": sizes.hidden,
        "inter_dim": sizes.inter,
        "expert": sizes.local_experts,
        "topk": sizes.picks,
        "dtype": torch.bfloat16,
        "q_dtype_a": q_dtype,
        "q_dtype_w": q_dtype,
        "q_type": enum("QuantType").per_1x128,
        "use_g1u1": True,
        "activation": enum("ActivationType").Silu,
        "doweight_stage1": False,
    }
    wished = {"hidden_pad": 0, "intermediate_pad": 0, "bias1": None, "bias2": None, "is_shuffled": True}
    return look_up(**keywords(look_up, needed, wished | {"is_ep": masked, "opus_weights_shuffled": True}))


class _Sorted(_AiterBoundMoe):
    """For kernels below `fused_moe`, which take quantised x and sorted pairs."""

    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None, rows: int) -> None:
        import torch

        super().__init__(operands, first)
        sizes = operands.sizes
        self.sort = find("aiter.fused_moe.moe_sorting")
        self.sorting = keywords(
            self.sort,
            {
                "topk_ids": self.local.ids,
                "topk_weights": operands.topk_weights,
                "num_experts": sizes.local_experts + self.local.apart,
                "model_dim": sizes.hidden,
                "moebuf_dtype": torch.bfloat16,
                "block_size": rows,
                "expert_mask": self.mask,
            },
        )

    def sorted_pairs(self) -> dict[str, torch.Tensor]:
        """Sorted afresh, by the names of the kernels' arguments; `out` is zeroed, as they add to it."""
        self.local.write()
        return dict(zip(PAIRS, self.sort(**self.sorting), strict=True))


class _OneStage(_Sorted):
    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        super().__init__(operands, first, ONE_STAGE_ROWS)
        self.x_scale = block_major(operands.x_scale)
        self.kernel = find("aiter.fmoe_fp8_blockscale_g1u1", "aiter.ops.moe_op.fmoe_fp8_blockscale_g1u1")
        given = {
            "input": operands.x_q,
            "gate": self.w13,
            "down": self.w2,
            "topk": operands.sizes.picks,
            "input_scale": self.x_scale,
            "fc1_scale": operands.w13_scale,
            "fc2_scale": operands.w2_scale,
        }
        self.arguments = keywords(self.kernel, dict.fromkeys(PAIRS) | given)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {**self.operands.live_tensors(), "x_scale": self.x_scale.t()}

    def call(self) -> None:
        pairs = self.sorted_pairs()
        self.kernel(**self.arguments | pairs)
        self.out = pairs["out"]


class _TwoStages(_Sorted):
    def __init__(self, operands: FusedMoeOperands, first: _AiterBoundMoe | None) -> None:
        import torch

        o, sizes = operands, operands.sizes
        super().__init__(operands, first, two_stage_rows(sizes.tokens))
        quantiser = find("aiter.get_hip_quant", "aiter.ops.quant.get_hip_quant")
        self.quantise = quantiser(enum("QuantType").per_1x128)
        shape = (sizes.tokens, sizes.picks, sizes.inter)
        self.h = torch.empty(shape, dtype=torch.bfloat16, device=o.x_q.device)
        self.up, self.down = (
            find(f"aiter.{name}", f"aiter.ops.moe_op.{name}")
            for name in ("ck_moe_stage1_fwd", "ck_moe_stage2_fwd")
        )
        both = dict.fromkeys(PAIRS) | {
            "w1": self.w13,
            "w2": self.w2,
            "topk": sizes.picks,
            "block_m": self.sorting["block_size"],
            "quant_type": enum("QuantType").per_1x128,
            "activation": enum("ActivationType").Silu,
        }
        up = {"hidden_states": o.x_q, "a1_scale": o.x_scale, "w1_scale": o.w13_scale}
        self.up_arguments = keywords(self.up, both | up, {"splitk": 0, "dst_type": self.h.dtype})
        down = {"inter_states": None, "a2_scale": None, "w2_scale": o.w2_scale}
        self.down_arguments = keywords(self.down, both | down)

    def call(self) -> None:
        pairs = self.sorted_pairs()
        self.up(**self.up_arguments | pairs | unweighted(self.h))
        h_q, h_scale = self.quantise(self.h, quant_dtype=self.operands.x_q.dtype)
        self.down(**self.down_arguments | pairs | {"inter_states": h_q, "a2_scale": h_scale})
        self.out = pairs["out"]


def unweighted(h: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The first stage's output; routing weights count once, after the second."""
    return {"out": h, "sorted_weights": None}


class AiterMoe(vendor.Aiter):
    """Rounds h to FP8, and x where the call takes it in bf16."""

    requires = "AITER 0.1.5 to 0.1.20 (github ROCm/aiter; distribution amd-aiter), gfx942 or gfx950"
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
    """`fused_moe` as vLLM and SGLang call it: quantises, sorts, and takes one stage or two by its tuned
    configurations, or by its own rule where it has none for the size."""

    name = "aiter.dispatch"
    boundaries = ("with_quant",)
    Bound = _Dispatch


class OneStage(Shuffled):
    """Sorting, then `fmoe_fp8_blockscale_g1u1`: gate, up, SiLU, requantising and down in one assembly kernel
    that adds to the output with atomics."""

    name = "aiter.asm"
    Bound = _OneStage


class TwoStages(Shuffled):
    """Sorting, CK's gate and up with SiLU in bf16, requantising, CK's down; CK's own choice of kernels."""

    name = "aiter.ck"
    Bound = _TwoStages
