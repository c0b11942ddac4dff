"""Sizes of a fused MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernels.formats import BLOCK, SCALES, fp8_format
from shapes.routing import Routing

SCALING = 2.5
"""The factor on routed weights after they were normalised (config_671B.json: route_scale)."""


@dataclass(frozen=True)
class FusedMoeSizes:
    """hidden and inter are those of an expert on this rank, and multiples of 128, because otherwise gate and
    up would share a scale. For what engines do with others see `_padded`."""

    tokens: int  # rows of the rank's kernel
    experts: int = 256  # routed experts of the layer
    topk: int = 8  # experts that a token picks
    hidden: int = 7168
    inter: int = 256
    ep: int = 1  # ranks that share the experts
    shared: int = 0  # 1 if the shared expert is fused as one more
    routing: str = "balanced"  # a pattern of shapes.routing
    fp8: str = "e4m3fn"  # or e4m3fnuz
    scales: str = "fp32"  # or ue8m0: powers of two
    groups: int = 8  # groups of consecutive experts; 1: the router knows no groups
    group_topk: int = 4  # the most groups that the picks of a token lie in

    def __post_init__(self) -> None:
        for name in ("hidden", "inter"):
            value = getattr(self, name)
            if value < 1 or value % BLOCK:
                said = f"size {name}={value} of fused_moe must be a multiple of {BLOCK}"
                raise ValueError(f"{said}{_padded(value) if name == 'inter' and value > 0 else ''}")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of fused_moe must be {' or '.join(SCALES)}")
        self.routed  # noqa: B018 - raises for a routing that cannot be

    @cached_property
    def routed(self) -> Routing:
        drawn = self.tokens, self.experts, self.topk, self.ep, self.shared, self.routing
        return Routing(*drawn, self.groups, self.group_topk)

    @property
    def local_experts(self) -> int:
        """The number of experts on the rank. The shared expert is the last of them."""
        return self.routed.local + self.shared

    @property
    def picks(self) -> int:
        """Picks of a token, including the shared expert."""
        return self.topk + self.shared

    @property
    def group_limit(self) -> tuple[int, int]:
        """(groups, how many of them the picks of a token lie in): (1, 1) where groups do not divide the
        experts."""
        if self.experts % self.routed.groups:
            return 1, 1
        return self.routed.groups, min(self.routed.group_topk, self.routed.groups)

    @property
    def quantised_bytes(self) -> int:
        """The bytes of x in FP8 and of its scales in fp32."""
        return self.tokens * (self.hidden + self.hidden // BLOCK * 4)

    @property
    def expert_bytes(self) -> int:
        """The bytes of an expert: w13 and w2 in FP8 and their scales in fp32."""
        values = 3 * self.hidden * self.inter
        return values + values // BLOCK**2 * 4


def _padded(inter: int) -> str:
    """What engines do with an inter that is not a multiple of 128. SGLang 0.5.23: get_moe_weight_sizes in
    srt/layers/moe/utils.py and create_fp8_moe_weight_ in srt/layers/quantization/fp8.py. vLLM 0.33:
    resolve_fp8_moe_weight_block_shape in model_executor/layers/fused_moe/oracle/fp8.py."""
    to = -(-inter // BLOCK) * BLOCK
    return (
        f"; give inter={to}, to which SGLang pads it with AITER and vLLM with a named --moe-backend "
        "(else SGLang refuses it, and vLLM makes the blocks of scales smaller, for Triton)"
    )
