"""The linears of a rank against the published table, and their calls in a step."""

from dataclasses import replace

import pytest

from shapes.attention import Parallel
from shapes.linears import BATCHED, BF16, FP8, block_scale_gemm_sizes, linears
from shapes.models import model

R1 = model("deepseek-r1")
WHOLE, TP8, TP4 = Parallel(dp=8, ep=8), Parallel(tp=8), Parallel(tp=4)


PUBLISHED = {
    # name: n and k of a rank in WHOLE, TP8 and TP4
    "qkv_a": (2112, 7168, 2112, 7168, 2112, 7168),
    "q_b": (24576, 1536, 3072, 1536, 6144, 1536),
    "kv_b": (32768, 512, 4096, 512, 8192, 512),
    "o_proj": (7168, 16384, 7168, 2048, 7168, 4096),
    "dense gate_up": (36864, 7168, 4608, 7168, 9216, 7168),
    "dense down": (7168, 18432, 7168, 2304, 7168, 4608),
    "shared gate_up": (4096, 7168, 512, 7168, 1024, 7168),
    "shared down": (7168, 2048, 7168, 256, 7168, 512),
    "router": (256, 7168) * 3,
    "lm_head": (129280, 7168, 16160, 7168, 32320, 7168),
    "w_uk": (512, 128) * 3,
    "w_uv": (128, 512) * 3,
}


def test_sizes_are_the_published_ones():
    """DeepSeek-V3 inference/configs/config_671B.json, and the shapes that DeepGEMM and SGLang tune for."""
    of = [{each.name: (each.n, each.k) for each in linears(R1, parallel)} for parallel in (WHOLE, TP8, TP4)]
    assert {name: of[0][name] + of[1][name] + of[2][name] for name in of[0]} == PUBLISHED


def test_shared_experts_are_one_linear():
    widths = {linear.name: linear.n for linear in linears(replace(R1, n_shared_experts=2), TP8)}
    assert widths["shared gate_up"] == 2 * 512


def test_calls_of_a_step_kinds_and_heads():
    both = {
        linear.name: (linear.decode_calls, linear.prefill_calls, linear.kind) for linear in linears(R1, TP8)
    }
    assert both == {
        **dict.fromkeys(("qkv_a", "q_b", "o_proj"), (61, 61, FP8)),
        **dict.fromkeys(("dense gate_up", "dense down"), (3, 3, FP8)),
        **dict.fromkeys(("shared gate_up", "shared down"), (58, 58, FP8)),
        "router": (58, 58, BF16),
        "kv_b": (0, 61, FP8),
        **dict.fromkeys(("w_uk", "w_uv"), (61, 0, BATCHED)),
        "lm_head": (1, 1, BF16),
    }
    assert len(linears(R1, TP8)) == len(both)
    for parallel, heads in ((WHOLE, 128), (TP8, 16), (TP4, 32)):
        batches = {linear.name: linear.batch for linear in linears(R1, parallel)}
        assert batches.pop("w_uk") == batches.pop("w_uv") == heads
        assert set(batches.values()) == {1}


def test_a_gemm_of_a_linear():
    by_name = {linear.name: linear for linear in linears(R1, TP8)}
    assert block_scale_gemm_sizes(by_name["qkv_a"], 64) == {"m": 64, "n": 2112, "k": 7168}
    with pytest.raises(ValueError, match=r"^linear 'router' is bf16, not fp8 block-scale$"):
        block_scale_gemm_sizes(by_name["router"], 64)


def test_a_split_that_does_not_divide_is_one_clear_line():
    odd = replace(R1, intermediate_size=18434)
    with pytest.raises(ValueError, match=r"^tp=4 must divide the 18434 dense MLP columns of deepseek-r1$"):
        linears(odd, TP4)
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 128 heads of deepseek-r1$"):
        linears(R1, Parallel(tp=3))
