"""What an SGLang server says of itself, as later versions of bench_serving store it under `server_info`.

Read in sglang/srt/entrypoints/http_server.py of 0.5.9: the server's arguments, the scheduler's sizes,
`internal_states` (one for each data-parallel rank) and `version`, in one object. A router of disaggregated
servers answers with a list of such objects under `prefill` and one under `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.reading import Fields
from harness.serving.schema import Parallelism

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
FLAGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "fp8_gemm_runner_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "deepep_mode",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "enable_eplb",
    "enable_two_batch_overlap",
    "enable_torch_compile",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "mem_fraction_static",
    "page_size",
    "stream_interval",
    "schedule_policy",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disaggregation_mode",
)


def described(row: Fields) -> dict[str, Any]:
    """What `server_info` says, as fields of a ServingRun; nothing where the row has none.

    The object stays in `extra`, less its keys and passwords. gpus is the size of the server's world, which
    its arguments fix: tensor times pipeline parallel, and times data parallel where that is not over the
    tensor-parallel ranks (dp attention).
    """
    info = row.values.get("server_info")
    if not isinstance(info, Mapping):
        return {}
    row.take("server_info")
    sides = {side: _servers(info.get(side)) for side in ("prefill", "decode")}
    servers = [one for many in sides.values() for one in many] or [info]
    first = Fields(f"{row.where}: server_info", (sides["decode"] or servers)[0], findings=row.findings)
    return {
        "engine": "sglang",
        "model": first.text("served_model_name") or first.text("model_path"),
        "version": first.text("version"),
        "precision": first.text("quantization"),
        "nodes": _sum([_count(one, "nnodes") for one in servers]),
        "gpus": _sum([_world(one) for one in servers]),
        "parallelism": Parallelism(
            tp=first.count("tp_size"),
            pp=first.count("pp_size"),
            dp=first.count("dp_size"),
            ep=first.count("ep_size"),
            dp_attention=_flag(first.values.get("enable_dp_attention")),
            prefill_gpus=_sum([_world(one) for one in sides["prefill"]]),
            decode_gpus=_sum([_world(one) for one in sides["decode"]]),
        ),
        "flags": tuple(_flags(first.values)),
        "extra": {"server_info": _without_secrets(info)},
    }


def _servers(listed: Any) -> list[Mapping[str, Any]]:
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def _flags(server: Mapping[str, Any]) -> list[str]:
    given = [(name, server.get(name)) for name in FLAGS]
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given
        if value not in (None, False, "") and isinstance(value, (bool, int, float, str))
    ]


def _world(server: Mapping[str, Any]) -> int | None:
    tp, pp, dp = (_count(server, name) for name in ("tp_size", "pp_size", "dp_size"))
    shared = _flag(server.get("enable_dp_attention"))
    if tp is None or pp is None or dp is None or (dp > 1 and shared is None):
        return None
    return tp * pp * (1 if shared else dp)


def _count(server: Mapping[str, Any], name: str) -> int | None:
    return Fields("", server).count(name) or None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _sum(parts: Sequence[int | None]) -> int | None:
    return sum(parts) if parts and None not in parts else None


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: "***" if k in SECRETS and v else _without_secrets(v) for k, v in value.items()}
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value
