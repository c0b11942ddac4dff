"""The suite's MLA decode in TileLang's language, split over the sequences' tokens.

Written after TileLang 0.1.15's documentation and examples/deepseek_mla. Its T.gemm is wgmma on sm_90 (mma for
tiles of 16 heads), mma on sm_100 and mfma on gfx942 and gfx950. Checked by TileLang's own compiler for CPUs,
compiled offline for these four, untested on hardware.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kernels import platform as platforms
from kernels.binding import Function, Symbol
from kernels.lazy import torch
from kernels.mla_decode.layouts import MOST_UNITS, FiniteCache, cache_bytes, compute_units, partial_bytes
from kernels.mla_decode.operands import WIDTH, MlaDecodeOperands, takes
from kernels.mla_decode.triton.split_kv_plan import WORTH_OF_HEAD, plan
from kernels.op import Prepared, implementation, sequence
from kernels.support import Support, need
from kernels.vendor import TileLang

SOURCES = "kernels.mla_decode.providers.tilelang_jit"

ATTEND = Function(*TileLang.CALL, positions=8)
COMBINE = Function(*TileLang.CALL, positions=4)
# What these programs take beside what all do.
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
    """What a program takes."""

    heads: int
    tokens: int  # of a step
    threads: int
    stages: int  # of the pipeline
    query_in_registers: bool = False


# Two tiles for each architecture: for numbers of heads that 64 does not divide, and for others. Shared memory
# of 228 KiB (sm_90, sm_100), 64 KiB (gfx942) or 160 KiB (gfx950) holds them.
TILES = {
    "sm_90": (AttendTile(16, 64, 128, 2), AttendTile(64, 32, 256, 2)),
    # TileLang 0.1.15 finds no layout there for 64 heads and 32 tokens.
    "sm_100": (AttendTile(16, 64, 128, 2), AttendTile(64, 64, 256, 1)),
    "gfx942": (AttendTile(16, 32, 128, 0), AttendTile(64, 32, 128, 0, query_in_registers=True)),
    "gfx950": (AttendTile(16, 64, 256, 0), AttendTile(64, 64, 256, 0)),
}
COMBINE_THREADS = 128


def tile_for(arch: str, heads: int, page: int) -> AttendTile:
    few, many = TILES[arch]
    tile = few if heads % many.heads else many
    # TileLang 0.1.15 fails to generate code of two stages that are not copied as tiles: their number of steps
    # is known to the call alone.
    return tile._replace(stages=min(1, tile.stages)) if page % tile.tokens else tile


@implementation(
    "tilelang.split",
    TileLang,
    symbols=(*TileLang.symbols, *LANGUAGE, ATTEND, COMBINE),
    fits=lambda sizes: Support.all_of(
        takes("bf16")(sizes), need(sizes.heads % 16 == 0, "needs heads to be a multiple of 16")
    ),
    # An upper bound: a plan has no more slots than two a program.
    workspace=lambda sizes: cache_bytes(sizes) + partial_bytes(2 * MOST_UNITS * sizes.heads),
)
def split(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """A second kernel combines what several parts of a sequence found; it is not called where none was split.
    Where a page is no whole number of steps, tokens are loaded one by one. The plan is made here, from
    lengths that are known before the step; a call only reads it."""
    cache, heads = FiniteCache(o), o.heads
    tile = tile_for(platforms.of(out.device).arch, heads, o.page)
    programs = max(1, compute_units(out.device) // (heads // tile.heads))
    parts = plan(tuple(o.host_lengths), tile.tokens, programs, WORTH_OF_HEAD * tile.heads)

    places, split = (
        torch.tensor(x, dtype=torch.int32, device=out.device) for x in (parts.parts, parts.split)
    )
    partial, log_sums = parts.buffers(heads, out.device)
    scale = o.scale * math.log2(math.e)
    given = (o.packed, cache.kv.view(-1, WIDTH), o.page_table, places, scale, partial, log_sums, out[:, 0])
    attend = ATTEND.bind(*given, method_of=TileLang.compiled(SOURCES, "attend", heads, o.page, *tile))
    if not parts.split:
        return cache.prepared(out, attend)
    kernel = TileLang.compiled(SOURCES, "combine", heads, COMBINE_THREADS)
    combine = COMBINE.bind(partial, log_sums, split, out[:, 0], method_of=kernel)
    return cache.prepared(out, sequence(attend, combine))
