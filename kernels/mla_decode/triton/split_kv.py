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
from kernels.mla_decode.operands import (
    LATENT,
    MOST_QUERIES,
    ROPE,
    WIDTH,
    MlaDecodeOperands,
    MlaDecodeSizes,
    takes,
)
from kernels.mla_decode.triton.split_kv_plan import WORTH_OF_HEAD, plan
from kernels.support import Support
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Target

if TYPE_CHECKING:
    import torch

XCDS = {"rocm": 8}  # dies with a level-2 cache of their own: MI300X, MI325X and MI355X have eight
COMBINE_VALUES = 8192  # partial values at once in a program of the combine: 64 registers per thread
INTERPRETED_STEP_S = 0.012  # seconds for a tile of 128 tokens in the interpreter, on one core of Zen 4

PER_UNIT = (1, 2, 4, 8)
LEAST_HEADS, MOST_HEADS = 16, 64  # of a block


@dataclass(frozen=True)
class SplitKvConfig:
    """What one program of the split kernel takes, and how many programs there are."""

    heads: int  # query rows: the heads of its query tokens
    tokens: int  # cached rows of a step of its loop
    # It computes transposed tiles: tokens and latents are the rows of sm_90's instructions.
    swap: bool = False
    # It loads the tokens again for the second product, which wants them in another order: otherwise gfx942
    # reads one of the two operands from shared memory in 16 bits at a time.
    reload: bool = False
    per_unit: int = 1  # programs for each compute unit
    warps: int = 4
    stages: int = 2
    instruction: int = 0  # rows of AMD's matrix instruction, 0 elsewhere


# Rows, tokens, warps and numbers of stages; the compiler says which of them fit.
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


