"""Sizes of a fused MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernels.formats import BLOCK, SCALES, fp8_format
from shapes.routing import Routing

SCALING = 2.5
"""Of the routed weights after they were normalised (config_671B.json: route_scale)."""


@dataclass(frozen=True)
class FusedMoeSizes:
    """tokens: rows of the rank's kernel; experts: routed ones of the layer; topk: that a token picks;
    hidden, inter: of an expert on this rank, multiples of 128 (gate and up would share a scale; for what
    engines do see _padded); ep: ranks that share the experts; shared: 1 if the shared expert is fused as one
    more; routing: a pattern of shapes.routing; fp8: e4m3fn or e4m3fnuz; scales: fp32, or ue8m0 for powers of
    two."""

    tokens: int
    experts: int = 256
    topk: int = 8
    hidden: int = 7168
    inter: int = 256
    ep: int = 1
    shared: int = 0
    routing: str = "balanced"
    fp8: str = "e4m3fn"
    scales: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("hidden", "inter"):
            value = getattr(self, name)
            if value < 1 or value % BLOCK:
                said = f"size {name}={value} of fused_moe must be a multiple of {BLOCK}"
                raise ValueError(f"{said}{_padded(value) if name == 'inter' and value > 0 else ''}")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of fused_moe must be {' or '.join(SCALES)}")
        self.routed  # noqa: B018 - raises for what no routing has

    @cached_property
    def routed(self) -> Routing:
        return Routing(self.tokens, self.experts, self.topk, self.ep, self.shared, self.routing)

    @property
    def local_experts(self) -> int:
        """Experts of the rank, the shared one last."""
        return self.routed.local + self.shared

    @property
    def picks(self) -> int:
        """Of a token, the shared expert included."""
        return self.topk + self.shared

    @property
    def group_limit(self) -> tuple[int, int]:
        """(groups, those that the picks of a token lie in): (1, 1) where groups do not divide the experts."""
        routing = self.routed
        if self.experts % routing.groups:
            return 1, 1
        return routing.groups, min(routing.group_topk, routing.groups)

    @property
    def expert_bytes(self) -> int:
        """One expert: w13 and w2 in FP8, their scales in fp32."""
        values = 3 * self.hidden * self.inter
        return values + values // BLOCK**2 * 4


def _padded(inter: int) -> str:
    """What engines do about one that is no multiple of 128: get_moe_weight_sizes in srt/layers/moe/utils.py
    and create_fp8_moe_weight_ in srt/layers/quantization/fp8.py of SGLang 0.5.23;
    resolve_fp8_moe_weight_block_shape in model_executor/layers/fused_moe/oracle/fp8.py of vLLM 0.33."""
    to = -(-inter // BLOCK) * BLOCK
    return (
        f"; give inter={to}, to which SGLang pads it with AITER and vLLM with a named --moe-backend "
        "(else SGLang refuses it, and vLLM makes the blocks of scales smaller, for Triton)"
    )
