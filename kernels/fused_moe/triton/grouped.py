"""The suite's own fused MoE in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton import grouped_configs
from kernels.fused_moe.triton.align import MOST_SEGMENTS, Alignment, tiles_for
from kernels.fused_moe.triton.grouped_configs import ROWS, GroupedConfig
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch

WEIGHT_S, TOKEN_S, EXPERT_S = 1.3e-7, 3e-3, 15e-3
"""Seconds that the interpreter takes for a weight that a program reads, for combining a token, and for
placing an expert's pairs; seen on a busy Zen 4 core, half more with e4m3fnuz."""


class Grouped(SuiteTriton):
    """Pairs sorted by expert on the device, two grouped FP8 products, SiLU and requantisation between them, a
    combine without atomics. Few pairs are not sorted, and K is split between programs. Grids are sized for
    any picks; nothing is asked of the host."""

    name = "triton.grouped"
    activations = "fp8"
    Config = GroupedConfig

    def configurations(self, target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
        return grouped_configs.configurations(target, sizes)

    def heuristic(self, target: Target, sizes: FusedMoeSizes) -> GroupedConfig:
        return grouped_configs.heuristic(target, sizes)

    def demands(self, config: GroupedConfig, target: Target, sizes: FusedMoeSizes) -> list[Demand]:
        return grouped_configs.demands(config, target, sizes)

    def features(self, sizes: FusedMoeSizes) -> dict[str, float | str]:
        return grouped_configs.features(sizes)

    def interpreted_s(self, sizes: FusedMoeSizes) -> float:
        tiles = grouped_configs.tiles_of(self.heuristic(CPU, sizes), sizes)
        weights = tiles * 3 * sizes.hidden * sizes.inter * (1.5 if sizes.fp8 == "e4m3fnuz" else 1.0)
        return weights * WEIGHT_S + sizes.tokens * TOKEN_S + sizes.local_experts * EXPERT_S

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """An upper bound over all platforms and configurations."""
        pairs = sizes.tokens * sizes.picks
        gate_up = 2 * sizes.inter * max(2, 4 * grouped_configs.most_splits(sizes))
        of_pair = gate_up + sizes.inter + sizes.inter // BLOCK * 4 + sizes.hidden * 2
        aligned = (
            max(tiles_for(rows, sizes) * (rows + 1) for rows in ROWS)
            + (MOST_SEGMENTS + 1) * sizes.local_experts
        )
        return pairs * of_pair + 4 * aligned

    def prepare_with(
        self, config: GroupedConfig, target: Target, operands: FusedMoeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        return _GroupedMoe(operands, out, config, target.units)


class _GroupedMoe(ConfiguredPrepared):
    operands: FusedMoeOperands

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, config: GroupedConfig, units: int
    ) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.fused_moe.triton import grouped_jit, pairs_jit

        super().__init__(operands, out)
        self.config = config
        sizes: FusedMoeSizes = operands.sizes
        hidden, inter = sizes.hidden, sizes.inter
        fmt = fp8_format(sizes.fp8)
        self.interpreted = out.device.type == "cpu"
        self.pairs = sizes.tokens * sizes.picks
        self.splits = grouped_configs.splits_for(config, units, sizes)
        self.group = grouped_configs.group_for(config, sizes)
        self.per_split = triton.cdiv(hidden // BLOCK, self.splits)
        fnuz_bits = self.interpreted and sizes.fp8 == "e4m3fnuz"
        # The interpreter truncates where it should round to FP8 and to bf16: there torch rounds.
        narrow = torch.float32 if self.interpreted else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=out.device)

        def bits(values: torch.Tensor) -> torch.Tensor:
            return values.view(torch.uint8) if fnuz_bits else values

        self.align = Alignment(sizes, config.rows, operands.topk_ids) if config.sort else None
        parts = 0 if config.fuse else self.splits
        self.gate_up = empty(parts, self.pairs, 2 * inter, dtype=torch.float32 if parts > 1 else narrow)
        self.h_q = empty(self.pairs, inter, dtype=fmt.dtype)
        self.h_scale = empty(self.pairs, inter // BLOCK)
        self.h_written = torch.zeros_like(self.h_q, dtype=torch.float32) if self.interpreted else self.h_q
        self.given = empty(0 if config.by_token else self.pairs, hidden, dtype=narrow)
        self.written = torch.empty_like(out, dtype=torch.float32) if self.interpreted else out
        self.x_q, self.h_read = bits(operands.x_q), bits(self.h_q)
        self.w13, self.w2 = bits(operands.w13), bits(operands.w2)

        product = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}[sizes.fp8]
        columns, steps = grouped_configs.down_columns(config, sizes), inter // BLOCK
        tiles = tiles_for(config.rows, sizes) if config.sort else self.pairs
        shared = {
            "HIDDEN": hidden,
            "INTER": inter,
            "BLOCK": BLOCK,
            "BLOCK_M": config.rows,
            "SWAP": config.swap,
            "PRODUCT": tl.float32 if self.interpreted else product,
            "FNUZ_BITS": fnuz_bits,
        }
        tiled = {"SORTED": config.sort, "CHIPLETS": config.chiplets}
        rounding = {
            "LARGEST": fmt.max,
            "SMALLEST_SCALE": SMALLEST_SCALE,
            "POWER_OF_TWO": sizes.scales == "ue8m0",
        }
        self.up = grouped_jit.up_kernel[(tiles * grouped_configs.up_columns(config, sizes), self.splits)]
        self.up_options: dict[str, object] = {
            **shared,
            **tiled,
            **rounding,
            "PICKS": sizes.picks,
            "BLOCK_N": BLOCK if config.fuse else config.columns,
            "FUSE": config.fuse,
            **options(config.warps, config.stages, config.instruction),
        }
        rows = grouped_configs.silu_rows(sizes)
        self.silu = pairs_jit.silu_kernel[(triton.cdiv(self.pairs, rows), steps)]
        self.silu_options = {
            **rounding,
            "INTER": inter,
            "SPLITS": self.splits,
            "BLOCK": BLOCK,
            "BLOCK_M": rows,
            "num_warps": 4 if rows > 1 else 1,
        }
        if config.by_token:
            self.down = grouped_jit.down_by_token_kernel[(hidden // columns, sizes.tokens)]
            # On NVIDIA the load that finds the expert takes half of the stages.
            stages = config.stages * (1 if config.instruction else 2)
            own = {"PICKS": sizes.picks}
        else:
            self.down = grouped_jit.down_kernel[(tiles * (hidden // columns),)]
            stages, own = min(config.stages, steps + 1), tiled
        self.down_options = {
            **shared,
            **own,
            "BLOCK_N": columns,
            **options(config.warps, stages, config.instruction),
        }
        columns = grouped_configs.combine_columns(sizes)
        self.combine = pairs_jit.combine_kernel[(sizes.tokens, triton.cdiv(hidden, columns))]
        self.combine_options = {
            "HIDDEN": hidden,
            "PICKS": sizes.picks,
            "PICKS_PADDED": triton.next_power_of_2(sizes.picks),
            "BLOCK_D": columns,
        }

    def call(self) -> None:
        o, config = self.operands, self.config
        at: tuple[torch.Tensor | None, ...] = (o.topk_ids, None, None, None)
        if self.align:
            self.align()
            at = (o.topk_ids, *self.align.tensors)
        h = (self.h_written, self.h_scale)
        x = (self.x_q, o.x_scale, self.w13, o.w13_scale)
        self.up(*x, *at, self.gate_up, *h, self.pairs, self.group, self.per_split, **self.up_options)
        if not config.fuse:
            self.silu(self.gate_up, o.topk_ids, *h, self.pairs, **self.silu_options)
        if self.interpreted:
            self.h_q.copy_(self.h_written)
        product = (self.h_read, self.h_scale, self.w2, o.w2_scale)
        if config.by_token:
            self.down(*product, o.topk_ids, o.topk_weights, self.written, **self.down_options)
        else:
            self.down(*product, *at, self.given, self.pairs, self.group, **self.down_options)
            self.combine(self.given, o.topk_ids, o.topk_weights, self.written, **self.combine_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
