"""Model configurations as data: the public config.json of each, under its own key names."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: stretches a context of `original_max_position_embeddings` tokens by `factor`."""

    type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class ModelConfig:
    """Widths in elements, counts in units; keys as in Hugging Face's config.json, `source` its address.

    first_k_dense_replace: the first layers, whose MLP is dense; the others are MoE
    weight_block_size:     rows x columns of a weight that share one FP8 scale
    """

    name: str
    source: str
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    weight_block_size: tuple[int, int]
    torch_dtype: str


def models() -> list[str]:
    """Names of the models that have data here."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


@functools.cache
def model(name: str) -> ModelConfig:
    """The model of this name; raises ValueError with one line that lists the models."""
    if name not in models():
        raise ValueError(f"unknown model {name!r}; models: {', '.join(models())}")
    own = _read(name)
    config = _read(own["same_as"])["config"] if "same_as" in own else own["config"]
    return ModelConfig(
        name=name,
        source=own["source"],
        **config
        | {
            "rope_scaling": RopeScaling(**config["rope_scaling"]),
            "weight_block_size": tuple(config["weight_block_size"]),
        },
    )


def read_model(path: Path) -> ModelConfig:
    """The model of a folder that has a config.json, or of such a file; named after its folder. Raises
    ValueError with one line where it is none of DeepSeek-V3's kind."""
    import json

    file = path / "config.json" if path.is_dir() else path
    try:
        own = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(own, dict):
            raise ValueError("it holds no JSON object")
        unscaled = dict.fromkeys(_fields(RopeScaling), 1) | {"type": "none"}
        scaling: dict[str, Any] = own.get("rope_scaling") or unscaled  # JSON
        own["weight_block_size"] = own.get("quantization_config", {}).get("weight_block_size", (128, 128))
        own["rope_scaling"] = RopeScaling(**{name: scaling[name] for name in _fields(RopeScaling)})
        own |= {"name": file.parent.name, "source": file.name}
        own["torch_dtype"] = own.get("torch_dtype") or own.get("dtype") or "bfloat16"
        values = {name: own[name] for name in _fields(ModelConfig)}
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    except KeyError as error:
        raise ValueError(
            f"cannot read {file}: it has no {error.args[0]!r}, so it is no DeepSeek-V3"
        ) from None
    return ModelConfig(**values | {"weight_block_size": tuple(values["weight_block_size"])})


def _fields(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _read(name: str) -> dict[str, Any]:  # JSON, as models' authors write it
    import json

    config: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return config
