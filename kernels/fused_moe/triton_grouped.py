"""The suite's own fused MoE in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fused_moe.problem import FusedMoeOperands, Sizes
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Config:
    """What one program takes.

    rows:    (row, expert) pairs of one expert
    columns: of the down product; gate and up take the 128 of one scale of h
    warps, up_stages, down_stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    rows: int
    columns: int = 128
    warps: int = 4
    up_stages: int = 3
    down_stages: int = 3
    instruction: int = 0


# By rows of an expert on average: the smallest tile that holds them, else the last. 16 rows are the smallest
# matrix instruction, 64 take wgmma; 128 spill on sm_90 and sm_100. From compiling, not yet from measuring.
# The interpreter's time is per weight that a program reads.
HEURISTIC: dict[str, tuple[Config, ...]] = {
    "cuda": (Config(16), Config(64, warps=8)),
    "rocm": (
        Config(16, up_stages=2, down_stages=2, instruction=16),
        Config(64, up_stages=2, down_stages=2, instruction=16),
        Config(128, warps=8, up_stages=2, down_stages=2, instruction=16),
    ),
    "cpu": (Config(16, 1024), Config(64, 1024), Config(128, 1024)),
}
ROWS = (16, 32, 64, 128)

CHUNK = {"cpu": 1 << 16, "cuda": 1024, "rocm": 1024}
"""Pairs at a time where they are counted and placed."""

COMBINED = 1024
"""Columns of a program of the combine."""

WEIGHT_S, TOKEN_S, EXPERT_S = 1.3e-7, 3e-3, 15e-3
"""Seconds that the interpreter takes for a weight that a program reads, for combining a token, and for
placing an expert's pairs; seen on a busy Zen 4 core, half more with e4m3fnuz."""


def rows_of_expert(sizes: Sizes) -> float:
    """Of those that are hit, on average."""
    return sizes.routed.pairs / max(1, sizes.routed.hit)


