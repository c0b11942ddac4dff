"""Rows in TileLang's language: right where TileLang compiles them for this CPU, and compiled for the devices
that they are meant for. What this cannot show: that they run there, and their layouts in shared memory."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest

import kernels
from kernels import platform
from kernels.block_scale_gemm.providers import tilelang as gemm
from kernels.formats import BLOCK, native
from kernels.mla_decode.operands import WIDTH
from kernels.mla_decode.providers import tilelang as mla
from kernels.operands import Seeds
from kernels.platform import named
from shapes.case import parse
from tests.support.judging import judged
from tests.support.tilelang_on_cpu import on_cpu

needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None,
    reason="tilelang is not installed: pip install '.[tilelang]'",
)

GEMM, MLA = "block_scale_gemm", "mla_decode"
RAGGED = "batch=3 ctx=1..200"
CASES = [
    # Few rows and many, tiles that are not full.
    *((GEMM, arch, f"m={m} n=192 k=384") for arch in ("sm_90", "gfx942") for m in (1, 130)),
    # Pages that are steps, and others, of which tokens are loaded one by one; few heads and many; sequences
    # of one part and of several.
    *((MLA, arch, f"{RAGGED} page=16") for arch in mla.TILES),
    *((MLA, "sm_90", f"{RAGGED} {more}") for more in ("page=64", "heads=128 page=64", "page=1")),
]


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize(("op", "arch", "text"), CASES)
def test_a_row_is_right(op: str, arch: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call, and after other live operands were loaded."""
    here = named("rocm" if arch.startswith("gfx") else "cuda", arch)
    monkeypatch.setattr(platform, "of", lambda device: here)
    monkeypatch.setattr(mla, "compute_units", lambda device: 4)
    of, row = kernels.OPS[op], next(i for i in kernels.implementations(op) if i.name.startswith("tilelang."))
    sizes = of.sizes({**of.defaults(arch), **parse(text)[0]})
    operands, out = of.operands(sizes, Seeds(), "cpu"), of.empty_output(sizes, "cpu")
    with on_cpu():
        prepared = row.prepare(operands, out)
        for live in (0, 1):
            given = of.operands(sizes, Seeds(live=live), "cpu")
            prepared.load(given.live_tensors())
            out.fill_(math.nan)
            prepared.call()
            report = judged(of, row, sizes, given, prepared.result())
            assert report["ok"], report["reason"]


DEVICES = {
    "sm_90": ({"kind": "cuda", "arch": "sm_90a"}, 227 << 10),
    "sm_100": ({"kind": "cuda", "arch": "sm_100a"}, 227 << 10),
    "gfx942": ({"kind": "hip", "mcpu": "gfx942"}, 64 << 10),
    "gfx950": ({"kind": "hip", "mcpu": "gfx950"}, 160 << 10),
}
"""TileLang's name of a target, and bytes of shared memory that a program may have there (CUDA's programming
guide, compute capabilities; AMD's CDNA 3 and CDNA 4 instruction set guides)."""


def lowered(arch: str, program: Callable[[], Any]) -> str:
    """Its source for that device."""
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target(DEVICES[arch][0])
    with target:
        return tilelang.lower(program(), target=target).kernel_source


def instruction(arch: str, rows: int) -> str:
    """What T.gemm must become: wgmma takes 64 rows."""
    if arch.startswith("gfx"):
        return "__builtin_amdgcn_mfma"
    return "tl::wgmma" if arch == "sm_90" and rows >= 64 else "tl::mma_sync"


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_the_gemm_compiles(arch: str) -> None:
    from kernels.block_scale_gemm.providers.tilelang_jit import scaled_product

    few, many = gemm.TILES["rocm" if arch.startswith("gfx") else "cuda"]
    shape = few if arch in ("sm_90", "gfx942") else many
    source = lowered(arch, lambda: scaled_product(7168, 2048, f"float8_{native(arch)}", *shape))
    assert instruction(arch, shape.rows) in source


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "heads", "page"), [*((arch, 128, 64) for arch in DEVICES), ("sm_90", 16, 1), ("gfx942", 16, 1)]
)
def test_mla_compiles(arch: str, heads: int, page: int) -> None:
    from kernels.mla_decode.providers.tilelang_jit import attend, combine

    shape = mla.tile_for(arch, heads, page)
    source = lowered(arch, lambda: attend(heads, page, *shape))
    assert instruction(arch, shape.heads) in source
    assert ("tma_load" in source) == (arch.startswith("sm") and page == 64)
    assert page > 1 or "exp2" in lowered(arch, lambda: combine(heads, mla.COMBINE_THREADS))


WORKSPACE = 4 << 10
"""Bytes left for barriers and for what warps reduce."""


@pytest.mark.parametrize("arch", DEVICES)
def test_tiles_fit_shared_memory(arch: str) -> None:
    room = DEVICES[arch][1] - WORKSPACE
    for tile in gemm.TILES["rocm" if arch.startswith("gfx") else "cuda"]:
        assert tile.stages * (tile.rows + BLOCK) * BLOCK <= room
    for shape in mla.TILES[arch]:
        query = 0 if shape.query_in_registers else 2 * shape.heads * WIDTH
        cache = max(1, shape.stages) * 2 * shape.tokens * WIDTH
        assert query + cache + 2 * shape.heads * shape.tokens <= room