# For few and for many rows, and for FP8 caches where they need another. With 16 rows memory is the bound:
# there are so many programs on a unit that enough bytes are in flight. With 64 rows products are the
# bound: tiles fit the fastest instructions, and a step has so many tokens that those do not wait for shared
# memory. None spills with Triton 3.6 and 3.7, and on gfx942 64 KB of shared memory are enough. Chosen by
# compiling, not by timing.
HEURISTIC = {
    "cuda few": SplitKvConfig(16, 32, per_unit=2, warps=4, stages=3),
    "cuda many": SplitKvConfig(64, 64, warps=8, stages=2),
    "cuda many fp8": SplitKvConfig(64, 64, warps=8, stages=3),
    "sm_100 few": SplitKvConfig(16, 32, per_unit=2, warps=4, stages=3),
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
FEW = 32  # rows

# (architecture, rows, tokens, warps, stages) that spill where rows see different numbers of tokens.
SPILLS_AT_EDGES = {("gfx942", 16, 32, 2, 2), ("sm_90", 16, 64, 4, 2)}


def rows_of(sizes: MlaDecodeSizes) -> int:
    """Rows that read the same cache: a head of each query token."""
    return sizes.q * sizes.heads


class SplitKv(SuiteTriton):
    """Long sequences are split between programs. A second kernel combines the partial results of a sequence;
    it is not called where no sequence was split."""

    name = "triton.split_kv"
    Config = SplitKvConfig
    older_instructions: ClassVar = {
        "split_kernel": "memory bounds 16 rows; on sm_100 registers do not hold 64 and an FP8 cache to widen"
    }

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return takes(most_q=MOST_QUERIES)(sizes)

    def configurations(self, target: Target, sizes: MlaDecodeSizes) -> Iterator[SplitKvConfig]:
        """All blocks of rows that are not padded to twice the rows and not so small that more than four of
        them read the same tokens; for very many rows, the larger ones."""
        rows = rows_of(sizes)
        blocks = [block for block in (16, 32, 64) if rows <= 4 * block and block < 2 * max(16, rows)]
        instruction = 16 if target.kind == "rocm" else 0
        for block, tokens, warps, stages in _TILES[target.kind]:
            if block not in (blocks or [32, 64]):
                continue
            for w, s, per_unit in itertools.product(warps, stages, PER_UNIT):
                in_registers = tokens * WIDTH * BYTES[sizes.kv] * (s - 1)  # of AMD's pipelines
                spills = sizes.q > 1 and (target.arch, block, tokens, w, s) in SPILLS_AT_EDGES
                if spills or (target.kind == "rocm" and in_registers > target.shared):
                    continue
                config = SplitKvConfig(block, tokens, False, False, per_unit, w, s, instruction)
                yield config
                if target.arch == "gfx942" and tokens == 16:
                    yield replace(config, reload=True)
                if target.arch == "sm_90" and (block, tokens, w, s) == (16, 64, 4, 2):
                    yield replace(config, swap=True)

    def heuristic(self, target: Target, sizes: MlaDecodeSizes) -> SplitKvConfig:
        rows = "few" if rows_of(sizes) <= FEW else "many"
        names = (f"{where} {rows}{kv}" for where in (target.arch, target.kind) for kv in (f" {sizes.kv}", ""))
        return next(HEURISTIC[name] for name in names if name in HEURISTIC)

    def features(self, sizes: MlaDecodeSizes) -> dict[str, float | str]:
        """The lengths of the sequences, however they were given. Rows count, under the name that they have in
        stored tables; q tells a case of several query tokens from one of as many heads."""
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
        """An upper bound over all platforms and configurations. A plan has no more slots than programs or
        than two a sequence, and a split sequence no more than parts of the least length, and one."""
        programs = MOST_UNITS * max(PER_UNIT) // math.ceil(rows_of(sizes) / MOST_HEADS)
        of_programs = max(programs, 2 * min(sizes.batch, programs))
        slots = min(of_programs, sizes.batch + sizes.tokens // (WORTH_OF_HEAD * LEAST_HEADS))
        return partial_bytes(slots * rows_of(sizes))

    def interpreted_s(self, sizes: MlaDecodeSizes) -> float:
        config = self.heuristic(CPU, sizes)
        tiles = sum(math.ceil(length / config.tokens) for length in sizes.lengths())
        return INTERPRETED_STEP_S * tiles * math.ceil(rows_of(sizes) / config.heads)

    def prepare_with(
        self, config: SplitKvConfig, target: Target, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import torch
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
        split = plan(tuple(o.host_lengths), config.tokens, programs, WORTH_OF_HEAD * config.heads)
        nothing = [(0, 0, 0, -1)] * (-len(split.parts) % xcds)
        parts = torch.tensor([*split.parts, *nothing], dtype=torch.int32, device=out.device)
        partial, log_sums = split.buffers(rows, out.device)
        # The rows of sm_90's fast instruction, and the fewest of sm_100's, are 64. See split_kv_jit.
        wide = config.heads >= 64 and config.warps > 4
        apart = target.kind == "cuda" and wide and not config.swap
        tensors = (o.q, kv, o.page_table, parts, partial, log_sums, prepared.written)
        first = functools.partial(
            split_kernel[(len(parts) * blocks,)],
            *tensors,
            table_width=o.page_table.shape[1],
            score_scale=o.scale * o.kv_scale * math.log2(math.e),
            value_scale=o.kv_scale,
            lengths=o.lengths if o.sizes.q > 1 else None,
            HEADS=o.heads,
            ROWS=rows,
            PAGE=o.page,
            LATENT=LATENT,
            ROPE=ROPE,
            BLOCK_H=config.heads,
            BLOCK_N=config.tokens,
            SWAP=config.swap,
            RELOAD=config.reload,
            APART=apart,
            XCDS=xcds,
            PRODUCT=tl.float32 if prepared.interpreted else tl.bfloat16,
            FNUZ_BITS=kv.dtype == torch.uint8,
            **options(config.warps, config.stages, config.instruction),
        )
        prepared.launches = [first]
        if split.split:
            # The most slots of a sequence, rounded up to a power of two.
            most = 1 << (max(count for *_, count in split.split) - 1).bit_length()
            columns = min(LATENT, COMBINE_VALUES // most)
            kernel = combine_kernel[(len(split.split) * rows, LATENT // columns)]
            entries = torch.tensor(split.split, dtype=torch.int32, device=out.device)
            constants = {"ROWS": rows, "LATENT": LATENT, "MOST": most, "BLOCK_D": columns}
            second = functools.partial(kernel, partial, log_sums, entries, prepared.written, **constants)
            prepared.launches.append(second)
        return prepared
