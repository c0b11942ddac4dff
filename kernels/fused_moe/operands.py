"""Sizes and operands of a fused MoE layer, with values on which the usual mistakes show at any size.

All experts take their weights from one pool of quantised normal values, each from a different place: no two
rows are equal, and R1's 1.4 GB take about a second. Only scales are drawn for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from kernels.formats import BLOCK, SCALES, fp8_format, known_scales, quantise_activations
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands, Seeds, draw_normal
from shapes.routing import Routing

SCALING = 2.5  # the factor on routed weights after they were normalised (config_671B.json: route_scale)


@dataclass(frozen=True)
class FusedMoeSizes:
    """hidden and inter are those of an expert on this rank. They are multiples of 128, because otherwise gate
    and up would share a scale. `_advice` says what engines do with other sizes."""

    tokens: int  # of a call; each picks an expert of the rank (see shapes.routing)
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
                advice = _advice(value) if name == "inter" and value > 0 else ""
                raise ValueError(f"size {name}={value} of fused_moe must be a multiple of {BLOCK}{advice}")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of fused_moe must be {' or '.join(SCALES)}")
        self.routed  # noqa: B018 - raises for a routing that cannot be

    @cached_property
    def routed(self) -> Routing:
        fields = self.tokens, self.experts, self.topk, self.ep, self.shared, self.routing
        return Routing(*fields, self.groups, self.group_topk)

    @property
    def local_experts(self) -> int:
        """The number of experts on the rank. The shared expert is the last of them."""
        return self.routed.local + self.shared

    @property
    def picks(self) -> int:
        """Picks of a token, including the shared expert."""
        return self.topk + self.shared

    @property
    def pairs(self) -> int:
        """Pairs of a token and one of its picks, including those of experts on other ranks."""
        return self.tokens * self.picks

    @property
    def group_limit(self) -> tuple[int, int]:
        """(groups, the most that a token's picks lie in); (1, 1) where groups do not divide the experts."""
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
        return self.expert_values + self.expert_values // BLOCK**2 * 4

    @property
    def expert_values(self) -> int:
        """The values of w13 and w2 of an expert."""
        return 3 * self.hidden * self.inter


def _advice(inter: int) -> str:
    """Tells a user what engines do with an inter that is not a multiple of 128. SGLang 0.5.23:
    get_moe_weight_sizes in srt/layers/moe/utils.py and create_fp8_moe_weight_ in
    srt/layers/quantization/fp8.py. vLLM 0.33: resolve_fp8_moe_weight_block_shape in
    model_executor/layers/fused_moe/oracle/fp8.py."""
    multiple = -(-inter // BLOCK) * BLOCK
    return (
        f"; give inter={multiple}, to which SGLang pads it with AITER and vLLM with a named --moe-backend "
        "(else SGLang refuses it, and vLLM makes the blocks of scales smaller, for Triton)"
    )


@dataclass
class FusedMoeOperands(Operands):
    """In shapes, local is sizes.local_experts and picks is sizes.picks. FP8 is the format of sizes.fp8. Ids
    are in the rank's numbering: an expert on another rank has the id -1, and the true weight."""

    w13: torch.Tensor  # FP8 [local, 2 * inter, hidden], gate rows before up rows
    w13_scale: torch.Tensor  # fp32 [local, 2 * inter/128, hidden/128]
    w2: torch.Tensor  # FP8 [local, hidden, inter]
    w2_scale: torch.Tensor  # fp32 [local, hidden/128, inter/128]
    sizes: FusedMoeSizes
    seeds: Seeds
    boundary: str = "core"
    x: torch.Tensor = ABSENT  # bf16 [tokens, hidden]; not in core
    x_q: torch.Tensor = ABSENT  # FP8 [tokens, hidden]; core only
    x_scale: torch.Tensor = ABSENT  # fp32 [tokens, hidden/128]; core only
    logits: torch.Tensor = ABSENT  # fp32 [tokens, all experts], before the sigmoid; with_routing only
    bias: torch.Tensor = ABSENT  # fp32 [experts], added to the scores only for the choice; with_routing only
    topk_ids: torch.Tensor = ABSENT  # int32 [tokens, picks]; not in with_routing
    topk_weights: torch.Tensor = ABSENT  # fp32 [tokens, picks]; not in with_routing

    live: ClassVar = ("x", "x_q", "x_scale", "logits", "topk_ids", "topk_weights")
    streamed: ClassVar = ("w13", "w13_scale", "w2", "w2_scale")

    @property
    def without_effect(self) -> frozenset[str]:
        """With one pick, other logits may choose the same expert, whose weight is always the same."""
        return frozenset({"logits"} if self.sizes.topk == 1 else ())

    def turned(self, turn: int, cold: bool = False) -> FusedMoeOperands:
        """The same x and weights (`cold`: copies of them), and picks of other experts."""
        seeds = Seeds(self.seeds.stationary, self.seeds.live, turn)
        live = routing_operands(self.sizes, seeds, str(self.w13.device), self.boundary)
        live.pop("bias", None)  # stationary, thus the same for all turns
        base = self.copy() if cold else self
        return base.replaced(seeds=seeds, **live)

    def narrowed(self) -> FusedMoeOperands:
        sizes, device = self.sizes, self.w13.device
        if self.boundary == "with_routing":
            ids = torch.empty(sizes.tokens, sizes.picks, dtype=torch.int32, device=device)
            routed = {"topk_ids": ids, "topk_weights": torch.empty(ids.shape, device=device)}
            return self.replaced(boundary="with_quant", logits=None, bias=None, **routed)
        if self.boundary == "with_quant":
            x_q = torch.empty_like(self.x, dtype=self.w13.dtype)
            x_scale = torch.empty(sizes.tokens, sizes.hidden // BLOCK, device=device)
            return self.replaced(boundary="core", x=None, x_q=x_q, x_scale=x_scale)
        return super().narrowed()


STRIDE = 4099
"""Values between the places where two experts begin in the pool: a prime, so that no two rows are aligned."""

GATE = 3.0
"""Root mean square of gate and up for a token of deviation 1: there SiLU is neither linear nor saturated."""

HOT = 8  # in tokens 1 and 2 modulo 4, one of so many blocks of K is large, and the others are zero or small


def generate(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str = "core") -> FusedMoeOperands:
    """The first of the sets that calls rotate over; equal arguments give equal operands."""
    first = Seeds(seeds.stationary, seeds.live, adversarial=seeds.adversarial)
    return FusedMoeOperands(
        **weights(sizes, first, device),
        **activations(sizes, first, device, boundary),
        **routing_operands(sizes, first, device, boundary),
        sizes=sizes,
        seeds=first,
        boundary=boundary,
    )


def weights(sizes: FusedMoeSizes, seeds: Seeds, device: str) -> dict[str, torch.Tensor]:
    """w13, w13_scale, w2 and w2_scale. Codes are those of normal values whose largest in a block of 128x128
    is about four deviations. The scales of neighbouring blocks along K, along N and of the next expert differ
    by a factor of 2 to 8. No two scales of an expert are equal, unless they have to be powers of two."""
    generator = generator_of(device, 1, seeds.stationary)
    fmt = fp8_format(sizes.fp8)
    local_experts, hidden, inter = sizes.local_experts, sizes.hidden, sizes.inter
    shapes = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}
    pool = torch.empty(2 * inter * hidden + 2 * local_experts * STRIDE, device=device)
    pool.normal_(0, fmt.max / 4, generator=generator)
    pool = pool.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    tensors = {}
    start = 0  # of an expert in the pool
    for name, (rows, columns) in shapes.items():
        values = torch.empty(local_experts, rows, columns, dtype=fmt.dtype, device=device)
        for expert in range(local_experts):
            values[expert].view(-1).copy_(pool[start : start + rows * columns])
            start += STRIDE
        output_rms = GATE if name == "w13" else 1.0
        scale_rms = output_rms / (columns**0.5 * fmt.max / 4)
        blocks = (local_experts, rows // BLOCK, columns // BLOCK)
        tensors[name] = values
        tensors[f"{name}_scale"] = _scales(blocks, scale_rms, sizes.scales, generator)
    return tensors


def _scales(shape: tuple[int, int, int], rms: float, kind: str, generator: torch.Generator) -> torch.Tensor:
    """fp32 [local, rows/128, columns/128] with a root mean square of about `rms`: low and high scales as the
    fields of a chessboard, 1 to 2 and 4 to 8 times the lowest. kind: `fp32` or `ue8m0`"""
    device = generator.device
    exponent = torch.rand(shape, generator=generator, device=device)
    lowest = torch.tensor(rms / 4.3)  # the root mean square of 2^[0, 1] and 2^[2, 3] is 4.3
    if kind == "ue8m0":
        exponent = (2 * exponent).floor()
        lowest = lowest.log2().round().exp2()
    expert, row, column = torch.meshgrid([torch.arange(n, device=device) for n in shape], indexing="ij")
    is_high = (expert + row + column) % 2
    return lowest.to(device) * (exponent + 2 * is_high).exp2()


def activations(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str) -> dict[str, torch.Tensor]:
    """x, or in `core` x_q and x_scale. Tokens differ by their number modulo 4: all blocks of K are alike (0);
    all blocks but one of eight are zero (1), or small (2); all are alike, with four large values (3). The
    magnitudes of tokens differ by a factor of up to 8."""
    generator = generator_of(device, 2, seeds.stationary, seeds.live)
    uniform = partial(torch.rand, generator=generator, device=device)
    tokens, blocks = sizes.tokens, sizes.hidden // BLOCK
    x = torch.empty(tokens, sizes.hidden, dtype=torch.bfloat16, device=device)
    draw_normal(x, generator)
    hot_blocks = -(-blocks // HOT)
    is_hot = uniform(tokens, blocks).argsort(-1) < hot_blocks
    hot_factor = (blocks / hot_blocks) ** 0.5  # keeps the token's norm
    factor = torch.ones(tokens, blocks, device=device)
    factor[1::4] = torch.where(is_hot[1::4], hot_factor, 0.0)
    factor[2::4] = torch.where(is_hot[2::4], hot_factor, 2.0**-5)
    factor *= uniform(tokens, 1).mul_(3).sub_(2).exp2_()
    x.view(tokens, blocks, BLOCK).mul_(factor.unsqueeze(-1).bfloat16())
    large = torch.randint(sizes.hidden, (len(x[3::4]), 4), generator=generator, device=device)
    x[3::4] = x[3::4].scatter(1, large, x[3::4].gather(1, large) * 24)
    if seeds.adversarial:
        # With large tokens SiLU saturates and h exceeds what fp16 and FP8 hold. With small ones SiLU is
        # nearly linear and h is below what they hold.
        x[1::3] *= 2.0**7
        x[2::3] *= 2.0**-7
    if boundary != "core":
        return {"x": x}
    x_q, x_scale = quantise_activations(x, fp8_format(sizes.fp8), known_scales(sizes.scales))
    return {"x_q": x_q, "x_scale": x_scale}


# Biased scores are LOW to HIGH for experts that are not picked, and at least PICKED for those that are. So
# the best two of a group sum to PICKED + LOW or more where one is picked, else to 2 * HIGH or less. GAP is
# the difference.
LOW, HIGH, PICKED, GAP = 0.22, 0.26, 0.34, 0.04

MOST = 0.97  # the largest score: a logit of 3.5


def generator_of(device: str, *seeds: int) -> torch.Generator:
    """A generator whose seed depends on all of these."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def routing_operands(
    sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str
) -> dict[str, torch.Tensor]:
    """topk_ids and topk_weights; or in `with_routing` the logits and the bias from which they follow. Sums of
    chosen groups exceed all others by GAP. So do, in these groups, the biased scores of picks."""
    routing = sizes.routed
    experts = torch.tensor(routing.global_picks(seeds.live, seeds.turn), device=device)
    # The bias lowers the scores of a quarter of the experts by up to 0.3 and raises the others by up to 0.2.
    generator = generator_of(device, 3, seeds.stationary)
    bias = torch.rand(sizes.experts, generator=generator, device=device)
    held_back = torch.randperm(sizes.experts, generator=generator, device=device) % 4 == 0
    bias = torch.where(held_back, -0.05 - 0.25 * bias, 0.1 + 0.1 * bias)
    scores = _biased_scores(sizes, seeds, experts, bias) - bias
    if boundary == "with_routing":
        return {"logits": torch.log(scores / (1 - scores)), "bias": bias}
    picked_scores = scores.gather(1, experts)
    routed = picked_scores / picked_scores.sum(-1, keepdim=True) * SCALING
    shared = torch.ones(sizes.tokens, sizes.shared, device=device)
    ids = torch.tensor(routing.picks(seeds.live, seeds.turn), dtype=torch.int32, device=device)
    return {"topk_ids": ids, "topk_weights": torch.cat([routed, shared], 1)}


def _biased_scores(
    sizes: FusedMoeSizes, seeds: Seeds, experts: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Biased scores, fp32 [tokens, experts], for which the router picks `experts` int64 [tokens, topk]. In
    every second token one pick, of an expert that the rank holds, has nearly all of the weight."""
    device = experts.device
    generator = generator_of(str(device), 4, seeds.stationary, seeds.live, seeds.turn)
    uniform = partial(torch.rand, generator=generator, device=device)
    tokens, topk = experts.shape
    biased = LOW + (HIGH - LOW) * uniform(tokens, sizes.experts)
    most = bias[experts] + MOST
    even = PICKED + (most - PICKED) * uniform(tokens, topk)
    heavy = (uniform(tokens, topk) + (experts < sizes.routed.local)).argmax(-1, keepdim=True)
    uneven = (PICKED + GAP * uniform(tokens, topk)).scatter(1, heavy, most.gather(1, heavy))
    is_uneven = torch.arange(tokens, device=device)[:, None] % 2 == 0
    biased.scatter_(1, experts, torch.where(is_uneven, uneven, even))
    _add_decoys(sizes, biased, experts, bias, generator)
    return biased


def _add_decoys(
    sizes: FusedMoeSizes,
    biased: torch.Tensor,
    experts: torch.Tensor,
    bias: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Raises the score of an expert of each token, in place, above the scores of some picks, where it is
    possible while the expert's group stays unchosen. Only the limit on groups keeps such a decoy out."""
    groups, limit = sizes.group_limit
    experts_of_group = sizes.experts // groups
    if groups == limit or experts_of_group < 2:
        return
    group_sums = biased.unflatten(1, (groups, -1)).topk(2, -1).values.sum(-1)
    is_chosen = torch.zeros_like(group_sums, dtype=torch.bool).scatter_(1, experts // experts_of_group, True)
    above_all = 9.0  # more than any score or sum of two
    least_sum = group_sums.masked_fill(~is_chosen, above_all).amin(-1)
    least_pick = biased.gather(1, experts).amin(-1)
    # The decoy is the first expert of some group that is not chosen. The others of its group have up to HIGH.
    draw = torch.rand(group_sums.shape, generator=generator, device=biased.device)
    decoy = torch.where(is_chosen, above_all, draw).argmin(-1) * experts_of_group
    decoy_score = torch.minimum(least_sum - HIGH - GAP, bias[decoy] + MOST)
    is_possible = (is_chosen.sum(-1) == limit) & (decoy_score > least_pick + GAP)
    rows = torch.nonzero(is_possible)[:, 0]
    biased[rows, decoy[rows]] = decoy_score[rows]
