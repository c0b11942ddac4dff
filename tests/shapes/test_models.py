"""Models, and how they are split over ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shapes.models
from shapes.attention import Parallel
from shapes.models import BF16, FP8, model, models, named_model, read_model

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


GEMM, MOE, MLA, MHA = "block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ATTENTION = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")


def nvfp4(*kept: str) -> dict[str, Any]:
    return {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.99*", *kept],
    }


V4 = {"kv_lora_rank": None, "compress_ratios": [128, 4, 0], "quantization_config": BLOCKS}
COPIES: dict[str, tuple[str, dict[str, Any], str | tuple[str, set[str]]]] = {
    "deepseek-v3": ("deepseek-r1", {}, (FP8, set())),
    "deepseek-v3.1-nvfp4": ("deepseek-r1", nvfp4(*(f"model.layers.60.self_attn.{m}" for m in ATTENTION)),
                            ("NVFP4", {GEMM, MOE})),
    "deepseek-v3.2": ("deepseek-v3.2", {}, (FP8, {MLA})),
    "deepseek-v3.2-nvfp4": ("deepseek-v3.2", nvfp4("model.layers.60.self_attn*"),
                            ("NVFP4", {GEMM, MOE, MLA})),
    "deepseek-v4-flash": ("deepseek-r1", V4, "compresses the cache of keys and values (compress_ratios)"),
    "kimi-k2-instruct": ("kimi-k2", {}, (FP8, set())),
    "kimi-k2.5": ("kimi-k2.5", {}, ("pack-quantized int4", {GEMM, MOE})),
    **dict.fromkeys(("kimi-k2.5-nvfp4", "kimi-k2.6-nvfp4"), ("kimi-k2", {"quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "ignore": ["language_model.model.layers.60.self_attn*"],
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    }}, ("NVFP4", {GEMM, MOE}))),
    **dict.fromkeys(("glm-5-fp8", "glm-5.1-fp8"), ("glm-5", {}, (FP8, {MLA, MHA}))),
    "glm-5.2-fp8": ("glm-5.2", {}, (FP8, {MLA, MHA})),
    "glm-5-nvfp4": ("glm-5", nvfp4("model.layers.77.self_attn*"), ("NVFP4", {GEMM, MOE, MLA, MHA})),
    "mistral-large-3": ("mistral-large-3", {}, (FP8, set())),
    "deepseek-v2": ("deepseek-v2", {}, (BF16, {GEMM, MOE})),
    "deepseek-v2-lite": ("deepseek-v2", {"q_lora_rank": None, "num_experts_per_tok": None},
                         "no 'num_experts_per_tok'"),
    "kimi-k2-thinking": ("kimi-k2", {"quantization_config": None, "n_group": None, "topk_group": None},
                         (BF16, {GEMM, MOE})),
    "glm-4.7-flash": ("glm-4.7-flash", {}, (BF16, {GEMM, MOE, MHA})),
    "longcat-flash": ("deepseek-r1", {"zero_expert_num": 256}, "has experts that compute nothing"),
    **dict.fromkeys(("kimi-linear-48b", "hy4-preview", "glm-5.3-flash"),
                    ("glm-5", {"first_k_dense_replace": None}, "no 'first_k_dense_replace'")),
    "two-layers": ("deepseek-r1", {"num_hidden_layers": 3}, "none of its 3 layers has experts"),
    "no-heads": ("deepseek-r1", {"num_attention_heads": 0}, "its num_attention_heads is 0"),
    "factor": ("deepseek-r1", {"routed_scaling_factor": "x"}, "its routed_scaling_factor is 'x'"),
    "word": ("deepseek-r1", {"quantization_config": "fp8"}, "a value of another kind than expected"),
    "pattern": ("deepseek-r1", {"quantization_config": {"ignore": ["re:("]}},
                "a value of another kind than expected"),
    "minicpm3-4b": ("deepseek-r1", {"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
    "mistral-small-4": ("deepseek-v2", {"kv_lora_rank": 256, "qk_nope_head_dim": 64},
                        (BF16, {GEMM, MOE, MLA, MHA})),
    "ax-k1": ("deepseek-r1", {"n_routed_experts": 192, "quantization_config": None}, (BF16, {GEMM, MOE})),
    # It has names of its own.
    "openpangu-ultra-moe-718b": ("deepseek-r1", {
        "first_k_dense_replace": None, "num_dense_layers": 3, "q_lora_rank": None,
        "attention_q_lora_dim": 1536, "kv_lora_rank": None, "attention_kv_lora_dim": 512,
        "n_routed_experts": None, "num_routed_experts": 256,
        "quantization_config": BLOCKS,
    }, (FP8, set())),
}  # fmt: skip
"""Public configuration -> the data here that it is like, the keys in which it differs (None: it lacks
them), and its format of weights with the ops that do not hold, or why it is refused."""


@pytest.mark.parametrize("name", COPIES)
def test_configurations_are_read_or_refused(tmp_path, name):
    like, changes, expected = COPIES[name]
    data = json.loads((DATA / f"{like}.json").read_text(encoding="utf-8"))["config"]
    if "quant_algo" in changes:  # as modelopt has it
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": changes}))
        changes = {"quantization_config": None}
    config = {key: value for key, value in {**data, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": config}))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            named_model(str(tmp_path))
        return
    read = named_model(str(tmp_path))
    assert (read.weights, set(read.inapplicable)) == expected
    assert "nvfp4" not in name or read.weight_format("q_b") == BF16  # by a pattern that names the last layer
    assert (read.n_group, read.topk_group) == (config.get("n_group", 1), config.get("topk_group", 1))


@pytest.mark.parametrize("quantization, weights", [
    ({"quant_method": "fp8"}, "fp8"),  # one scale for each tensor
    ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8"),
    ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
      "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "mxfp4-pack-quantized float4"),
    (BLOCKS | {"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    ({"bits": 4}, "quantised in an unknown way"),
    (BLOCKS, FP8),
])  # fmt: skip
def test_only_blocks_of_128_are_read_as_such(tmp_path, quantization, weights):
    config = json.loads((DATA / "deepseek-r1.json").read_text(encoding="utf-8"))["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert read_model(tmp_path).weights == weights


def test_what_is_not_modelled_is_named():
    assert model("deepseek-r1").not_modelled == []
    said = {name: " | ".join(model(name).not_modelled) for name in models()}
    assert "indexer's scores and top-k in 21 layers" in said["glm-5.2"]
    assert "mha_prefill holds for prompts of up to 2048 tokens" in said["deepseek-v3.2"]
    assert said["kimi-k2"] == "fused_moe scales picks by 2.5, not 2.827; no time depends on it"
    assert "192^-0.5, not 256^-0.5" in said["glm-4.7-flash"]
    assert (
        "qkv_a: bf16, not" in said["mistral-large-3"] and "queries that are scaled" in said["mistral-large-3"]
    )
