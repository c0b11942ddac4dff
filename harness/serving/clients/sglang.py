"""What the tables of formats/sglang.toml cannot express."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.clients.format import Draft, mean_length

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "header")
DEGREES = ("tp", "pp", "dp", "ep")
PUBLIC = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # a model's name with its organisation
MINUS_1_IF_UNKNOWN = ("last_gen_throughput", "acc_length")
KEYS_SINCE_0_4_6 = ("last_gen_throughput", "last_ttft", "ttft", "acc_length")  # of bench_one_batch_server


def random_lengths_and_server(draft: Draft) -> None:
    """Lengths, if the data set has those that were asked for, and what `server_info` tells."""
    row, load = draft.row, draft.load
    if load["dataset"] == "sharegpt":
        load["output_len"] = row.number("sharegpt_output_len")
    elif load["dataset"] in ("random", "random-ids"):
        ratio = row.number("random_range_ratio")
        load["range_ratio"] = ratio
        for side in ("input", "output"):
            load[f"{side}_len"] = mean_length(row.number(f"random_{side}_len"), ratio)
    cached = row.values.get("cached_tokens")
    if isinstance(cached, list) and cached and all(type(tokens) is int for tokens in cached):
        tokens = sum(cached)
        load["prefix_cached"] = tokens > 0
        if tokens:
            row.find("prefix_cache", "note", f"{tokens} tokens of prompts came from the prefix cache")
    info = row.inside("server_info")
    if info.values:
        _describe(draft, info)
    draft.extra = without_secrets(row.rest())


def _describe(draft: Draft, info: Fields) -> None:
    """What an SGLang server reports of itself (http_server.py of 0.5.9): arguments, version,
    `internal_states`. A router of disaggregated servers has lists of them in `prefill` and `decode`."""
    prefill, decode = info.entries("prefill"), info.entries("decode")
    servers = [*prefill, *decode] or [info]
    main = decode[0] if decode else servers[0]
    path, served = main.text("model_path"), main.text("served_model_name")
    draft.about |= {
        "engine": "sglang",
        "model": path if PUBLIC.fullmatch(path) else served or path,  # the name of a folder tells less
        "version": main.text("version"),
        "precision": main.text("quantization"),
        "nodes": _sum(server.count("nnodes") for server in servers),
        "gpus": _sum(_world(server) for server in servers),
        "flags": tuple(_flags(main, draft.format.more["flags"])),
    }
    draft.parallelism = {kind: main.count(f"{kind}_size") for kind in DEGREES} | {
        "dp_attention": main.flag("enable_dp_attention"),
        "prefill_gpus": _sum(_world(server) for server in prefill),
        "decode_gpus": _sum(_world(server) for server in decode),
    }
    if draft.about["gpus"]:
        draft.notes.append("gpus from server_info: the world size of its parallelism")


def without_secrets(value: Any) -> Any:
    """The value with keys and passwords replaced."""
    if isinstance(value, Mapping):
        return {k: "***" if k in SECRETS and v else without_secrets(v) for k, v in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _world(server: Fields) -> int | None:
    """The number of GPUs: TP x PP x DP, but TP x PP with DP attention, whose DP ranks are among those of TP.
    None if the server does not tell it."""
    tp, pp, dp = server.count("tp_size"), server.count("pp_size"), server.count("dp_size")
    has_dp_attention = server.flag("enable_dp_attention")
    if not tp or not pp or not dp or (dp > 1 and has_dp_attention is None):
        return None
    return tp * pp if has_dp_attention else tp * pp * dp


def _flags(server: Fields, names: Iterable[str]) -> Iterator[str]:
    """The server's arguments of these names that are on, as flags: `--name` or `--name=value`."""
    for name in names:
        value = server.values.get(name)
        if isinstance(value, (Mapping, list)) or (isinstance(value, float) and not math.isfinite(value)):
            server.leave_out(name, "is no flag's value")
        elif value is not None and value is not False and value != "":
            flag = f"--{name.replace('_', '-')}"
            yield flag if value is True else f"{flag}={value}"


def _sum(parts: Iterable[int | None]) -> int | None:
    """The sum; None if one of the parts is not known, or there are none."""
    every = list(parts)
    known = [part for part in every if part is not None]
    return sum(known) if known and len(known) == len(every) else None


def counts_of_batch(draft: Draft) -> None:
    """The counts of a batch: each request comes back whole, or the client stops."""
    size = draft.load["num_prompts"]
    counted = {"completed": size}
    for side in ("input", "output"):
        length = draft.load[f"{side}_len"]
        counted[f"{side}_tokens"] = None if size is None or length is None else round(size * length)
    draft.totals = counted | {name: count for name, count in draft.totals.items() if count is not None}


def batch_of_a_server(draft: Draft) -> None:
    """What `output_throughput` means in this version, and what the server reports of its cache."""
    counts_of_batch(draft)
    row, out, duration = draft.row, draft.totals["output_tokens"], draft.totals.get("duration_s")
    others, draft.metrics = draft.metrics, []  # so that the throughput of the whole run comes before them
    is_since_0_4_6 = not row.values.keys().isdisjoint(KEYS_SINCE_0_4_6)
    if not is_since_0_4_6:
        draft.add("throughput", row.number("output_throughput"), "tok/s", tokens="output")
    elif out is not None and duration:
        draft.add("throughput", out / duration, "tok/s", tokens="output", derived="output tokens / latency")
    draft.metrics += others
    if is_since_0_4_6:
        draft.add("prefill_throughput", row.number("input_throughput"), "tok/s", tokens="input")
        draft.add("decode_throughput", row.number("output_throughput"), "tok/s", tokens="output")
    hits = row.number("cache_hit_rate")
    draft.add("cache_hit_rate", hits, "1")
    draft.load["prefix_cached"] = None if hits is None else hits > 0
    if hits:
        row.find("prefix_cache", "note", f"{100 * hits:.3g} % of the prompts came from the prefix cache")
    flags = row.values.get("server_args")
    if isinstance(flags, list) and all(isinstance(flag, str) for flag in flags):
        draft.about["flags"] = tuple(row.take("server_args"))


def without_unknown(document: Document) -> list[Fields]:
    """The document without -1, by which the client writes what the server did not tell."""
    rows = objects(document)
    for row in rows:
        unknown = {key: None for key in MINUS_1_IF_UNKNOWN if row.values.get(key) == -1}
        row.values = {**row.values, **unknown}
    return rows
