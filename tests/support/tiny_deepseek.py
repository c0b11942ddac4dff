"""A tiny DeepSeek-V3 in bf16, which any CPU serves, with random weights and a tokenizer of made-up words: for
tests with a real engine. Nothing is downloaded.

python tiny_deepseek.py FOLDER writes one of which attention is a larger part.
"""

import json
import sys
from pathlib import Path

import torch

HIDDEN, Q_LORA, KV_LORA, NOPE, ROPE, VALUE = 1024, 512, 512, 128, 64, 128
DENSE_WIDTH, EXPERTS, EXPERT_WIDTH, WORDS = 512, 8, 256, 512
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": WORDS,
    "hidden_size": HIDDEN, "intermediate_size": DENSE_WIDTH, "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": Q_LORA,
    "kv_lora_rank": KV_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True,
    "num_nextn_predict_layers": 0, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def write_checkpoint(folder: Path, layers: int = 2, heads: int = 4, longest: int = 1024) -> Path:
    """About 30 MB with 2 layers, the same on any machine. Needs `safetensors` and `tokenizers`, which come
    with vLLM. longest: of a sequence, tokens"""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(layers, heads), folder / "model.safetensors", metadata={"format": "pt"})
    config = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    config["max_position_embeddings"] = longest
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    words = ["<begin>", "<end>", "<unknown>", *(f"w{i}" for i in range(3, WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:3])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": words[0], "eos_token": words[1],
        "unk_token": words[2], "model_max_length": 1 << 20, "clean_up_tokenization_spaces": False,
    }))  # fmt: skip
    return folder


def _tensors(layers: int, heads: int) -> dict[str, torch.Tensor]:
    """Each product keeps the variance of what it is given, so that routers tell tokens apart."""
    draw = torch.Generator().manual_seed(0)
    ones, tensors = torch.ones, {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        weight = torch.randn(outputs, inputs, generator=draw) / inputs**0.5
        tensors[f"{name}.weight"] = weight.bfloat16()

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, HIDDEN)
        linear(f"{name}.up_proj", width, HIDDEN)
        linear(f"{name}.down_proj", HIDDEN, width)

    for layer in range(layers):
        own = f"model.layers.{layer}"
        linear(f"{own}.self_attn.q_a_proj", Q_LORA, HIDDEN)
        linear(f"{own}.self_attn.q_b_proj", heads * (NOPE + ROPE), Q_LORA)
        linear(f"{own}.self_attn.kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
        linear(f"{own}.self_attn.kv_b_proj", heads * (NOPE + VALUE), KV_LORA)
        linear(f"{own}.self_attn.o_proj", HIDDEN, heads * VALUE)
        widths = {"input": HIDDEN, "post_attention": HIDDEN}
        widths |= {"self_attn.q_a": Q_LORA, "self_attn.kv_a": KV_LORA}
        for norm, width in widths.items():
            tensors[f"{own}.{norm}_layernorm.weight"] = ones(width, dtype=torch.bfloat16)
        if layer == 0:
            mlp(f"{own}.mlp", DENSE_WIDTH)
            continue
        mlp(f"{own}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(EXPERTS):
            mlp(f"{own}.mlp.experts.{expert}", EXPERT_WIDTH)
        linear(f"{own}.mlp.gate", EXPERTS, HIDDEN)
        tensors[f"{own}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=draw) * 0.05
    tensors["model.embed_tokens.weight"] = torch.randn(WORDS, HIDDEN, generator=draw).bfloat16()
    tensors["model.norm.weight"] = ones(HIDDEN, dtype=torch.bfloat16)
    linear("lm_head", WORDS, HIDDEN)
    return tensors


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), layers=4, heads=16, longest=4096)
