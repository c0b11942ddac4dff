"""Models as data, and attention on a rank."""

from dataclasses import replace

import pytest

from shapes.attention import Parallel
from shapes.models import model, models


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
        (Parallel(), "tp1", 128, 7, 7), (Parallel(tp=8), "tp8", 16, 128, 128),
        (Parallel(tp=4), "tp4", 32, 1, 1), (Parallel(dp=8, ep=8), "dp8 ep8", 128, 128, 16),
        (Parallel(dp=8), "dp8", 128, 1, 1), (Parallel(dp=8), "dp8", 128, 9, 2),
        (Parallel(dp=24), "dp24", 128, 10_800, 450),
    ],
)  # fmt: skip
def test_what_a_rank_has(parallel, text, heads, requests, batch):
    assert (parallel.text, parallel.heads(model("deepseek-r1"))) == (text, heads)
    assert parallel.share(requests) == batch
