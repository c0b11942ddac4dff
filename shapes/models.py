"""Model configurations: the public config.json of each, with its own key names."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shapes.names import unknown
from shapes.toml import read_toml

_DATA = Path(__file__).parent / "data"

FP8, BF16 = "fp8 block-scale", "bf16"
"""Formats of weights. Others keep the name that the checkpoint gives them."""

KEYS = read_toml(Path(__file__).with_name("keys.toml"))
MODULES: Mapping[str, Sequence[str]] = KEYS["modules"]
"""A linear of shapes.linears, or the routed experts -> the modules of a checkpoint that it consists of."""

MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")  # keys without a default that may be 0

NO_KEYS = ("name", "source", "indexers", "weights", "unquantised", "left_out")
"""Fields of ModelConfig that are no keys of config.json."""


@dataclass(frozen=True)
class ModelConfig:
    """The keys of a config.json that shapes depend on; those with a default may be missing."""

    name: str
    source: str
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int  # the number of first layers whose MLP is dense; the other layers are MoE
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    vocab_size: int
    q_lora_rank: int = 0  # the width of the latent of the queries; 0: they have none
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    max_position_embeddings: int = 0  # 0: unknown
    num_nextn_predict_layers: int = 0
    """The number of MTP layers, which run only where drafts are made: no case has their calls."""
    index_topk: int = 0
    """The keys that the indexer of sparse attention leaves to a query; 0: attention is dense."""
    index_n_heads: int = 0
    index_head_dim: int = 0
    indexers: int = 0  # the number of layers with an indexer of their own
    weights: str = BF16  # the format of the weights but for those of `unquantised`
    unquantised: frozenset[str] = frozenset()
    """The names of MODULES that the checkpoint keeps in bf16 nevertheless."""
    left_out: tuple[str, ...] = ()
    """What the ops leave out of the model, by keys of its config.json: `left_out` in keys.toml."""

    @staticmethod
    def read(
        name: str, source: str, config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the content of a config.json, and of the hf_quant_config.json beside it. Raises KeyError for
        a key that it lacks, and ValueError for an architecture whose shapes would be wrong."""
        config = _by_common_names(config)
        for key, feature in KEYS["refused"].items():
            if config.get(key):
                raise ValueError(f"its model {feature} ({key}), which is not modelled")
        if config.get("moe_layer_freq", 1) != 1:
            raise ValueError("its moe_layer_freq is not 1, which is not modelled")
        values = _values(config)
        layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
        if layers <= dense:
            raise ValueError(f"none of its {layers} layers has experts (first_k_dense_replace {dense})")
        indexers = 0
        if values["index_topk"]:
            types = config.get("indexer_types") or ["full"] * layers
            indexers = list(types).count("full")
        if not quantization:
            # Mistral's params.json has it under the second name.
            quantization = config.get("quantization_config") or config.get("quantization") or {}
        weights, patterns = _weights(quantization)
        return ModelConfig(
            name, source, **values, indexers=indexers, weights=weights,
            unquantised=frozenset(_unquantised(patterns, layers - 1)),
            left_out=tuple(text for key, text in KEYS["left_out"].items() if config.get(key)),
        )  # fmt: skip

    def weight_format(self, name: str) -> str:
        """The format of the weights of a linear or of the experts. name: a key of MODULES"""
        return BF16 if name in self.unquantised else self.weights

    @property
    def parts(self) -> list[str]:
        """The names of MODULES that the model has."""
        absent = ["q", "kv_a"] if self.q_lora_rank else ["qkv_a", "q_b"]
        if not self.index_topk:
            absent.append("indexer wq_b")
        return [name for name in MODULES if name not in absent]

    @property
    def inapplicable(self) -> dict[str, str]:
        """The ops that do not hold for the model, because it computes something else. Op -> the reason."""
        reasons = {}
        formats = dict.fromkeys(self.weight_format(name) for name in self.parts if name != "experts")
        if FP8 not in formats:
            reasons["block_scale_gemm"] = f"its linears are {' and '.join(formats)}, not {FP8}"
        if (of_experts := self.weight_format("experts")) != FP8:
            reasons["fused_moe"] = f"its experts are {of_experts}, not {FP8}"
        latent, nope = self.kv_lora_rank, self.qk_nope_head_dim
        rope, value = self.qk_rope_head_dim, self.v_head_dim
        if (latent, rope) != (512, 64):
            reasons["mla_decode"] = f"its cache has {latent} + {rope} values a token, not 512 + 64"
        elif self.index_topk:
            reasons["mla_decode"] = f"a query reads only the index_topk={self.index_topk} keys of its indexer"
        if (nope, rope, value) != (128, 64, 128):
            widths = f"{nope} + {rope} with values of {value}"
            reasons["mha_prefill"] = f"its heads are {widths}, not 128 + 64 with values of 128"
        return reasons

    @property
    def not_modelled(self) -> list[str]:
        """What the cases leave out of the model, or compute in another way, a line each."""
        lines = [f"{op} does not hold: {why}" for op, why in self.inapplicable.items()]
        if self.index_topk:
            text = f"the indexer's scores and top-k in {self.indexers} layers"
            if "mha_prefill" not in self.inapplicable:
                text += f"; mha_prefill holds for prompts of up to {self.index_topk} tokens, which are dense"
            lines.append(text)
        in_bf16 = ", ".join(name for name in self.parts if name in self.unquantised)
        if in_bf16 and self.weights == FP8:
            lines.append(f"{in_bf16}: {BF16}, not {FP8}")
        if "mla_decode" not in self.inapplicable and self.qk_nope_head_dim != 128:
            width = self.qk_nope_head_dim + self.qk_rope_head_dim
            lines.append(f"mla_decode scales scores by 192^-0.5, not {width}^-0.5; no time depends on it")
        if "fused_moe" not in self.inapplicable and self.scoring_func != "sigmoid":
            lines.append(f"with_routing scores experts by sigmoid, not {self.scoring_func}")
        if "fused_moe" not in self.inapplicable and self.routed_scaling_factor != 2.5:
            factor = f"{self.routed_scaling_factor:g}"
            lines.append(f"fused_moe scales picks by 2.5, not {factor}; no time depends on it")
        return [*lines, *self.left_out]


