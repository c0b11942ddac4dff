"""Model configurations: the public config.json of each, with its own key names."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shapes.names import unknown

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class ModelConfig:
    """The keys of Hugging Face's config.json that shapes depend on. Widths are numbers of elements."""

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
    routed_scaling_factor: float
    vocab_size: int
    max_position_embeddings: int

    @staticmethod
    def read(name: str, source: str, config: Mapping[str, Any]) -> ModelConfig:
        """Raises KeyError for a key that the config.json lacks."""
        keys = [field.name for field in fields(ModelConfig) if field.name not in ("name", "source")]
        return ModelConfig(name, source, **{key: config[key] for key in keys})


def models() -> list[str]:
    """The names of the models whose data is here."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


@functools.cache
def model(name: str) -> ModelConfig:
    """Raises ValueError, which lists the models, for an unknown name."""
    if name not in models():
        raise ValueError(unknown("model", name, models()))
    own = _data(name)
    config = _data(own["same_as"])["config"] if "same_as" in own else own["config"]
    return ModelConfig.read(name, own["source"], config)


def _data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return data


def read_model(path: Path) -> ModelConfig:
    """Reads a config.json, or the one in a folder; the name of the folder names the model. Raises ValueError
    with one line if it cannot be read or is not of the kind of DeepSeek-V3."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        return ModelConfig.read(file.parent.name, file.name, config)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    except KeyError as error:
        reason = f"it has no {error.args[0]!r}, so it is no DeepSeek-V3"
        raise ValueError(f"cannot read {file}: {reason}") from None
