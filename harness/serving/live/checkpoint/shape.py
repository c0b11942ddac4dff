"""What a small DeepSeek-V3 with R1's widths looks like: the model that runs here serve by default.

Its widths are those of one rank of DeepSeek-R1 under TP8 (hidden 7168, 16 heads, dense 2304, experts 256
wide); its depth, experts and vocabulary are cut so that a machine of 2 cores decodes in well under a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

BLOCK = 128


@dataclass(frozen=True)
class ModelShape:
    """Sizes as in Hugging Face's DeepseekV3Config. `routing_skew`: standard deviation of the bias that makes
    some experts more popular than others, in units of a router's score; 0: all alike."""

    hidden: int = 7168
    q_lora: int = 1536
    kv_lora: int = 512
    heads: int = 16
    nope: int = 128
    rope: int = 64
    value: int = 128
    layers: int = 4
    dense_layers: int = 1
    dense_width: int = 2304
    experts: int = 32
    picks: int = 8
    groups: int = 8
    groups_picked: int = 4
    expert_width: int = 256
    shared_experts: int = 1
    vocabulary: int = 2048
    longest: int = 8192
    routing_skew: float = 0.05
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": self.shared_experts,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.picks,
            "n_group": self.groups,
            "topk_group": self.groups_picked,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "hidden_act": "silu",
            "max_position_embeddings": self.longest,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "num_nextn_predict_layers": 0,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
        }

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def linears(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) of a layer's FP8 products, as checkpoints name them."""
        attention = f"model.layers.{layer}.self_attn"
        yield f"{attention}.q_a_proj", self.q_lora, self.hidden
        yield f"{attention}.q_b_proj", self.heads * (self.nope + self.rope), self.q_lora
        yield f"{attention}.kv_a_proj_with_mqa", self.kv_lora + self.rope, self.hidden
        yield f"{attention}.kv_b_proj", self.heads * (self.nope + self.value), self.kv_lora
        yield f"{attention}.o_proj", self.hidden, self.heads * self.value
        mlp = f"model.layers.{layer}.mlp"
        if layer < self.dense_layers:
            yield from self._gated(mlp, self.dense_width)
            return
        yield from self._gated(f"{mlp}.shared_experts", self.expert_width * self.shared_experts)
        for expert in range(self.experts):
            yield from self._gated(f"{mlp}.experts.{expert}", self.expert_width)

    def _gated(self, name: str, width: int) -> Iterator[tuple[str, int, int]]:
        yield f"{name}.gate_proj", width, self.hidden
        yield f"{name}.up_proj", width, self.hidden
        yield f"{name}.down_proj", self.hidden, width

    def bytes(self) -> int:
        """Of all its files, about."""
        linears = sum(n * k for layer in range(self.layers) for _, n, k in self.linears(layer))
        return linears + 2 * 2 * self.vocabulary * self.hidden + (1 << 20)