def _by_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json on one level, with the keys of other models also under the names of ModelConfig."""
    common = dict(config)
    for part in ("text_config", "moe"):  # of multimodal models, and of Mistral's params.json
        if isinstance(common.get(part), Mapping):
            common.update(common[part])
    for key, name in KEYS["also"].items():
        if key in common:
            common.setdefault(name, common[key])
    return common


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ModelConfig's fields that are keys of a config.json. Raises KeyError where one is
    missing, and ValueError where one is not a number that can be right."""
    values: dict[str, Any] = {}
    for field in fields(ModelConfig):
        if field.name in NO_KEYS:
            continue
        value = config.get(field.name)
        if value is None:
            if field.default is MISSING:
                raise KeyError(field.name)
            value = field.default
        least = 0 if field.default == 0 or field.name in MAY_BE_ZERO else 1
        if field.type == "int" and (type(value) is not int or value < least):
            raise ValueError(f"its {field.name} is {value!r}, not a whole number of at least {least}")
        if field.type == "float" and type(value) not in (int, float):
            raise ValueError(f"its {field.name} is {value!r}, not a number")
        values[field.name] = value
    return values


def _weights(quantization: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
    """The format of the weights, and patterns of the modules that are not quantised. There are three writers:
    DeepSeek, modelopt (`quant_algo`) and compressed-tensors (`config_groups`, with the dtype)."""
    facts = quantization.get("quantization", quantization)  # in hf_quant_config.json one level down
    unquantised: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
        unquantised += facts.get(key) or ()
    if not facts:
        return BF16, unquantised
    method, algorithm = facts.get("quant_method"), facts.get("quant_algo")
    groups = (facts.get("config_groups") or {}).values()
    of_weights: Mapping[str, Any] = next((g["weights"] for g in groups if g.get("weights")), {})
    dtype = ""  # only compressed-tensors names it
    if of_weights:
        dtype = f"{of_weights.get('type', 'float')}{of_weights.get('num_bits', 8)}"
    block = facts.get("weight_block_size") or of_weights.get("block_structure")
    may_have_blocks = (method == "fp8" and not algorithm) or method == "compressed-tensors"
    if may_have_blocks and block == [128, 128] and dtype in ("", "float8"):
        return FP8, unquantised
    name = algorithm or f"{facts.get('format') or method or ''} {dtype}".strip()
    return name or "quantised in an unknown way", unquantised


def _unquantised(patterns: Sequence[str], last_layer: int) -> list[str]:
    """The names of MODULES of which a pattern matches a module: for the dense MLP a module of the first
    layer, for the others one of the last layer, which is MoE."""
    names = []
    for name, modules in MODULES.items():
        layer = 0 if name.startswith("dense") else last_layer
        full_names = [f"model.layers.{layer}.{module}" for module in modules]
        if any(_matches(pattern, full_name) for pattern in patterns for full_name in full_names):
            names.append(name)
    return names


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern of a checkpoint matches the full name of a module. A pattern is `re:` and a regular
    expression, a text with `*`, or the full name or some of its words, as `self_attn.q_b_proj`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern.removeprefix("language_model.")) or f".{pattern}." in f".{module}."


def models() -> list[str]:
    """The names of the models whose data is here."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


@functools.cache
def model(name: str) -> ModelConfig:
    """A model whose data is here. Raises ValueError, which lists the models, for an unknown name."""
    if name not in models():
        line = unknown("model", name, models(), "list models")
        raise ValueError(f"{line}, or give a config.json or its folder")
    data = _object(_DATA / f"{name}.json")
    owner = _object(_DATA / f"{data['same_as']}.json") if "same_as" in data else data
    return ModelConfig.read(name, data["source"], owner["config"], data.get("hf_quant_config"))


def named_model(name: str) -> ModelConfig:
    """A model by its name, or by a path as `read_model` takes it. Raises ValueError."""
    return read_model(Path(name)) if Path(name).exists() else model(name)


def read_model(path: Path) -> ModelConfig:
    """Reads a config.json, or the one in a folder (else its params.json), and the hf_quant_config.json beside
    it; the name of the folder names the model. Raises ValueError with one line if it cannot be read, or if
    shapes of that architecture are not modelled."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / "params.json").exists():
        file = path / "params.json"
    try:
        config = _object(file)
        beside = file.with_name("hf_quant_config.json")
        quantization = _object(beside) if beside.exists() else None
        return ModelConfig.read(file.resolve().parent.name, file.name, config, quantization)
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = str(error)
    except (TypeError, AttributeError, re.error) as error:
        reason = f"a value of another kind than expected: {error}"
    except KeyError as error:
        reason = f"it has no {error.args[0]!r}, so it is no MoE model of DeepSeek's architecture"
    raise ValueError(f"cannot read {file}: {reason}")


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError, and ValueError for a file that holds none."""
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value
