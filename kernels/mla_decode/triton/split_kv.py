"""The suite's own MLA decode in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from kernels.mla_decode.layouts import MOST_UNITS
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import KV_BYTES, LATENT, ROPE, WIDTH, MlaDecodeSizes
from kernels.mla_decode.triton.split_kv_configs import (
    LEAST_HEADS,
    MOST_HEADS,
    MOST_PER_UNIT,
    SplitKvConfig,
    heuristic,
    tiles,
)
from kernels.mla_decode.triton.split_kv_plan import SplitPlan, plan
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch

XCDS = {"rocm": 8}  # dies with a level-2 cache of their own: MI300X, MI325X and MI355X have eight
WORTH_OF_HEAD = 4  # tokens: to write and read again what a head found moves about as many bytes
COMBINE_VALUES = 8192  # partial values at once in a program of the combine: 64 registers per thread
INTERPRETED_STEP_S = 0.012  # of the interpreter, on one core of a Zen 4 server: a tile of 128 tokens


def plan_for(config: SplitKvConfig, units: int, lengths: Sequence[int], heads: int) -> SplitPlan:
    programs = units * config.per_unit // config.blocks(heads)
    return plan(tuple(lengths), config.tokens, max(1, programs), WORTH_OF_HEAD * config.heads)


class SplitKv(SuiteTriton):
    """Long sequences are split between programs; a second kernel combines what they found of those, and is
    not called where no sequence was split."""

    name = "triton.split_kv"
    Config = SplitKvConfig
    older_instructions: ClassVar = {
        "split_kernel": "16 heads are 16 rows, and memory bounds them; on sm_100 registers do not "
        "hold 64 and an FP8 cache to widen"
    }

    def configurations(self, target: Target, sizes: MlaDecodeSizes) -> Iterator[SplitKvConfig]:
        return tiles(target, sizes)

    def heuristic(self, target: Target, sizes: MlaDecodeSizes) -> SplitKvConfig:
        return heuristic(target, sizes)

    def demands(self, config: SplitKvConfig, target: Target, sizes: MlaDecodeSizes) -> list[Demand]:
        """Of a program of mean length where there are several waves of them, of the longest where one wave
        has all: it lasts as long as that. Without a pipeline a step is on its way half of the time."""
        lengths = sizes.lengths()
        plan, blocks = plan_for(config, target.units, lengths, sizes.heads), config.blocks(sizes.heads)
        programs = len(plan.parts) * blocks
        mean = sum(math.ceil((end - first) / config.tokens) for _, first, end, _ in plan.parts)
        one_wave = programs <= target.units * config.per_unit
        steps = math.ceil(plan.longest / config.tokens) if one_wave else mean / len(plan.parts)

        tokens, row = config.tokens * steps, WIDTH * KV_BYTES[sizes.kv]
        query, part = 2 * WIDTH, 4 * (LATENT + 1)  # bytes of a head
        whole = sizes.batch - len(plan.split)
        results = sizes.heads * (plan.slots * part + whole * 2 * LATENT)
        split = Demand(
            kernel="split_kernel",
            programs=programs,
            flops=2.0 * config.heads * tokens * (WIDTH * config.score_padding(target) + LATENT),
            dtype="bf16",
            read=config.heads * query + tokens * row * (2 if config.reload else 1),
            in_flight=row * config.tokens * max(1, config.stages - 1),
            overlaps=config.stages > 1,
            moved=sizes.tokens * row + sizes.batch * sizes.heads * query + results,
        )
        if not plan.split:
            return [split]
        rows, columns = len(plan.split) * sizes.heads, combine_columns(plan)
        read = 4.0 * columns * plan.slots / len(plan.split)
        moved = sizes.heads * (plan.slots * part + len(plan.split) * 2 * LATENT)
        return [split, Demand("combine_kernel", rows * LATENT // columns, 0, "fp32", read, read, moved)]

    def features(self, sizes: MlaDecodeSizes) -> dict[str, float | str]:
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

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """An upper bound over all platforms and configurations. A plan has no more slots than programs or
        than two a sequence, and a split sequence no more than parts of the least length, and one."""
        programs = MOST_UNITS * MOST_PER_UNIT // math.ceil(sizes.heads / MOST_HEADS)
        slots = min(
            max(programs, 2 * min(sizes.batch, programs)),
            sizes.batch + sizes.tokens // (WORTH_OF_HEAD * LEAST_HEADS),
        )
        return slots * sizes.heads * (LATENT + 1) * 4

    def interpreted_s(self, sizes: MlaDecodeSizes) -> float:
        config = self.heuristic(CPU, sizes)
        tiles = sum(math.ceil(length / config.tokens) for length in sizes.lengths())
        return INTERPRETED_STEP_S * tiles * config.blocks(sizes.heads)

    def prepare_with(
        self, config: SplitKvConfig, target: Target, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        plan = plan_for(config, target.units, operands.host_lengths, operands.q.shape[1])
        return _SplitKv(operands, out, config, target, plan)


def combine_columns(plan: SplitPlan) -> int:
    """Of a program of the combine."""
    return min(LATENT, COMBINE_VALUES // _power_of_2(plan.most))


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class _SplitKv(ConfiguredPrepared):
    """The plan is made here, on the host and untimed, from lengths that are known before the step: engines
    make theirs once a step too, for the attention of all layers. A call only reads it."""

    def __init__(
        self,
        operands: MlaDecodeOperands,
        out: torch.Tensor,
        config: SplitKvConfig,
        target: Target,
        plan: SplitPlan,
    ) -> None:
        import torch
        import triton.language as tl

        from kernels.mla_decode.triton.split_kv_jit import combine_kernel, split_kernel

        super().__init__(operands, out)
        heads, xcds = operands.q.shape[1], XCDS.get(target.kind, 1)
        interpreted = out.device.type == "cpu"
        fnuz_bits = interpreted and operands.kv.dtype == torch.float8_e4m3fnuz
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        self.plan = plan

        def table(rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int32, device=out.device)

        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(plan.slots, *shape, dtype=torch.float32, device=out.device)

        self.log_sums, self.partial = buffer(heads), buffer(heads, LATENT)
        nothing = [(0, 0, 0, -1)] * (-len(plan.parts) % xcds)
        self.split = split_kernel[((len(plan.parts) + len(nothing)) * config.blocks(heads),)]
        self.split_arguments = (
            operands.q,
            operands.kv.view(torch.uint8) if fnuz_bits else operands.kv,
            operands.page_table,
            table([*plan.parts, *nothing]),
            self.partial,
            self.log_sums,
            self.written,
        )
        self.split_options = {
            "table_width": operands.page_table.shape[1],
            "score_scale": operands.scale * operands.kv_scale * math.log2(math.e),
            "value_scale": operands.kv_scale,
            "HEADS": heads,
            "PAGE": operands.page,
            "LATENT": LATENT,
            "ROPE": ROPE,
            "BLOCK_H": config.heads,
            "BLOCK_N": config.tokens,
            "SWAP": config.swap,
            "APART": config.apart(target),
            "RELOAD": config.reload,
            "XCDS": xcds,
            "PRODUCT": tl.float32 if interpreted else tl.bfloat16,
            "FNUZ_BITS": fnuz_bits,
            **options(config.warps, config.stages, config.instruction),
        }
        columns = combine_columns(plan)
        self.combine = combine_kernel[(len(plan.split) * heads, LATENT // columns)]
        self.combine_arguments = (self.partial, self.log_sums, table(plan.split), self.written)
        self.combine_options = {
            "HEADS": heads,
            "LATENT": LATENT,
            "MOST": _power_of_2(plan.most),
            "BLOCK_D": columns,
        }

    def call(self) -> None:
        self.split(*self.split_arguments, **self.split_options)
        if self.plan.split:
            self.combine(*self.combine_arguments, **self.combine_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
