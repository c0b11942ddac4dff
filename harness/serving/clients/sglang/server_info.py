"""`server_info` of an SGLang server: version and arguments, as later versions of bench_serving store them.

Read in sglang/srt/entrypoints/http_server.py of 0.5.9: the server's arguments, the scheduler's sizes,
`internal_states` (one for each data-parallel rank) and `version`, in one object. A router of disaggregated
servers answers with a list of such objects under `prefill` and one under `decode`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.schema import Parallelism

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")
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
    "scheduler_recv_interval",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disaggregation_mode",
)


def described(row: Fields) -> dict[str, Any]:
    """What `server_info` says, as fields of a ServingRun; nothing where the row has none.

    What has no field stays in `extra`, less keys and passwords. gpus is the size of the server's world, which
    its arguments fix: tensor times pipeline parallel, and times data parallel where that is not over the
    tensor-parallel ranks (dp attention).
    """
    info = row.inside("server_info")
    if not info.values:
        return {}
    prefill, decode = _servers(info, "prefill"), _servers(info, "decode")
    servers = [*prefill, *decode] or [info]
    sizes = {id(server): _sizes(server) for server in servers}
    main = (decode or servers)[0]
    size = sizes[id(main)]
    return {
        "engine": "sglang",
        "model": main.text("served_model_name") or main.text("model_path"),
        "version": main.text("version"),
        "precision": main.text("quantization"),
        "nodes": _sum([sizes[id(server)]["nnodes"] for server in servers]),
        "gpus": _sum([_world(sizes[id(server)]) for server in servers]),
        "parallelism": Parallelism(
            tp=size["tp_size"],
            pp=size["pp_size"],
            dp=size["dp_size"],
            ep=size["ep_size"],
            dp_attention=size["enable_dp_attention"],
            prefill_gpus=_sum([_world(sizes[id(server)]) for server in prefill]),
            decode_gpus=_sum([_world(sizes[id(server)]) for server in decode]),
        ),
        "flags": tuple(flag for name in FLAGS for flag in _flag(main, name)),
    }


def without_secrets(value: Any) -> Any:
    """The same, with keys and passwords replaced."""
    if isinstance(value, Mapping):
        return {k: "***" if k in SECRETS and v else without_secrets(v) for k, v in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _servers(info: Fields, side: str) -> list[Fields]:
    listed = info.values.get(side)
    where = f"{info.where}: {side}"
    servers = listed if isinstance(listed, list) else []
    return [
        Fields(where, server, findings=info.findings) for server in servers if isinstance(server, Mapping)
    ]


def _sizes(server: Fields) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: server.count(name) for name in SIZES}
    shared = server.take("enable_dp_attention")
    if shared is not None and not isinstance(shared, bool):
        server.leave_out("enable_dp_attention", "is neither true nor false")
    return sizes | {"enable_dp_attention": shared if isinstance(shared, bool) else None}


def _world(size: Mapping[str, Any]) -> int | None:
    tp, pp, dp, shared = (size[key] for key in ("tp_size", "pp_size", "dp_size", "enable_dp_attention"))
    if not tp or not pp or not dp or (dp > 1 and shared is None):
        return None
    return tp * pp * (1 if shared else dp)


def _flag(server: Fields, name: str) -> tuple[str, ...]:
    value = server.values.get(name)
    if isinstance(value, (Mapping, list)) or (isinstance(value, float) and not math.isfinite(value)):
        server.leave_out(name, "is no flag's value")
        return ()
    if value is None or value is False or value == "":
        return ()
    return (f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"),)


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None
