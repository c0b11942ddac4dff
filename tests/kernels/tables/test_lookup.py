"""Which table a row of the suite asks, and with what."""

from pathlib import Path

import kernels
from kernels.tables.lookup import WITHOUT_TABLES, Lookups, what_decides
from kernels.tuning import Target

MI300X = Target("rocm", "gfx942", 304, "AMD Instinct MI300X")
MI355X = Target("rocm", "gfx950", 256, "AMD Instinct MI355X")


def test_what_decides_elsewhere_is_said_of_rows_that_are_there():
    names = [row.name for op in kernels.OPS for row in kernels.implementations(op)]
    assert [start for start in WITHOUT_TABLES if not any(name.startswith(start) for name in names)] == []


def test_of_beginnings_of_a_name_the_longest_holds():
    assert what_decides("block_scale_gemm", "flashinfer.sm90") == WITHOUT_TABLES["flashinfer.sm90"]
    assert what_decides("fused_moe", "flashinfer.trtllm") == WITHOUT_TABLES["flashinfer"]
    assert what_decides("mla_decode", "flashinfer.trtllm") == ""


def test_experts_of_a_rank_include_a_fused_shared_one():
    """Row 388 of a8w8_blockscale_tuned_fmoe_ds_v3.csv: get_2stage_cfgs finds it for 33 experts, topk 9."""
    sizes = {"tokens": 64, "hidden": 7168, "inter": 2048, "experts": 256, "ep": 8, "shared": 1}
    tables = Lookups(MI300X, {"aiter": Path("recorded")}, {}, columns=10, masked=True)
    assert tables.find("fused_moe", "aiter.dispatch", sizes).entry.line == 388
    assert tables.find("fused_moe", "aiter.dispatch", sizes | {"shared": 0}).entry is None
    assert tables.find("fused_moe", "aiter.triton", sizes) is None  # it has no table of shapes


def test_preshuffled_weights_have_a_table_of_their_own():
    """Row 308 of a8w8_blockscale_bpreshuffle_tuned_gemm_dsv3.csv, by get_CKGEMM_config."""
    tables = Lookups(MI355X, {"aiter": Path("recorded")}, {})
    hit, row = {"m": 64, "n": 4096, "k": 512}, "aiter.dispatch_preshuffled"
    found = tables.find("block_scale_gemm", row, hit).entry
    assert (found.file.rpartition("/")[2], found.line) == (
        "a8w8_blockscale_bpreshuffle_tuned_gemm_dsv3.csv",
        308,
    )
    assert tables.find("block_scale_gemm", row, {"m": 1, "n": 2, "k": 3}).entry is None
    assert tables.untuned() == {"a8w8_blockscale_bpreshuffle_untuned_gemm.csv": "M,N,K\n1,2,3\n"}


def test_rows_whose_kernel_is_named_look_into_no_table():
    tables = Lookups(MI300X, {}, {})
    rows = ("aiter.ck", "aiter.asm", "aiter.dispatch@sglang", "aiter.triton_preshuffled", "vllm.cutlass")
    assert [tables.library_of(row) for row in rows] == ["", "", "aiter", "aiter", ""]
