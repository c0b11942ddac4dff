"""The suite's MLA decode in TileLang's language: programs take parts of the sequences' tokens.

Written after TileLang 0.1.15's documentation and examples/deepseek_mla. Its T.gemm becomes wgmma on sm_90
(mma for tiles of 16 heads), mma on sm_100, and mfma on gfx942 and gfx950. The kernels were checked on a CPU
with TileLang's compiler for CPUs, and compiled for these four architectures; untested on hardware."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernels import platform as platforms
from kernels.binding import Function, Symbol
from kernels.lazy import torch
from kernels.mla_decode.layouts import MOST_UNITS, FiniteCache, cache_bytes, compute_units, partial_bytes
from kernels.mla_decode.operands import WIDTH, MlaDecodeOperands, takes
from kernels.mla_decode.triton.split_kv_plan import LEAST_TOKENS_PER_HEAD, plan
from kernels.op import Prepared, implementation, sequence
from kernels.support import Support, need
from kernels.vendor import TileLang

SOURCES = "kernels.mla_decode.providers.tilelang_jit"
ATTEND = Function(*TileLang.CALL, positions=8)
COMBINE = Function(*TileLang.CALL, positions=4)
# What these programs take of the language beyond TileLang.symbols, which all programs take.
LANGUAGE = (
    Symbol("tilelang.language.GemmWarpPolicy"),
    Function("tilelang.language.gemm", positions=3, needs="transpose_B policy"),
    Function("tilelang.language.alloc_local", positions=2),
    Function("tilelang.language.serial", positions=1),
    Function("tilelang.language.fill", positions=2),
    Function("tilelang.language.reduce_max", positions=2, needs="dim clear"),
    Function("tilelang.language.reduce_sum", positions=2, needs="dim"),
)


class AttendTile(NamedTuple):
    """What a program takes at once, in the order of the parameters of `tilelang_jit.attend`."""

    heads: int
    tokens: int  # of a step of its loop
    threads: int
    stages: int  # of the pipeline of the loop
    query_in_registers: bool = False  # not in shared memory


# Architecture -> the tile for numbers of heads that 64 does not divide, and the tile for the other numbers.
# Shared memory of 228 KiB (sm_90, sm_100), 64 KiB (gfx942) or 160 KiB (gfx950) holds them.
TILES = {
    "sm_90": (AttendTile(16, 64, 128, 2), AttendTile(64, 32, 256, 2)),
    # TileLang 0.1.15 finds no layout there for 64 heads and 32 tokens.
    "sm_100": (AttendTile(16, 64, 128, 2), AttendTile(64, 64, 256, 1)),
    "gfx942": (AttendTile(16, 32, 128, 0), AttendTile(64, 32, 128, 0, query_in_registers=True)),
    "gfx950": (AttendTile(16, 64, 256, 0), AttendTile(64, 64, 256, 0)),
}
COMBINE_THREADS = 128


def tile_for(arch: str, heads: int, page: int) -> AttendTile:
    few_heads, many_heads = TILES[arch]
    tile = many_heads if heads % many_heads.heads == 0 else few_heads
    # Where steps do not divide a page, tokens are loaded one by one. TileLang 0.1.15 fails to generate code
    # for that with two stages, because the number of steps is not known before the call.
    return tile if page % tile.tokens == 0 else tile._replace(stages=min(1, tile.stages))


@implementation(
    "tilelang.split",
    TileLang,
    symbols=(*TileLang.symbols, *LANGUAGE, ATTEND, COMBINE),
    fits=lambda sizes: Support.all_of(
        takes("bf16")(sizes), need(sizes.heads % 16 == 0, "needs heads to be a multiple of 16")
    ),
    # An upper bound: a plan has at most two slots for each program.
    workspace=lambda sizes: cache_bytes(sizes) + partial_bytes(2 * MOST_UNITS * sizes.heads),
)
def split(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """A second kernel combines the partial results of sequences that were split; it is not called where there
    are none. The plan is made here, from lengths that are known before the step; a call only reads it."""
    cache, heads, device = FiniteCache(o), o.heads, out.device
    tile = tile_for(platforms.of(device).arch, heads, o.page)
    programs = max(1, compute_units(device) // (heads // tile.heads))
    split_plan = plan(tuple(o.host_lengths), tile.tokens, programs, LEAST_TOKENS_PER_HEAD * tile.heads)
    parts = torch.tensor(split_plan.parts, dtype=torch.int32, device=device)
    partial, log_sums = split_plan.buffers(heads, device)
    scale = o.scale * math.log2(math.e)
    inputs = (o.packed, cache.kv.view(-1, WIDTH), o.page_table, parts, scale)
    kernel = TileLang.compiled(SOURCES, "attend", heads, o.page, *tile)
    attend = ATTEND.bind(*inputs, partial, log_sums, out[:, 0], method_of=kernel)
    if not split_plan.split:
        return cache.prepared(out, attend)
    split_sequences = torch.tensor(split_plan.split, dtype=torch.int32, device=device)
    kernel = TileLang.compiled(SOURCES, "combine", heads, COMBINE_THREADS)
    combine = COMBINE.bind(partial, log_sums, split_sequences, out[:, 0], method_of=kernel)
    return cache.prepared(out, sequence(attend, combine))
