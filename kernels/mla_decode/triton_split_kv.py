"""The suite's own MLA decode in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.mla_decode.problem import KV_BYTES, LATENT, ROPE, WIDTH, MlaDecodeOperands, Sizes
from kernels.triton_runtime import ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Config:
    """What one program of the split kernel takes, and how many there are.

    heads:    query heads
    tokens:   cached rows per step of its loop
    per_unit: programs that the splits are to give each compute unit
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    heads: int
    tokens: int
    per_unit: int = 1
    warps: int = 4
    stages: int = 2
    instruction: int = 0


@dataclass(frozen=True)
class Rule:
    """For ranks of few heads, and of many (attention data-parallel: 128); and where the cache is FP8."""

    few: Config
    many: Config
    few_fp8: Config
    many_fp8: Config


_ROCM = {"warps": 4, "stages": 2, "instruction": 16}
_MI300 = (Config(16, 32, **_ROCM), Config(64, 16, **_ROCM))
_CPU = (Config(16, 128, per_unit=2), Config(64, 128, per_unit=2))

# Per platform or architecture. 16 heads are the smallest matrix instruction; 64 take wgmma on sm_90 and
# tcgen05 on sm_100, but leave no registers for widening an FP8 cache; on ROCm they give each of the four
# waves its own heads. Tokens and stages: what fits without a spill, on gfx942 into 64 KB of shared memory;
# gfx950's full rate takes 32 tokens; and what lets an NVIDIA unit hold two programs of 16 heads. From
# compiling, not yet from measuring.
HEURISTIC = {
    "cuda": Rule(
        few=Config(16, 32, per_unit=2, warps=4, stages=5),
        many=Config(64, 32, warps=8, stages=3),
        few_fp8=Config(16, 32, warps=8, stages=3),
        many_fp8=Config(32, 32, warps=8, stages=3),
    ),
    "rocm": Rule(*_MI300, *_MI300),
    "gfx950": Rule(
        few=Config(16, 32, per_unit=2, **_ROCM),
        many=Config(64, 32, **_ROCM),
        few_fp8=Config(16, 32, **_ROCM),
        many_fp8=Config(64, 32, **_ROCM),
    ),
    "cpu": Rule(*_CPU, *_CPU),
}
FEW = 32  # heads

MIN_STEPS = 4  # below that a split costs more than it brings: its partial, and a pipeline to fill
MOST_PROGRAMS = 1216  # that splits make on any device: 304 compute units of an MI300X, four on each
COMBINE_VALUES = 8192  # partial values at once in a program of the combine: 64 registers per thread


