"""Models, and how they are split over ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shapes.models
from shapes.attention import Parallel
from shapes.models import model, models, read_model

DATA = Path(shapes.models.__file__).parent / "data"


def test_models_are_listed_and_v3_has_the_shapes_of_r1():
    assert len({model(name) for name in models()}) == len(models()) > 10
    v3, r1 = model("deepseek-v3"), model("deepseek-r1")
    assert v3.name == "deepseek-v3"
    assert replace(v3, name=r1.name, source=r1.source) == r1
    with pytest.raises(ValueError, match=r"^unknown model 'r1'; did you mean deepseek-r1\?"):
        model("r1")


@pytest.mark.parametrize(
    ("parallel", "text", "heads"),
    [
        (Parallel(), "tp1", 128), (Parallel(tp=8), "tp8", 16), (Parallel(tp=4), "tp4", 32),
        (Parallel(dp=8, ep=8), "dp8 ep8", 128), (Parallel(dp=24), "dp24", 128),
    ],
)  # fmt: skip
def test_what_a_rank_has(parallel, text, heads):
    assert (parallel.text, parallel.heads(model("deepseek-r1"))) == (text, heads)


def test_a_model_is_read_from_its_folder(tmp_path):
    path, r1 = tmp_path / "config.json", model("deepseek-r1")
    config = json.loads((DATA / "deepseek-r1.json").read_text(encoding="utf-8"))["config"]
    path.write_text(json.dumps(config | {"hidden_size": 256, "rope_scaling": None}))
    read = read_model(tmp_path)
    assert read == read_model(path)
    assert read == replace(r1, hidden_size=256, name=tmp_path.name, source="config.json")
    del config["kv_lora_rank"]
    broken = (json.dumps(config), "'kv_lora_rank'"), ("[1", "cannot read"), ("[1]", "no JSON object")
    for text, says in broken:
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_model(tmp_path)
