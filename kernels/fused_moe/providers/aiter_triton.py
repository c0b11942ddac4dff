"""AITER's Triton MoE product, twice, with the suite's own kernels around it: AITER leaves sorting, SiLU,
requantising and the sum over picks to its caller (op_tests/triton_tests/moe/test_moe.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.formats import BLOCK, fp8_format
from kernels.fused_moe.between_products import BetweenProducts
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers.aiter import AiterMoe
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.align import MOST_SEGMENTS, Alignment, tiles_for
from kernels.op import Prepared
from kernels.triton_runtime import require_interpreter
from kernels.vendor import TRITON

if TYPE_CHECKING:
    import torch

SMALLEST_TILE = 16
"""Rows, for the memory plan: smaller tiles make more of them, in which fewer are empty."""

PRODUCT = Function(
    "aiter.ops.triton.moe.moe_op.fused_moe",
    "aiter.ops.triton.moe_op.fused_moe",
    needs="A B C A_scale B_scale B_zp topk_weights topk_ids sorted_token_ids expert_ids "
    "num_tokens_post_padded mul_routed_weight top_k compute_type use_fp8_w8a8 use_int8_w8a16 use_int4_w4a16 "
    "block_shape config",
)
CONFIGURATION = Function(
    "aiter.ops.triton.utils.moe_config_utils.get_optimal_moe_config", needs="dtype use_fp8_w8a8 M"
)


class AiterTritonMoe(AiterMoe):
    """`moe_op.fused_moe`, with the configuration that AITER has for these tokens: gate and up of quantised x,
    SiLU, down, of weights that are not shuffled."""

    name = "aiter.triton"
    also = TRITON
    symbols = (PRODUCT, CONFIGURATION)

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Per pair gate and up, h, what the expert gives, its row; slots of tiles of 16 to 256 rows."""
        pairs = sizes.tokens * sizes.picks
        of_pair = sizes.inter * 5 + sizes.inter // BLOCK * 4 + sizes.hidden * 2 + 4
        slots = max(tiles_for(rows, sizes) * (rows * 4 + 4) for rows in (SMALLEST_TILE, 64, 128, 256))
        return pairs * of_pair + slots + MOST_SEGMENTS * sizes.local_experts * 4 + 8

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        require_interpreter(out.device)
        return _AiterTritonMoe(operands, out)


def configuration(sizes: FusedMoeSizes) -> dict[str, int]:
    """AITER's tiles and options for so many tokens."""
    dtype = fp8_format(sizes.fp8).dtype
    return CONFIGURATION.bind(dtype=dtype, use_fp8_w8a8=True, M=sizes.tokens)()


class _AiterTritonMoe(BetweenProducts):
    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor) -> None:
        import torch
        import triton.language as tl

        super().__init__(operands, out)
        o, sizes, device = operands, operands.sizes, out.device
        fmt = fp8_format(sizes.fp8)
        self.config = configuration(sizes)
        self.rows = self.config["BLOCK_SIZE_M"]
        self.pairs = sizes.tokens * sizes.picks

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.sort, self.padded = Alignment(sizes, self.rows, o.topk_ids), empty(1)
        self.row_of = torch.arange(self.pairs, dtype=torch.int32, device=device)
        self.gate_up = empty(sizes.tokens, sizes.picks, 2 * sizes.inter, dtype=torch.bfloat16)
        self.h_q = empty(self.pairs, sizes.inter, dtype=fmt.dtype)
        self.h_scale = empty(sizes.inter // BLOCK, self.pairs, dtype=torch.float32)
        self.given = empty(sizes.tokens, sizes.picks, sizes.hidden, dtype=torch.bfloat16)

        self.bind(self.pairs, packed=False)

        both = {
            "B_zp": None,
            "topk_weights": o.topk_weights,
            "topk_ids": o.topk_ids,
            "sorted_token_ids": self.sort.slots,
            "expert_ids": self.sort.owners,
            "num_tokens_post_padded": self.padded,
            "mul_routed_weight": False,
            "compute_type": tl.bfloat16,
            "use_fp8_w8a8": True,
            "use_int8_w8a16": False,
            "use_int4_w4a16": False,
            "block_shape": [BLOCK, BLOCK],
            "config": self.config,
        }
        up = {"A": o.x_q, "A_scale": o.x_scale, "B": o.w13, "B_scale": o.w13_scale, "C": self.gate_up}
        down = {"A": self.h_q, "A_scale": self.h_scale.t(), "B": o.w2, "B_scale": o.w2_scale, "C": self.given}
        # A row of x is of all picks of a token, a row of h of one.
        self.up = PRODUCT.bind(**both, **up, top_k=sizes.picks)
        self.down = PRODUCT.bind(**both, **down, top_k=1)

    def call(self) -> None:
        import torch

        self.sort()
        torch.mul(self.sort.used, self.rows, out=self.padded)
        self.up()
        self.activate()
        self.down()
        self.add_up()

    def picked(self) -> str:
        tiles = (self.config.get(f"BLOCK_SIZE_{side}") for side in "MNK")
        return f"tiles of {'x'.join(map(str, tiles))}"