def splits_for(config: Config, units: int, batch: int, heads: int, longest: int) -> int:
    """As many splits as give each compute unit the programs asked for, if the longest sequence has enough
    tokens for them."""
    fill = units * config.per_unit // (batch * math.ceil(heads / config.heads))
    return max(1, min(fill, longest // (MIN_STEPS * config.tokens)))


class SplitKv(SuiteTriton):
    """Each sequence is split between programs; a second kernel combines what they found."""

    name = "triton.split_kv"
    Config = Config
    older_instructions: ClassVar = {
        "split_kernel": "16 heads are 16 rows; 64 and an FP8 cache to widen do not fit the registers"
    }

    def configurations(self, target: Target, sizes: Sizes) -> Iterator[Config]:
        """Tiles of at most twice the heads that there are."""
        heads = [h for h in (16, 32, 64) if h < 2 * max(16, sizes.heads)]
        for h, tokens, per_unit, warps in itertools.product(heads, (16, 32, 64), (1, 2, 4), (4, 8)):
            if target.kind == "rocm":
                for stages in (1, 2):
                    yield Config(h, tokens, per_unit, warps, stages, 16)
            else:
                for stages in (2, 3, 4, 5):
                    yield Config(h, tokens, per_unit, warps, stages)

    def heuristic(self, target: Target, sizes: Sizes) -> Config:
        rule, few = target.pick(HEURISTIC), sizes.heads <= FEW
        if sizes.kv == "fp8":
            return rule.few_fp8 if few else rule.many_fp8
        return rule.few if few else rule.many

    def demands(self, config: Config, target: Target, sizes: Sizes) -> list[Demand]:
        lengths = sizes.lengths()
        splits = splits_for(config, target.units, sizes.batch, sizes.heads, max(lengths))
        blocks = math.ceil(sizes.heads / config.heads)
        row = WIDTH * KV_BYTES[sizes.kv]
        steps = math.ceil(math.ceil(max(lengths) / splits) / config.tokens)
        rows, query = sizes.batch * sizes.heads, 2.0 * WIDTH
        written = rows * splits * 4.0 * (LATENT + 1) if splits > 1 else rows * 2.0 * LATENT
        split = Demand(
            kernel="split_kernel",
            programs=sizes.batch * blocks * splits,
            flops=2.0 * config.heads * (WIDTH + LATENT) * config.tokens * steps,
            dtype="bf16",
            read=config.heads * query + row * config.tokens * steps,
            in_flight=row * config.tokens * max(1, config.stages - 1),
            moved=sizes.tokens * row + rows * query + written,
        )
        if splits == 1:
            return [split]
        read = 4.0 * splits * (LATENT + 1)
        moved = rows * (read + 2 * LATENT)
        return [split, Demand("combine_kernel", rows, 0, "fp32", read, read, moved)]

    def features(self, sizes: Sizes) -> dict[str, float | str]:
        """How long the sequences are, and not how that was written."""
        lengths = sizes.lengths()
        return {
            "batch": sizes.batch,
            "tokens": round(sum(lengths) / sizes.batch),
            "longest": max(lengths),
            "heads": sizes.heads,
            "page": sizes.page,
            "kv_bytes": KV_BYTES[sizes.kv],
        }

    def workspace(self, sizes: Sizes) -> int:
        """An upper bound over all platforms: their tiles and their number of programs differ."""
        rows = sizes.batch * sizes.heads
        splits = min(MOST_PROGRAMS // sizes.batch, max(sizes.lengths()) // (MIN_STEPS * 16))
        return rows * max(1, splits) * (LATENT + 1) * 4 + rows * LATENT * 4

    def prepare_with(
        self, config: Config, target: Target, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        batch, heads = operands.q.shape[:2]
        splits = splits_for(config, target.units, batch, heads, max(operands.host_lengths))
        return _SplitKv(operands, out, config, splits)


class _SplitKv(ConfiguredPrepared):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor, config: Config, splits: int) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.mla_decode.split_kv_jit import combine_kernel, split_kernel

        super().__init__(operands, out)
        batch, heads = operands.q.shape[:2]
        interpreted = out.device.type == "cpu"
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        self.splits = splits
        parts = batch * heads * splits
        self.log_sums = torch.empty(parts, dtype=torch.float32, device=out.device)
        self.partial = torch.empty(parts if splits > 1 else 0, LATENT, dtype=torch.float32, device=out.device)

        self.split = split_kernel[(triton.cdiv(heads, config.heads), batch, splits)]
        self.split_options = {
            "table_width": operands.page_table.shape[1],
            "score_scale": operands.scale * operands.kv_scale * math.log2(math.e),
            "value_scale": operands.kv_scale,
            "HEADS": heads,
            "PAGE": operands.page,
            "LATENT": LATENT,
            "ROPE": ROPE,
            "splits": splits,
            "ONE_SPLIT": splits == 1,
            "BLOCK_H": config.heads,
            "BLOCK_N": config.tokens,
            "PRODUCT": tl.float32 if interpreted else tl.bfloat16,
            **options(config.warps, config.stages, config.instruction),
        }
        padded = triton.next_power_of_2(splits)
        columns = min(LATENT, COMBINE_VALUES // padded)
        self.combine = combine_kernel[(batch * heads, LATENT // columns)]
        self.combine_options = {
            "LATENT": LATENT,
            "splits": splits,
            "SPLITS_PADDED": padded,
            "BLOCK_D": columns,
        }

    def call(self) -> None:
        o = self.operands
        self.split(
            o.q,
            o.kv,
            o.page_table,
            o.lengths,
            self.partial,
            self.log_sums,
            self.written,
            **self.split_options,
        )
        if self.splits > 1:
            self.combine(self.partial, self.log_sums, self.written, **self.combine_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
