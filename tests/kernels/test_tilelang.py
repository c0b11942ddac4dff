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
from tests.support.broken_calls import is_known, survivors
from tests.support.contract_rows import TILELANG
from tests.support.contracts import Contract
from tests.support.tilelang_on_cpu import on_cpu

needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None,
    reason="tilelang is not installed: pip install '.[tilelang]'",
)

CASES = [(contract, text) for contract in TILELANG for text in contract.texts]
PATHS = [(contract, text) for contract in TILELANG if contract.arch == "sm_90" for text in contract.texts[:2]]
"""Each way through the programs once: rows that fill no tile; pages that are steps, and others."""


def name(case: tuple[Contract, str]) -> str:
    return f"{case[0]}: {case[1]}"


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_row_keeps_its_contract(case: tuple[Contract, str]) -> None:
    with on_cpu():
        case[0].keep(case[1])


@needs_tilelang
@pytest.mark.slow
@pytest.mark.parametrize("case", PATHS, ids=name)
def test_a_broken_argument_is_noticed(case: tuple[Contract, str]) -> None:
    with on_cpu():
        unnoticed = survivors(*case)
    assert [text for text in unnoticed if not is_known(f"{case[0]}: {case[1]} {text}")] == []


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
