"""Model configurations: the public config.json of each, with its own key names."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, which extends a context of `original_max_position_embeddings` tokens by `factor`."""

    type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class ModelConfig:
    """The keys of Hugging Face's config.json. Widths are numbers of elements."""

    name: str
    source: str
    """The address of the config.json."""
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    """The number of first layers whose MLP is dense; the other layers are MoE."""
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
    """The rows and columns of a weight that share one FP8 scale."""
    torch_dtype: str


def models() -> list[str]:
    """The names of the models whose data is here."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


@functools.cache
def model(name: str) -> ModelConfig:
    """Raises ValueError, which lists the models, for an unknown name."""
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
    """Reads a config.json, or the one in a folder; the name of the folder names the model. Raises ValueError
    with one line if it cannot be read or is not of the kind of DeepSeek-V3."""
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


def _read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return config
