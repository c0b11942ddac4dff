"""The linears of a rank, compared with published sizes, and their calls in a step."""

from dataclasses import replace
from pathlib import Path

import pytest

from shapes.attention import Parallel
from shapes.linears import fp8_calls, linears
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


@pytest.mark.parametrize("name, parallel, expected", [
    ("deepseek-v3.2", TP8, {
        "qkv_a": (2112, 7168), "q_b": (3072, 1536), "kv_b": (4096, 512), "o_proj": (7168, 2048),
        "indexer wq_b": (8192, 1536), "indexer wk": (192, 7168), "lm_head": (16160, 7168),
    }),
    ("deepseek-v3.2", WHOLE, {"q_b": (24576, 1536), "o_proj": (7168, 16384), "indexer wq_b": (8192, 1536)}),
    ("kimi-k2", TP8, {
        "qkv_a": (2112, 7168), "q_b": (1536, 1536), "kv_b": (2048, 512), "o_proj": (7168, 1024),
        "dense gate_up": (4608, 7168), "dense down": (7168, 2304), "shared gate_up": (512, 7168),
        "shared down": (7168, 256), "router": (384, 7168), "lm_head": (20480, 7168),
    }),
    ("kimi-k2", Parallel(tp=16), {"q_b": (768, 1536), "o_proj": (7168, 512), "shared down": (7168, 128)}),
    ("glm-5", TP8, {
        "qkv_a": (2624, 6144), "q_b": (2048, 2048), "kv_b": (3584, 512), "o_proj": (6144, 2048),
        "dense gate_up": (3072, 6144), "dense down": (6144, 1536), "shared gate_up": (512, 6144),
        "indexer wq_b": (4096, 2048), "indexer wk": (160, 6144), "lm_head": (19360, 6144),
    }),
])  # fmt: skip
def test_linears_of_other_models(name, parallel, expected):
    """Sizes that AITER tunes (a8w8_blockscale_untuned_gemm_ds_v3.csv, glm5_*.csv), or the two products of the
    widths of config.json."""
    held = {linear.name: (linear.n, linear.k) for linear in linears(model(name), parallel)}
    assert held.items() >= expected.items()
    assert ("indexer wk" in held) == (name != "kimi-k2")


def test_calls_and_formats_of_linears_follow_the_model():
    glm = {linear.name: linear for linear in linears(model("glm-5.2"), TP8)}
    assert (glm["indexer wq_b"].decode_calls, glm["qkv_a"].decode_calls) == (21, 78)
    mistral = {linear.name: linear.kind for linear in linears(model("mistral-large-3"), TP8)}
    assert (mistral["qkv_a"], mistral["q_b"]) == ("bf16", "fp8 block-scale")
    at_once = {linear.name: (linear.n, linear.k) for linear in linears(replace(R1, q_lora_rank=0), TP8)}
    assert (at_once["q"], at_once["kv_a"]) == ((16 * 192, 7168), (576, 7168)) and "q_b" not in at_once


def test_shared_experts_are_one_linear():
    widths = {linear.name: linear.n for linear in linears(replace(R1, n_shared_experts=2), TP8)}
    assert widths["shared gate_up"] == 2 * 512
    without = [linear.name for linear in linears(replace(R1, n_shared_experts=0), TP8)]
    assert "qkv_a" in without and not any("shared" in name for name in without)


def test_only_fp8_linears_are_called_as_gemms():
    """Decoding does not call kv_b, which gets the prompt tokens alone."""
    sizes = {linear.name: sizes for linear, sizes, _ in fp8_calls(R1, TP8, 64, prompt=60)}
    assert sizes["qkv_a"] == {"m": 64, "n": 2112, "k": 7168}
    assert sizes["kv_b"] == {"m": 60, "n": 4096, "k": 512} and "router" not in sizes
    assert "kv_b" not in [linear.name for linear, _, _ in fp8_calls(R1, TP8, 64)]


def test_a_split_that_does_not_divide_is_one_clear_line():
    odd = replace(R1, intermediate_size=18434)
    with pytest.raises(ValueError, match=r"^tp=4 must divide the 18434 dense MLP columns of deepseek-r1$"):
        linears(odd, TP4)
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 128 heads of deepseek-r1$"):
        linears(R1, Parallel(tp=3))
    with pytest.raises(ValueError, match=r"^dp=0 must be at least 1$"):
        Parallel(dp=0)
