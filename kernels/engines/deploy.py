"""How an engine splits a model over ranks, and which variables and flags it reads.

Sources: models/deepseek_v2.py, layers/moe/ and arg_groups/ of SGLang 0.5.23;
model_executor/models/deepseek_v2.py, config/parallel.py and _aiter_ops.py of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kernels.engines import default, entries
from shapes.attention import Parallel
from shapes.deployment import Deployment
from shapes.experts import PADDED, expert_columns, fused_moe_sizes

if TYPE_CHECKING:
    from shapes.models import ModelConfig

Settings = Mapping[str, str]
"""Variables and flags by name, without leading dashes: `moe-a2a-backend` -> `deepep`. The value of a flag
that takes none is empty."""

FUSED = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"

SPLITS = {
    "vllm": (FUSED,),
    "sglang": ("disable-shared-experts-fusion", "moe-a2a-backend", "moe-dense-tp-size"),
}
"""Settings that change how an engine splits the model, besides --tp, --dp-attention and --ep."""

AITER_TABLES = (
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    "AITER_CONFIG_FMOE", "AITER_BYPASS_TUNE_CONFIG", "AITER_KSPLIT", "CU_NUM",
)  # fmt: skip

TABLES = {
    "vllm": ("VLLM_TUNED_CONFIG_FOLDER", "VLLM_BATCH_INVARIANT", *AITER_TABLES),
    "sglang": ("SGLANG_MOE_CONFIG_DIR", *AITER_TABLES),
}
"""Settings that change whether and where an engine and its libraries look for tuned tables."""


def settings(texts: Iterable[str]) -> dict[str, str]:
    """Reads texts like `NAME=VALUE`, `--flag=value` or `--flag`. Raises ValueError."""
    found = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        name = name.strip().lstrip("-")
        if not name or (not equals and not text.startswith("--")):
            raise ValueError(f"cannot read {text!r}; write NAME=VALUE, --flag=VALUE or --flag")
        value = value.strip()
        if name.islower():
            outer, dot, inner = name.partition(".")  # vLLM's parser takes dashes before the dot alone
            name = outer.replace("_", "-") + dot + inner
        else:  # the engines treat these alike
            value = {"true": "1", "false": "0"}.get(value.lower(), value)
        found[name] = value
    return found


def known_settings(engine: str, ops: Sequence[str], arch: str) -> list[str]:
    """Names of the settings that have an effect on what is recorded about an engine and architecture."""
    read = (name for op in ops for entry in entries(engine, op, arch) for name in entry.settings)
    return list(dict.fromkeys([*read, *SPLITS[engine], *TABLES[engine]]))


def deployed(
    engine: str, arch: str, model: ModelConfig, tp: int, ep: int, dp_attention: bool, kv: str, given: Settings
) -> Deployment:
    """How an engine splits a model over `tp` ranks. Raises ValueError where it cannot.

    dp_attention: whether each rank has its own requests. Each rank of vLLM then holds all linear layers
                  whole; SGLang still splits the dense MLPs over all ranks, and gives them the tokens of all
    """
    if ep not in (1, tp):
        raise ValueError(f"--ep {ep}: experts are spread over all ranks here, so give --ep {tp} or none")
    attention, groups = (1, tp) if dp_attention else (tp, 1)
    split = Deployment(model, Parallel(attention, groups, ep), dense_tp=tp, shared_tp=tp, kv=kv)
    by_aiter = given.get("VLLM_ROCM_USE_AITER") == "1" and given.get("VLLM_ROCM_USE_AITER_MOE") != "0"
    with_aiter = arch.startswith("gfx") and (engine == "sglang" or by_aiter)
    width = 0 if "fused_moe" in model.unheld else expert_columns(model, split.parallel)
    if width % PADDED and not with_aiter:
        does = (
            "refuses that" if engine == "sglang" else "makes its blocks of scales smaller, unlike any op here"
        )
        raise ValueError(f"an expert of {model.name} has {width} columns on a rank: {engine} {does}")
    if engine == "vllm":
        split = replace(split, dense_tp=attention, shared_tp=attention)
        return replace(split, shared=int(with_aiter and given.get(FUSED) == "1"))
    dispatched = given.get("moe-a2a-backend", "none") != "none"
    if dispatched:
        split = replace(split, parallel=replace(split.parallel, ep=tp), shared_tp=1, dispatched=True)
    if given.get("moe-dense-tp-size") == "1":
        split = replace(split, dense_tp=1)
    fused = not dispatched and "disable-shared-experts-fusion" not in given
    return replace(split, shared=int(fused and _fuses(arch, split, given)))


def _fuses(arch: str, split: Deployment, given: Settings) -> bool:
    """Whether the row that SGLang runs for the experts computes the shared expert as one of them."""
    import kernels

    op = kernels.OPS["fused_moe"]
    sizes = fused_moe_sizes(split.model, split.parallel, 64, 1)
    found = default("sglang", op.name, arch, asdict(op.sizes({**op.defaults(arch), **sizes})), given)
    return bool(found and found.row)


def columns(engine: str, deployment: Deployment) -> tuple[int, bool]:
    """How many columns `topk_ids` has when an engine calls AITER's fused_moe, and whether it passes an expert
    mask. vLLM (expert_map_manager.py, experts/rocm_aiter_moe.py) adds a column for the fused expert of other
    ranks, SGLang (token_dispatcher/standard.py) does not."""
    picks = deployment.model.num_experts_per_tok + deployment.shared
    masked = deployment.parallel.ep > 1
    return picks + int(engine == "vllm" and masked and deployment.shared > 0), masked
