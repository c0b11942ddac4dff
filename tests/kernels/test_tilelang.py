"""Rows in TileLang's language: right where TileLang compiles them for this CPU, and compiled for the devices
that they are meant for. What this cannot show: that they run there, and their layouts in shared memory."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest

from kernels.block_scale_gemm.providers import tilelang as gemm
from kernels.formats import native
from kernels.mla_decode.providers import tilelang as mla
from tests.kernels.test_contracts import HARMLESS, survivors
from tests.support.contract_rows import TILELANG
from tests.support.contracts import Contract
from tests.support.tilelang_on_cpu import on_cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tilelang") is None,
        reason="tilelang is not installed: pip install '.[tilelang]'",
    ),
]

CASES = [(contract, text) for contract in TILELANG for text in contract.texts]
PATHS = [(contract, text) for contract in TILELANG if contract.arch == "sm_90" for text in contract.texts[:2]]
"""Each way through the programs once: rows that fill no tile; pages that are steps, and others."""


def name(case: tuple[Contract, str]) -> str:
    return f"{case[0]}: {case[1]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_row_keeps_its_contract(case: tuple[Contract, str]) -> None:
    with on_cpu():
        case[0].keep(case[1])


@pytest.mark.parametrize("case", PATHS, ids=name)
def test_a_broken_argument_is_noticed(case: tuple[Contract, str]) -> None:
    with on_cpu():
        unnoticed = survivors(*case)
    assert [text for text in unnoticed if not re.search("|".join(HARMLESS), text)] == []


DEVICES = {
    "sm_90": ({"kind": "cuda", "arch": "sm_90a"}, 227 << 10),
    "sm_100": ({"kind": "cuda", "arch": "sm_100a"}, 227 << 10),
    "gfx942": ({"kind": "hip", "mcpu": "gfx942"}, 64 << 10),
    "gfx950": ({"kind": "hip", "mcpu": "gfx950"}, 160 << 10),
}
"""TileLang's name of a target, and bytes of shared memory that a program may have there (CUDA's programming
guide, compute capabilities; AMD's CDNA 3 and CDNA 4 instruction set guides)."""


def lowered(arch: str, program: Callable[[], Any]) -> str:
    """Its source for that device; fails where its shared memory is more than that has."""
    import tilelang
    from tilelang import tvm

    name, room = DEVICES[arch]
    target = tvm.target.Target(name)
    with target:
        artifact = tilelang.lower(program(), target=target)
    sizes = re.findall(r"dyn_shared_memory_buf\D+(\d+)", str(artifact.host_mod))
    print("SHARED", arch, sizes)
    assert all(int(size) <= room for size in sizes)
    return artifact.kernel_source


def instruction(arch: str, rows: int) -> str:
    """What T.gemm must become: wgmma takes 64 rows."""
    if arch.startswith("gfx"):
        return "__builtin_amdgcn_mfma"
    return "tl::wgmma" if arch == "sm_90" and rows >= 64 else "tl::mma_sync"


@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("arch", DEVICES)
def test_the_gemm_compiles(arch: str, tile: int) -> None:
    from kernels.block_scale_gemm.providers.tilelang_jit import scaled_product

    shape = gemm.TILES["rocm" if arch.startswith("gfx") else "cuda"][tile]
    source = lowered(arch, lambda: scaled_product(7168, 2048, f"float8_{native(arch)}", *shape))
    assert instruction(arch, shape.rows) in source


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("arch", DEVICES)
def test_mla_compiles(arch: str, tile: int, page: int) -> None:
    from kernels.mla_decode.providers.tilelang_jit import attend

    shape = mla.tile_for(arch, heads=(16, 128)[tile], page=page)
    source = lowered(arch, lambda: attend((16, 128)[tile], page, *shape))
    assert instruction(arch, shape.heads) in source
    assert ("tma_load" in source) == (arch.startswith("sm") and page == 64)


@pytest.mark.parametrize("arch", DEVICES)
def test_the_combine_of_mla_compiles(arch: str) -> None:
    from kernels.mla_decode.providers.tilelang_jit import combine

    assert "exp2" in lowered(arch, lambda: combine(128, mla.COMBINE_THREADS))
