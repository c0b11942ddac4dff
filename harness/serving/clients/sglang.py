"""SGLang's load generators: `bench_serving`, `bench_one_batch`, `bench_one_batch_server` and
`bench_offline_throughput`, each one JSON object a run, appended to a JSONL file.

Read in sglang 0.4.3 to 0.5.9 (wheels) and sglang/benchmark of 0.5.23. Times in lists are seconds, `*_ms`
milliseconds, latencies of the batch clients seconds.

bench_serving: by 0.4.6 accept_length, p95_itl_ms; by 0.5.9 tag, server_info, total_throughput,
max_output_tokens_per_s, max_concurrent_requests; by 0.5.23 p90 and p95 of all, request_goodput,
slo_attainment. Lists only with --output-details. random_*_len and random_range_ratio are written whatever the
data set; they hold for `random` and `random-ids`, whose lengths are uniform from the ratio times the length
to the length (the workload gives the mean). `concurrency` is the sum of all end-to-end times over the
duration.

one_batch: prefill's throughput is input tokens over its time, decode's the batch over the median step, the
overall one input and output tokens over all steps.

one_batch_server: **`output_throughput` changed its meaning**. In 0.4.3 it is output tokens over the whole
time; by 0.4.6 (last_gen_throughput stands beside it) all output tokens over the time after the last request's
first token: `decode_throughput` here, and the throughput over the whole time is derived. -1 means not known
(0.5.9). It can send to other engines too, and its file does not say which one answered.

offline_throughput: `backend` is the way in (engine, runtime). total_throughput counts input and output
tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.clients.format import (
    ACCEPTED,
    AT_ONCE,
    COUNTS,
    LOAD,
    PEAKS,
    REQUESTS,
    Draft,
    Format,
    Latencies,
    One,
    keys,
    mean_of_range,
    rates,
)
from harness.serving.schema import Metric

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")
FLAGS = (
    "dtype", "quantization", "kv_cache_dtype", "attention_backend", "prefill_attention_backend",
    "decode_attention_backend", "fp8_gemm_runner_backend", "moe_runner_backend", "moe_a2a_backend",
    "deepep_mode", "enable_dp_lm_head", "enable_eplb", "enable_two_batch_overlap",
    "enable_torch_compile", "disable_cuda_graph", "cuda_graph_max_bs", "disable_radix_cache",
    "disable_overlap_schedule", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests",
    "mem_fraction_static", "page_size", "stream_interval", "schedule_policy", "scheduler_recv_interval",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "disaggregation_mode",
)  # fmt: skip


def random_lengths_and_server(draft: Draft) -> None:
    """Lengths where the data set has those asked for, and what `server_info` says."""
    row, load = draft.row, draft.load
    if load["dataset"] == "sharegpt":
        load["output_len"] = row.number("sharegpt_output_len")
    elif load["dataset"] in ("random", "random-ids"):
        load["range_ratio"] = ratio = row.number("random_range_ratio")
        for side in ("input", "output"):
            load[f"{side}_len"] = mean_of_range(row.number(f"random_{side}_len"), ratio)
    cached = row.values.get("cached_tokens")
    if isinstance(cached, list) and cached and all(type(tokens) is int for tokens in cached):
        load["prefix_cached"] = sum(cached) > 0
        if sum(cached):
            draft.find("prefix_cache", "note", f"{sum(cached)} tokens of prompts came from the prefix cache")
    info = row.inside("server_info")
    if info.values:
        _describe(draft, info)
    draft.extra = without_secrets(row.rest())


def _describe(draft: Draft, info: Fields) -> None:
    """What an SGLang server says of itself (http_server.py of 0.5.9): arguments, version, `internal_states`.
    A router of disaggregated servers answers with a list of such objects under `prefill` and one under
    `decode`."""
    prefill, decode = _servers(info, "prefill"), _servers(info, "decode")
    servers = [*prefill, *decode] or [info]
    sizes = {id(server): _sizes(server) for server in servers}
    main = (decode or servers)[0]
    size = sizes[id(main)]
    draft.about |= {
        "engine": "sglang",
        "model": main.text("served_model_name") or main.text("model_path"),
        "version": main.text("version"),
        "precision": main.text("quantization"),
        "nodes": _sum([sizes[id(server)]["nnodes"] for server in servers]),
        "gpus": _sum([_world(sizes[id(server)]) for server in servers]),
        "flags": tuple(_flags(main)),
    }
    draft.parallelism = {kind: size[f"{kind}_size"] for kind in ("tp", "pp", "dp", "ep")} | {
        "dp_attention": size["enable_dp_attention"],
        "prefill_gpus": _sum([_world(sizes[id(server)]) for server in prefill]),
        "decode_gpus": _sum([_world(sizes[id(server)]) for server in decode]),
    }
    if draft.about["gpus"]:
        draft.notes.append("gpus from server_info: the world size of its parallelism")


def without_secrets(value: Any) -> Any:
    """The same, with keys and passwords replaced."""
    if isinstance(value, Mapping):
        return {k: "***" if k in SECRETS and v else without_secrets(v) for k, v in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _servers(info: Fields, side: str) -> list[Fields]:
    listed = info.values.get(side)
    servers = listed if isinstance(listed, list) else []
    where = f"{info.where}: {side}"
    return [Fields(where, one, findings=info.findings) for one in servers if isinstance(one, Mapping)]


def _sizes(server: Fields) -> dict[str, Any]:
    return {name: server.count(name) for name in SIZES} | {
        "enable_dp_attention": server.flag("enable_dp_attention")
    }


def _world(size: Mapping[str, Any]) -> int | None:
    """GPUs: tensor times pipeline parallel, and times data parallel where that is not over the
    tensor-parallel ranks (dp attention)."""
    tp, pp, dp, shared = (size[key] for key in ("tp_size", "pp_size", "dp_size", "enable_dp_attention"))
    if not tp or not pp or not dp or (dp > 1 and shared is None):
        return None
    return tp * pp * (1 if shared else dp)


def _flags(server: Fields) -> Iterator[str]:
    for name in FLAGS:
        value = server.values.get(name)
        if isinstance(value, (Mapping, list)) or (isinstance(value, float) and not math.isfinite(value)):
            server.leave_out(name, "is no flag's value")
        elif value is not None and value is not False and value != "":
            yield f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def lockstep(draft: Draft) -> None:
    """The counts of a batch, of which every request comes back whole or the client stops."""
    size = draft.load["num_prompts"]
    counted = {"completed": size}
    for side in ("input", "output"):
        length = draft.load[f"{side}_len"]
        counted[f"{side}_tokens"] = None if size is None or length is None else round(size * length)
    draft.totals = counted | {name: count for name, count in draft.totals.items() if count is not None}


def batch_of_a_server(draft: Draft) -> None:
    """What `output_throughput` means in this version, and what the server says of its cache."""
    lockstep(draft)
    row, out, duration = draft.row, draft.totals["output_tokens"], draft.totals.get("duration_s")
    since_decode_only = {"last_gen_throughput", "last_ttft", "ttft", "acc_length"} & set(row.values)
    whole: list[Metric] = []
    if not since_decode_only:
        whole = One("output_throughput", "throughput", "tok/s", "output").read(row)
    elif out is not None and duration:
        whole = [Metric(name="throughput", value=out / duration, unit="tok/s", scope="instance",
                        tokens="output", derived="output tokens / latency")]  # fmt: skip
    draft.metrics = [*whole, *draft.metrics]
    for rule in PHASES if since_decode_only else ():
        draft.metrics += rule.read(row)
    hits = row.number("cache_hit_rate")
    draft.add("cache_hit_rate", hits, "1")
    draft.load["prefix_cached"] = None if hits is None else hits > 0
    if hits:
        draft.find("prefix_cache", "note", f"{100 * hits:.3g} % of the prompts came from the prefix cache")
    given = row.values.get("server_args")
    if isinstance(given, list) and all(isinstance(flag, str) for flag in given):
        draft.about["flags"] = tuple(row.take("server_args"))


def without_unknown(document: Document) -> list[Fields]:
    """-1 stands for what the server did not say."""
    rows = objects(document)
    for row in rows:
        row.values = {k: None if k in MAYBE and v == -1 else v for k, v in row.values.items()}
    return rows


MAYBE = ("last_gen_throughput", "acc_length")
PHASES = (
    One("input_throughput", "prefill_throughput", "tok/s", "input"),
    One("output_throughput", "decode_throughput", "tok/s", "output"),
)
LENGTHS = {"input_len": "input_len", "output_len": "output_len"}
BATCH = LENGTHS | {"num_prompts": "batch_size", "concurrency": "batch_size"}
FORMATS = (
    Format(
        name="sglang.bench_serving",
        own=keys(
            "dataset_name sharegpt_output_len random_range_ratio input_throughput "
            "total_output_tokens_retokenized mean_e2e_latency_ms median_e2e_latency_ms"
        ),
        not_with=keys("GPU"),  # dstack's table has its columns
        metrics=(
            *rates(input_throughput="input", output_throughput="output", total_throughput="total"), REQUESTS,
            One("request_goodput", "goodput", "req/s"),
            One("slo_attainment", "slo_attainment", "1"),
            One("concurrency", "concurrency", "1", statistic="mean"),
            ACCEPTED,
            *PEAKS,
            Latencies({"e2e_latency": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}),
        ),
        about={"label": "tag"}, fixed={"mode": "online"}, spoken=True, requests="latencies",
        load=LOAD | {"dataset": "dataset_name"}, totals=COUNTS, odd=random_lengths_and_server,
    ),
    Format(
        name="sglang.bench_one_batch",
        own=keys(
            "prefill_latency prefill_throughput median_decode_latency median_decode_throughput "
            "total_latency overall_throughput"
        ),
        metrics=(
            *rates(overall_throughput="total"),
            One("prefill_throughput", "prefill_throughput", "tok/s", "input"),
            One("median_decode_throughput", "decode_throughput", "tok/s", "output", "median"),
            One("prefill_latency", "prefill", "ms", scale=1e3),
            One("median_decode_latency", "decode_step", "ms", statistic="median", scale=1e3),
        ),
        about={"label": "run_name"}, fixed={"engine": "sglang", "mode": "offline"}, load=BATCH,
        fixed_load=AT_ONCE, totals={"duration_s": "total_latency"}, odd=lockstep,
        notes=("a static batch in lockstep: prefill, then decode steps; no server, no scheduler",),
        wanted=("prefill_latency", "median_decode_latency", "total_latency", "overall_throughput"),
    ),
    Format(
        name="sglang.bench_one_batch_server",
        own=keys("run_name batch_size latency overall_throughput last_gen_throughput last_ttft acc_length"),
        not_with=keys("prefill_latency total_latency"),
        metrics=(
            *rates(overall_throughput="total"),
            One("last_gen_throughput", "last_gen_throughput", "tok/s", "output"),
            One("steady_state_output_throughput", "steady_state_output_throughput", "tok/s", "output"),
            One("acc_length", "accept_length", "1", statistic="mean"),
            One("ttft", "ttft", "ms", statistic="max", scope="request", scale=1e3),
            One("last_ttft", "ttft", "ms", statistic="max", scope="request", scale=1e3),
        ),
        about={"label": "run_name", "model": "model_path"}, fixed={"mode": "online"}, load=BATCH,
        fixed_load=AT_ONCE,
        totals={"duration_s": "latency", "output_tokens": "total_output_tokens"},
        odd=batch_of_a_server, rows=without_unknown,
        wanted=("latency", "output_throughput", "overall_throughput"),
    ),
    Format(
        name="sglang.bench_offline_throughput",
        own=keys("successful_requests total_latency total_throughput"), at_least=2,
        metrics=(
            *rates(input_throughput="input", output_throughput="output", total_throughput="total"), REQUESTS,
            One("last_gen_throughput", "last_gen_throughput", "tok/s", "output"),
        ),
        fixed={"engine": "sglang", "mode": "offline"},
        load={"num_prompts": "successful_requests"}, fixed_load=AT_ONCE,
        totals=COUNTS | {"duration_s": "total_latency", "completed": "successful_requests"},
        notes=("successful_requests is the number sent: this client counts no failures",),
        wanted=("successful_requests", "total_latency", "total_throughput"),
    ),
)  # fmt: skip