def tiles_for(rows: int, sizes: Sizes) -> int:
    """Tiles that any picks of this size need at most: all but one of an expert's tiles are full."""
    pairs = sizes.tokens * sizes.picks
    return min(pairs, (pairs + min(sizes.held, pairs) * (rows - 1)) // rows)


class Grouped(SuiteTriton):
    """Pairs sorted by expert on the device, two grouped FP8 products, SiLU and requantisation between them, a
    combine without atomics. Grids are sized for any picks; nothing is asked of the host."""

    name = "triton.grouped"
    Config = Config
    activations = "fp8"
    older_instructions: ClassVar = dict.fromkeys(
        ("up_kernel", "down_kernel"),
        "few tokens give an expert a row or two: tiles of 64 would be empty, and weights are what takes time",
    )

    def configurations(self, target: Target, sizes: Sizes) -> Iterator[Config]:
        rows = [r for r in ROWS if r < 4 * max(16, rows_of_expert(sizes))]
        columns = [n for n in (64, 128) if sizes.hidden % n == 0]
        for m, n, warps in itertools.product(rows, columns, (4, 8)):
            if target.kind == "rocm":
                for stages, instruction in itertools.product((1, 2), (16, 32)):
                    if m >= instruction:
                        yield Config(m, n, warps, stages, stages, instruction)
            else:
                for up, down in itertools.product((2, 3, 4), (2, 3, 4)):
                    yield Config(m, n, warps, up, down)

    def heuristic(self, target: Target, sizes: Sizes) -> Config:
        return self._heuristic(target.pick(HEURISTIC), sizes)

    @staticmethod
    def _heuristic(configs: tuple[Config, ...], sizes: Sizes) -> Config:
        rows = rows_of_expert(sizes)
        return next((config for config in configs if rows <= config.rows), configs[-1])

    def features(self, sizes: Sizes) -> dict[str, float | str]:
        """What decides: how many rows experts have, how many are hit, and how large they are."""
        routed = sizes.routed
        return {
            "rows": rows_of_expert(sizes),
            "hit": routed.hit,
            "hidden": sizes.hidden,
            "inter": sizes.inter,
            "fp8": sizes.fp8,
            "scales": sizes.scales,
        }

    def interpreted_s(self, sizes: Sizes) -> float:
        rows = self.heuristic(CPU, sizes).rows
        tiles = sum(-(-load // rows) for load in sizes.routed.loads())
        weights = tiles * 3 * sizes.hidden * sizes.inter * (1.5 if sizes.fp8 == "e4m3fnuz" else 1.0)
        return weights * WEIGHT_S + sizes.tokens * TOKEN_S + sizes.held * EXPERT_S

    def workspace(self, sizes: Sizes) -> int:
        """An upper bound over all platforms and configurations; the interpreter writes fp32 and rounds it
        then."""
        slots = max(tiles_for(rows, sizes) * rows for rows in ROWS)
        of_slot = 8 + sizes.inter * 5 + sizes.inter // BLOCK * 4
        pairs = sizes.tokens * sizes.picks
        return slots * of_slot + (pairs + sizes.tokens) * sizes.hidden * 4 + sizes.held * 4 + 4

    def prepare_with(
        self, config: Config, target: Target, operands: FusedMoeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        return _Grouped(operands, out, config)


def _columns(tile: Config, sizes: Sizes) -> int:
    """The tile's columns, or the most powers of two of 128 below them that divide hidden."""
    return next(n for n in (1024, 512, 256, 128) if n <= tile.columns and sizes.hidden % n == 0)


class _Grouped(ConfiguredPrepared):
    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, tile: Config) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.fused_moe import align_jit, grouped_jit

        super().__init__(operands, out)
        sizes: Sizes = operands.sizes
        fmt = fp8_format(sizes.fp8)
        device = out.device
        self.interpreted = device.type == "cpu"
        self.pairs = sizes.tokens * sizes.picks
        tiles = tiles_for(tile.rows, sizes)
        fnuz_bits = self.interpreted and sizes.fp8 == "e4m3fnuz"

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.counts, self.used = empty(sizes.held), empty(1)
        self.slots, self.owners = empty(tiles * tile.rows), empty(tiles)
        self.h_q = empty(tiles * tile.rows, sizes.inter, dtype=fmt.dtype)
        self.h_scale = empty(tiles * tile.rows, sizes.inter // BLOCK, dtype=torch.float32)
        # The interpreter truncates where it should round to FP8 and to bf16: there torch rounds.
        self.h_written = torch.zeros_like(self.h_q, dtype=torch.float32) if self.interpreted else self.h_q
        wide = torch.float32 if self.interpreted else torch.bfloat16
        self.given = empty(self.pairs, sizes.hidden, dtype=wide)
        self.written = torch.empty_like(out, dtype=torch.float32) if self.interpreted else out

        def bits(values: torch.Tensor) -> torch.Tensor:
            return values.view(torch.uint8) if fnuz_bits else values

        self.x_q, self.h_read = bits(operands.x_q), bits(self.h_q)
        self.w13, self.w2 = bits(operands.w13), bits(operands.w2)

        chunk = min(CHUNK["cpu" if self.interpreted else "cuda"], triton.next_power_of_2(self.pairs))
        columns = _columns(tile, sizes)
        product = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}[sizes.fp8]
        shared = {
            "HIDDEN": sizes.hidden,
            "INTER": sizes.inter,
            "BLOCK": BLOCK,
            "BLOCK_M": tile.rows,
            "PRODUCT": tl.float32 if self.interpreted else product,
            "FNUZ_BITS": fnuz_bits,
        }
        self.count = align_jit.count_kernel[(sizes.held,)]
        self.count_options = {"CHUNK": chunk}
        self.place = align_jit.place_kernel[(sizes.held,)]
        self.place_options = {
            "TILE": tile.rows,
            "CHUNK": chunk,
            "EXPERTS": triton.next_power_of_2(sizes.held),
        }
        self.up = grouped_jit.up_kernel[(tiles, sizes.inter // BLOCK)]
        self.up_options = {
            **shared,
            "PICKS": sizes.picks,
            "LARGEST": fmt.max,
            "SMALLEST_SCALE": SMALLEST_SCALE,
            "POWER_OF_TWO": sizes.scales == "ue8m0",
            **options(tile.warps, tile.up_stages, tile.instruction),
        }
        self.down = grouped_jit.down_kernel[(tiles, sizes.hidden // columns)]
        self.down_options = {
            **shared,
            "BLOCK_N": columns,
            **options(tile.warps, tile.down_stages, tile.instruction),
        }
        self.combine = grouped_jit.combine_kernel[(sizes.tokens, triton.cdiv(sizes.hidden, COMBINED))]
        self.combine_options = {
            "HIDDEN": sizes.hidden,
            "PICKS": sizes.picks,
            "PICKS_PADDED": triton.next_power_of_2(sizes.picks),
            "BLOCK_D": COMBINED,
        }

    def call(self) -> None:
        o = self.operands
        at = (self.slots, self.owners, self.used)
        self.count(o.topk_ids, self.counts, self.pairs, **self.count_options)
        self.place(o.topk_ids, self.counts, *at, self.pairs, len(self.counts), **self.place_options)
        self.up(
            self.x_q,
            o.x_scale,
            self.w13,
            o.w13_scale,
            *at,
            self.h_written,
            self.h_scale,
            self.pairs,
            **self.up_options,
        )
        if self.interpreted:
            self.h_q.copy_(self.h_written)
        down = (self.h_read, self.h_scale, self.w2, o.w2_scale, *at, self.given, self.pairs)
        self.down(*down, **self.down_options)
        self.combine(self.given, o.topk_ids, o.topk_weights, self.written, **self.combine_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
