"""Models as data, and attention on a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shapes.attention import Parallel, mha_prefill_sizes
from shapes.models import model, models


def test_r1_has_the_published_sizes():
    r1 = model("deepseek-r1")
    assert (r1.hidden_size, r1.num_hidden_layers, r1.num_attention_heads) == (7168, 61, 128)
    assert (r1.n_routed_experts, r1.num_experts_per_tok, r1.n_group, r1.topk_group) == (256, 8, 8, 4)
    assert r1.kv_lora_rank + r1.qk_rope_head_dim == 576
    assert (r1.rope_scaling.factor, r1.rope_scaling.original_max_position_embeddings) == (40, 4096)
    assert r1.weight_block_size == (128, 128)
    assert r1.source.startswith("https://")


def test_models_are_listed_and_v3_is_r1_by_another_name():
    assert models() == ["deepseek-r1", "deepseek-v3"] and len({model(name) for name in models()}) == 2
    v3, r1 = model("deepseek-v3"), model("deepseek-r1")
    assert v3.name == "deepseek-v3"
    assert replace(v3, name=r1.name, source=r1.source) == r1
    with pytest.raises(ValueError, match=r"^unknown model 'r1'; models: deepseek-r1, deepseek-v3$"):
        model("r1")


@pytest.mark.parametrize(
    ("parallel", "text", "heads", "requests", "batch"),
    [
        (Parallel(), "tp1", 128, 7, 7),
        (Parallel(tp=8), "tp8", 16, 128, 128),
        (Parallel(tp=4), "tp4", 32, 1, 1),
        (Parallel(dp=8, ep=8), "dp8 ep8", 128, 128, 16),
        (Parallel(dp=8), "dp8", 128, 1, 1),
        (Parallel(dp=8), "dp8", 128, 9, 2),
        (Parallel(dp=24), "dp24", 128, 10_800, 450),
    ],
)
def test_what_a_rank_has(parallel, text, heads, requests, batch):
    assert (parallel.text, parallel.heads(model("deepseek-r1"))) == (text, heads)
    assert parallel.share(requests) == batch


def test_parallel_that_does_not_fit_is_one_clear_line():
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 128 heads of deepseek-r1$"):
        Parallel(tp=3).heads(model("deepseek-r1"))
    with pytest.raises(ValueError, match=r"^dp=0 must be at least 1$"):
        Parallel(dp=0)


def test_prefill_sizes_of_a_rank():
    sizes = mha_prefill_sizes(model("deepseek-r1"), Parallel(tp=8), 2, "2048", "0..1152")
    assert sizes == {"batch": 2, "new": "2048", "prefix": "0..1152", "heads": 16}
