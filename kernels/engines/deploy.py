"""How an engine splits a model over ranks, and which variables and flags it reads.

Sources: models/deepseek_v2.py, layers/moe/ and arg_groups/ of SGLang 0.5.23;
model_executor/models/deepseek_v2.py, config/parallel.py and _aiter_ops.py of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from kernels.engines import default, engines, entries, facts
from shapes.attention import Parallel
from shapes.deployment import Deployment
from shapes.experts import PADDED, expert_columns, fused_moe_sizes
from shapes.models import ModelConfig

Settings = Mapping[str, str]
"""Variables, and flags without leading dashes, by name. The value of a flag that takes none is empty."""

FUSED = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"
"""The variable with which vLLM computes the shared expert as one of the routed experts."""

SPLITS: Mapping[str, Sequence[str]] = {engine: facts(engine)["splits"] for engine in engines()}
"""Settings that change how an engine splits the model, besides --tp, --dp-attention and --ep."""

TABLES: Mapping[str, Sequence[str]] = {engine: facts(engine)["tables"] for engine in engines()}
"""Settings that change whether and where an engine and its libraries look for tuned tables."""


def settings(texts: Iterable[str]) -> dict[str, str]:
    """Reads texts like `NAME=VALUE`, `--flag=value` or `--flag`. Raises ValueError."""
    values = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        name = name.strip().lstrip("-")
        if not name or (not equals and not text.startswith("--")):
            raise ValueError(f"cannot read {text!r}; write NAME=VALUE, --flag=VALUE or --flag")
        value = value.strip()
        is_flag = name.islower()
        if is_flag:
            # `_` stands for `-`, but not behind a dot: vLLM's parser takes dashes before the dot alone.
            outer, dot, inner = name.partition(".")
            name = outer.replace("_", "-") + dot + inner
        else:
            # To the engines `true` and `1` mean the same in a variable, and so do `false` and `0`.
            value = {"true": "1", "false": "0"}.get(value.lower(), value)
        values[name] = value
    return values


def known_settings(engine: str, ops: Sequence[str], arch: str) -> list[str]:
    """Names of the settings that, by the files here, change what an engine runs for these ops."""
    names = [name for op in ops for entry in entries(engine, op, arch) for name in entry.settings]
    return list(dict.fromkeys([*names, *SPLITS[engine], *TABLES[engine]]))


def deployed(
    engine: str, arch: str, model: ModelConfig, tp: int, ep: int, dp_attention: bool, kv: str, given: Settings
) -> Deployment:
    """How an engine splits a model over `tp` ranks, and the experts over `ep` of them (1 or tp). Raises
    ValueError where it cannot. kv: the dtype of the cache, bf16 or fp8

    With `dp_attention` each rank has its own requests. Each rank of vLLM then holds all linear layers whole;
    SGLang still splits the dense MLPs over all ranks, and gives them the tokens of all.
    """
    if ep not in (1, tp):
        raise ValueError(f"--ep {ep}: experts are spread over all ranks here, so give --ep {tp} or none")
    attention_tp, dp = (1, tp) if dp_attention else (tp, 1)
    split = Deployment(model, Parallel(attention_tp, dp, ep), dense_tp=tp, shared_tp=tp, kv=kv)
    vllm_by_aiter = given.get("VLLM_ROCM_USE_AITER") == "1" and given.get("VLLM_ROCM_USE_AITER_MOE") != "0"
    by_aiter = arch.startswith("gfx") and (engine == "sglang" or vllm_by_aiter)
    width = 0 if "fused_moe" in model.inapplicable else expert_columns(model, split.parallel)
    if width % PADDED and not by_aiter:  # AITER pads such experts
        reaction = "makes its blocks of scales smaller, unlike any op here"
        if engine == "sglang":
            reaction = "refuses that"
        raise ValueError(f"an expert of {model.name} has {width} columns on a rank: {engine} {reaction}")
    if engine == "vllm":
        shared = 1 if by_aiter and given.get(FUSED) == "1" else 0
        return replace(split, dense_tp=attention_tp, shared_tp=attention_tp, shared=shared)
    dispatched = given.get("moe-a2a-backend", "none") != "none"
    if dispatched:
        split = replace(split, parallel=replace(split.parallel, ep=tp), shared_tp=1, dispatched=True)
    if given.get("moe-dense-tp-size") == "1":
        split = replace(split, dense_tp=1)
    may_fuse = not dispatched and "disable-shared-experts-fusion" not in given
    return replace(split, shared=1 if may_fuse and _fuses(arch, split, given) else 0)


def _fuses(arch: str, split: Deployment, given: Settings) -> bool:
    """Whether SGLang fuses the shared expert: it does where its row for the experts takes a case with one."""
    import kernels

    op = kernels.OPS["fused_moe"]
    tokens, shared = 64, 1
    sizes = fused_moe_sizes(split.model, split.parallel, tokens, shared)
    choice = default("sglang", op.name, arch, asdict(op.sizes({**op.defaults(arch), **sizes})), given)
    return choice is not None and choice.row != ""


def topk_columns(engine: str, deployment: Deployment) -> tuple[int, bool]:
    """Of an engine's calls of AITER's fused_moe: how many columns `topk_ids` has, and whether there is an
    expert mask. vLLM (expert_map_manager.py, experts/rocm_aiter_moe.py) adds a column for the fused expert of
    other ranks, SGLang (token_dispatcher/standard.py) does not."""
    count = deployment.model.num_experts_per_tok + deployment.shared
    masked = deployment.parallel.ep > 1
    if engine == "vllm" and masked and deployment.shared > 0:
        count += 1
    return count, masked
