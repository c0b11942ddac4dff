"""The linears of a rank against the published table, and their calls in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shapes.attention import Parallel
from shapes.linears import BATCHED, BF16, FP8, block_scale_gemm_sizes, linears
from shapes.models import model

R1 = model("deepseek-r1")
WHOLE, TP8, TP4 = Parallel(dp=8, ep=8), Parallel(tp=8), Parallel(tp=4)


def sizes(parallel: Parallel) -> dict[str, tuple[int, int]]:
    return {linear.name: (linear.n, linear.k) for linear in linears(R1, parallel)}


@pytest.mark.parametrize(
    ("name", "whole", "tp8", "tp4"),
    [
        ("qkv_a", (2112, 7168), (2112, 7168), (2112, 7168)),
        ("q_b", (24576, 1536), (3072, 1536), (6144, 1536)),
        ("kv_b", (32768, 512), (4096, 512), (8192, 512)),
        ("o_proj", (7168, 16384), (7168, 2048), (7168, 4096)),
        ("dense gate_up", (36864, 7168), (4608, 7168), (9216, 7168)),
        ("dense down", (7168, 18432), (7168, 2304), (7168, 4608)),
        ("shared gate_up", (4096, 7168), (512, 7168), (1024, 7168)),
        ("shared down", (7168, 2048), (7168, 256), (7168, 512)),
        ("router", (256, 7168), (256, 7168), (256, 7168)),
        ("lm_head", (129280, 7168), (16160, 7168), (32320, 7168)),
        ("w_uk", (512, 128), (512, 128), (512, 128)),
        ("w_uv", (128, 512), (128, 512), (128, 512)),
    ],
)
def test_sizes_are_the_published_ones(name, whole, tp8, tp4):
    """DeepSeek-V3 inference/configs/config_671B.json, and the shapes that DeepGEMM and SGLang tune for."""
    assert (sizes(WHOLE)[name], sizes(TP8)[name], sizes(TP4)[name]) == (whole, tp8, tp4)


def test_a_rank_has_no_other_linears():
    assert len(linears(R1, TP8)) == len(sizes(TP8)) == 12


def test_calls_of_a_step():
    calls = {linear.name: (linear.decode_calls, linear.prefill_calls) for linear in linears(R1, TP8)}
    assert all(calls[name] == (61, 61) for name in ("qkv_a", "q_b", "o_proj"))
    assert all(calls[name] == (3, 3) for name in ("dense gate_up", "dense down"))
    assert all(calls[name] == (58, 58) for name in ("shared gate_up", "shared down", "router"))
    assert calls["kv_b"] == (0, 61)
    assert calls["w_uk"] == calls["w_uv"] == (61, 0)
    assert calls["lm_head"] == (1, 1)


def test_kinds_and_heads():
    kinds = {linear.name: linear.kind for linear in linears(R1, TP8)}
    assert [name for name, kind in kinds.items() if kind == BF16] == ["router", "lm_head"]
    assert [name for name, kind in kinds.items() if kind == BATCHED] == ["w_uk", "w_uv"]
    for parallel, heads in ((WHOLE, 128), (TP8, 16), (TP4, 32)):
        batches = {linear.name: linear.batch for linear in linears(R1, parallel)}
        assert batches.pop("w_uk") == batches.pop("w_uv") == heads
        assert set(batches.values()) == {1}


def test_all_ranks_together_hold_the_parameters_of_the_model():
    """671 B parameters with the experts and the embedding (DeepSeek-V3 technical report, section 4.2)."""
    held = sum(linear.n * linear.k * linear.prefill_calls for linear in linears(R1, Parallel()))
    experts = 58 * 256 * 3 * 7168 * 2048
    assert held + experts + 129280 * 7168 == pytest.approx(671e9, rel=0.001)


def test_a_gemm_of_a_linear():
    by_name = {linear.name: linear for linear in linears(R1, TP8)}
    assert block_scale_gemm_sizes(by_name["qkv_a"], 64) == {"m": 64, "n": 2112, "k": 7168}
    assert by_name["qkv_a"].kind == FP8
    with pytest.raises(ValueError, match=r"^linear 'router' is bf16, not fp8 block-scale$"):
        block_scale_gemm_sizes(by_name["router"], 64)


def test_a_split_that_does_not_divide_is_one_clear_line():
    odd = replace(R1, intermediate_size=18434)
    with pytest.raises(ValueError, match=r"^tp=4 must divide the 18434 dense MLP columns of deepseek-r1$"):
        linears(odd, TP4)
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 128 heads of deepseek-r1$"):
        linears(R1, Parallel(tp=3))
