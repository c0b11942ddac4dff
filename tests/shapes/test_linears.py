"""The linears of a rank, compared with published sizes, and their calls in a step."""

from dataclasses import replace
from pathlib import Path

import pytest

from shapes.attention import Parallel
from shapes.linears import block_scale_gemm_sizes, linears
from shapes.models import model

R1 = model("deepseek-r1")
WHOLE, TP8, TP4 = Parallel(dp=8, ep=8), Parallel(tp=8), Parallel(tp=4)


def test_linears_of_a_rank(snapshot):
    """The sizes are those of DeepSeek-V3 inference/configs/config_671B.json, and those that DeepGEMM and
    SGLang tune."""
    lines = [f"{p.text}: {each}\n" for p in (WHOLE, TP8, TP4) for each in linears(R1, p)]
    snapshot(Path(__file__).parent / "linears.txt", "".join(lines))


def test_all_ranks_together_hold_the_parameters_of_the_model():
    """671 B parameters with the experts and the embedding (DeepSeek-V3 technical report, section 4.2)."""
    held = sum(linear.n * linear.k * linear.prefill_calls for linear in linears(R1, Parallel()))
    assert held + 58 * 256 * 3 * 7168 * 2048 + 129280 * 7168 == pytest.approx(671e9, rel=0.001)


def test_shared_experts_are_one_linear():
    widths = {linear.name: linear.n for linear in linears(replace(R1, n_shared_experts=2), TP8)}
    assert widths["shared gate_up"] == 2 * 512


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
    with pytest.raises(ValueError, match=r"^dp=0 must be at least 1$"):
        Parallel(dp=0)
