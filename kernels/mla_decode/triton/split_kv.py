"""The suite's own MLA decode in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kernels.attention import BYTES
from kernels.mla_decode.layouts import MOST_UNITS, partial_bytes
from kernels.mla_decode.operands import LATENT, ROPE, WIDTH, MlaDecodeOperands, MlaDecodeSizes
from kernels.mla_decode.triton.split_kv_plan import LEAST_TOKENS_PER_HEAD, Part, plan
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Target

if TYPE_CHECKING:
    import torch

XCDS = {"rocm": 8}  # dies with a level-2 cache of their own: MI300X, MI325X and MI355X have eight
COMBINE_VALUES = 8192  # partial values at once in a program of the combine: 64 registers per thread
INTERPRETED_STEP_S = 0.012  # seconds for a tile of 128 tokens in the interpreter, on one core of Zen 4
PER_UNIT = (1, 2, 4, 8)
LEAST_ROWS, MOST_ROWS = 16, 64  # query rows of a block


@dataclass(frozen=True)
class SplitKvConfig:
    """What one program of the split kernel takes, and how many programs there are."""

    heads: int  # query rows of a block: the heads of one query token, or of several
    tokens: int  # cached rows of a step of its loop
    # It computes transposed tiles: tokens and latents are the rows of sm_90's instructions.
    swap: bool = False
    # It loads the tokens again for the second product, which wants them in another order: otherwise gfx942
    # reads one of the two operands from shared memory in 16 bits at a time.
    reload: bool = False
    per_unit: int = 1  # programs for each compute unit
    warps: int = 4
    stages: int = 2  # of the pipeline of its loop
    instruction: int = 0  # rows of AMD's matrix instruction, 0 elsewhere


# (heads, tokens, numbers of warps, numbers of stages); the compiler says which of them fit.
_TILES = {
    "cuda": (
        (16, 16, (4,), (2, 3, 4, 5)),
        (16, 32, (4, 8), (2, 3, 4)),
        (16, 64, (4, 8), (2, 3)),
        (32, 16, (8,), (3, 4)),
        (32, 32, (8,), (2, 3, 4)),
        (32, 64, (8,), (2, 3)),
        (64, 32, (8,), (2, 3, 4)),
        (64, 64, (8,), (2, 3)),
    ),
    "rocm": (
        (16, 16, (2, 4), (1, 2)),
        (16, 32, (2, 4), (1, 2)),
        (16, 64, (4,), (1, 2)),
        (32, 16, (4,), (1, 2)),
        (32, 32, (4,), (1, 2)),
        (64, 16, (4,), (1, 2)),
        (64, 32, (4,), (1, 2)),
    ),
    "cpu": ((16, 32, (4,), (2,)), (16, 128, (4,), (2,)), (64, 128, (4,), (2,))),
}
# For few and for many rows, and for FP8 caches where they need another one. With 16 rows memory bandwidth is
# the bound: enough programs run on a compute unit to keep its loads in flight. With 64 rows products are the
# bound: tiles fit the fastest instructions, and steps have enough tokens that these do not wait for shared
# memory. Chosen by compiling, not by timing: with Triton 3.6 and 3.7 none spills, or exceeds gfx942's 64 KB.
HEURISTIC = {
    "cuda few": SplitKvConfig(16, 32, per_unit=2, warps=4, stages=3),
    "cuda many": SplitKvConfig(64, 64, warps=8, stages=2),
    "cuda many fp8": SplitKvConfig(64, 64, warps=8, stages=3),
    "sm_100 many": SplitKvConfig(64, 32, warps=8, stages=3),
    "sm_100 few fp8": SplitKvConfig(16, 16, per_unit=2, warps=4, stages=5),
    "sm_100 many fp8": SplitKvConfig(32, 32, warps=8, stages=4),
    "rocm few": SplitKvConfig(16, 16, per_unit=2, warps=4, stages=2, instruction=16),
    "rocm many": SplitKvConfig(64, 16, reload=True, warps=4, stages=2, instruction=16),
    "gfx950 few": SplitKvConfig(16, 32, per_unit=2, warps=4, stages=2, instruction=16),
    "gfx950 many": SplitKvConfig(64, 32, warps=4, stages=2, instruction=16),
    # 32 tokens spill with Triton 3.6.
    "gfx950 many fp8": SplitKvConfig(64, 16, warps=4, stages=2, instruction=16),
    "cpu few": SplitKvConfig(16, 128, per_unit=2),
    "cpu many": SplitKvConfig(64, 128, per_unit=2),
}
FEW = 32  # the most rows that count as few
# (architecture, heads, tokens, warps, stages) that spill where query tokens see different numbers of keys.
SPILLS_AT_EDGES = {("gfx942", 16, 32, 2, 2), ("sm_90", 16, 64, 4, 2)}


def rows_of(sizes: MlaDecodeSizes) -> int:
    """Query rows that read the same cached rows: the heads of all query tokens of a sequence."""
    return sizes.q * sizes.heads


class SplitKv(SuiteTriton):
    """Long sequences are split between programs. A second kernel combines the partial results of a sequence;
    it is not launched where no sequence was split."""

    name = "triton.split_kv"
    Config = SplitKvConfig
    # The tokens of an FP8 cache are widened to bf16: registers of sm_100 do not hold 64 rows beside them.
    older_instructions: ClassVar = {
        "split_kernel": "memory is the bound with 16 rows; 64 rows and an FP8 cache exceed sm_100's registers"
    }

    def configurations(self, target: Target, sizes: MlaDecodeSizes) -> Iterator[SplitKvConfig]:
        """Blocks of less than twice the rows that read the same tokens, of which at most four cover these
        rows. For more rows than four of the largest blocks have, all but the smallest blocks."""
        rows = rows_of(sizes)
        blocks = [b for b in (16, 32, 64) if rows <= 4 * b and b < 2 * max(16, rows)] or [32, 64]
        instruction = 16 if target.kind == "rocm" else 0
        for block, tokens, warp_counts, stage_counts in _TILES[target.kind]:
            if block not in blocks:
                continue
            for warps, stages, per_unit in itertools.product(warp_counts, stage_counts, PER_UNIT):
                # What AMD's pipelines hold in shared memory.
                buffered_bytes = tokens * WIDTH * BYTES[sizes.kv] * (stages - 1)
                does_not_fit = target.kind == "rocm" and buffered_bytes > target.shared
                spills = sizes.q > 1 and (target.arch, block, tokens, warps, stages) in SPILLS_AT_EDGES
                if spills or does_not_fit:
                    continue
                config = SplitKvConfig(
                    block, tokens, per_unit=per_unit, warps=warps, stages=stages, instruction=instruction
                )
                yield config
                if target.arch == "gfx942" and tokens == 16:
                    yield replace(config, reload=True)
                # The 64 tokens are then the 64 rows of an instruction, which four warps compute together.
                if target.arch == "sm_90" and (block, tokens, warps, stages) == (16, 64, 4, 2):
                    yield replace(config, swap=True)

    def heuristic(self, target: Target, sizes: MlaDecodeSizes) -> SplitKvConfig:
        rows = "few" if rows_of(sizes) <= FEW else "many"
        of_arch, of_kind = f"{target.arch} {rows}", f"{target.kind} {rows}"
        names = (f"{of_arch} {sizes.kv}", of_arch, f"{of_kind} {sizes.kv}", of_kind)
        return next(HEURISTIC[name] for name in names if name in HEURISTIC)

    def features(self, sizes: MlaDecodeSizes) -> dict[str, float | str]:
        """Cases with the same lengths are alike, however `ctx` gives them. `heads`, a name that stored tables
        have, counts the rows of all query tokens: only q tells 2 tokens of 16 heads from 1 token of 32."""
        lengths = sizes.lengths()
        return {
            "batch": sizes.batch,
            "tokens": round(sum(lengths) / sizes.batch),
            "longest": max(lengths),
            "heads": rows_of(sizes),
            "page": sizes.page,
            "kv_bytes": BYTES[sizes.kv],
            **({"q": sizes.q} if sizes.q > 1 else {}),
        }

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """An upper bound over all platforms and configurations, whose numbers of programs differ. A plan has
        at most one slot for each program, or two where there are no more programs than sequences. It also has
        at most one slot for each part of the least length, and one more for each sequence."""
        most_programs = MOST_UNITS * max(PER_UNIT) // math.ceil(rows_of(sizes) / MOST_ROWS)
        by_programs = max(most_programs, 2 * min(sizes.batch, most_programs))
        by_length = sizes.batch + sizes.tokens // (LEAST_TOKENS_PER_HEAD * LEAST_ROWS)
        return partial_bytes(min(by_programs, by_length) * rows_of(sizes))

    def interpreted_s(self, sizes: MlaDecodeSizes) -> float:
        config = self.heuristic(CPU, sizes)
        tiles = sum(math.ceil(length / config.tokens) for length in sizes.lengths())
        return INTERPRETED_STEP_S * tiles * math.ceil(rows_of(sizes) / config.heads)

    def prepare_with(
        self, config: SplitKvConfig, target: Target, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import torch
        import triton
        import triton.language as tl

        from kernels.mla_decode.triton.split_kv_jit import combine_kernel, split_kernel

        prepared, o = ConfiguredPrepared(operands, out), operands
        rows = rows_of(o.sizes)
        xcds = XCDS.get(target.kind, 1)
        kv = prepared.readable(o.kv)
        blocks = math.ceil(rows / config.heads)
        # The plan is made here, on the host and untimed, from lengths that are known before the step. Engines
        # also make a plan once a step, for the attention of all layers. A call only reads the plan.
        programs = max(1, target.units * config.per_unit // blocks)
        least_tokens = LEAST_TOKENS_PER_HEAD * config.heads
        split_plan = plan(tuple(o.host_lengths), config.tokens, programs, least_tokens)
        # Empty parts fill up the last round of programs on the dies.
        empty_parts = [Part(0, 0, 0, -1)] * (-len(split_plan.parts) % xcds)
        parts = torch.tensor([*split_plan.parts, *empty_parts], dtype=torch.int32, device=out.device)
        partial, log_sums = split_plan.buffers(rows, out.device)
        # The rows of sm_90's fast instruction, and the fewest of sm_100's, are 64. With so many the kernel
        # computes the products of the latent and of the rope part apart.
        fills_instructions = config.heads >= 64 and config.warps > 4
        apart = target.kind == "cuda" and fills_instructions and not config.swap
        tensors = (o.q, kv, o.page_table, parts, partial, log_sums, prepared.written)
        first = functools.partial(
            split_kernel[(len(parts) * blocks,)],
            *tensors,
            table_width=o.page_table.shape[1],
            score_scale=o.scale * o.kv_scale * math.log2(math.e),
            value_scale=o.kv_scale,
            lengths=o.lengths if o.sizes.q > 1 else None,
            HEADS=o.heads, ROWS=rows, PAGE=o.page, LATENT=LATENT, ROPE=ROPE,
            BLOCK_H=config.heads, BLOCK_N=config.tokens,
            SWAP=config.swap, RELOAD=config.reload, APART=apart, XCDS=xcds,
            PRODUCT=tl.float32 if prepared.interpreted else tl.bfloat16,
            FNUZ_BITS=kv.dtype == torch.uint8,
            **options(config.warps, config.stages, config.instruction),
        )  # fmt: skip
        prepared.launches = [first]
        if split_plan.split:
            most_slots = triton.next_power_of_2(max(sequence.slots for sequence in split_plan.split))
            columns = min(LATENT, COMBINE_VALUES // most_slots)
            kernel = combine_kernel[(len(split_plan.split) * rows, LATENT // columns)]
            split = torch.tensor(split_plan.split, dtype=torch.int32, device=out.device)
            constants = {"ROWS": rows, "LATENT": LATENT, "MOST_SLOTS": most_slots, "BLOCK_D": columns}
            second = functools.partial(kernel, partial, log_sums, split, prepared.written, **constants)
            prepared.launches.append(second)
        return prepared
