"""Rows in TileLang's language: right where TileLang compiles them for this CPU, and compiled for the devices
that they are meant for. What this cannot show: that they run there, and their layouts in shared memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from kernels.block_scale_gemm.providers import tilelang as gemm
from kernels.formats import BLOCK, native
from kernels.mla_decode.providers import tilelang as mla
from kernels.mla_decode.sizes import WIDTH
from tests.support.broken_calls import survivors
from tests.support.judging import keep
from tests.support.recorded import Case
from tests.support.recorded_rows import RAGGED, TILELANG
from tests.support.tilelang_on_cpu import on_cpu

needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None,
    reason="tilelang is not installed: pip install '.[tilelang]'",
)

ONCE = [
    case
    for case in TILELANG
    if case.arch == "sm_90" and case.text in ("m=33 n=384 k=640", f"{RAGGED} page=16")
]
"""Each program once: rows that fill no tile, pages that are no steps."""


def name(case: Case) -> str:
    return f"{case.name} {case}"


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("case", TILELANG, ids=name)
def test_a_row_computes_the_references_answer(case: Case) -> None:
    with on_cpu():
        keep(case, {})


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("case", ONCE, ids=name)
def test_a_broken_argument_is_noticed(case: Case) -> None:
    with on_cpu():
        assert survivors(lambda: keep(case, {})) == []


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
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("arch", DEVICES)
def test_the_gemm_compiles(arch: str, tile: int) -> None:
    from kernels.block_scale_gemm.providers.tilelang_jit import scaled_product

    shape = gemm.TILES["rocm" if arch.startswith("gfx") else "cuda"][tile]
    source = lowered(arch, lambda: scaled_product(7168, 2048, f"float8_{native(arch)}", *shape))
    assert instruction(arch, shape.rows) in source


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("arch", DEVICES)
def test_mla_compiles(arch: str, tile: int, page: int) -> None:
    from kernels.mla_decode.providers.tilelang_jit import attend

    shape = mla.tile_for(arch, heads=(16, 128)[tile], page=page)
    source = lowered(arch, lambda: attend((16, 128)[tile], page, *shape))
    assert instruction(arch, shape.heads) in source
    assert ("tma_load" in source) == (arch.startswith("sm") and page == 64)


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_the_combine_of_mla_compiles(arch: str) -> None:
    from kernels.mla_decode.providers.tilelang_jit import combine

    assert "exp2" in lowered(arch, lambda: combine(128, mla.COMBINE_THREADS))


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
