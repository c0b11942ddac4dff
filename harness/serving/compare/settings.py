"""Settings of a server: its flags and environment, by name, and those in which two servers differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.catalogue.flags import catalogue
from harness.serving.names import model_name
from harness.serving.schema import OFF, ServingRun

STATE = re.compile(
    r"(host|pid|ports?|.*_ports?|.*_ids?|.*_addr|.*_dir|.*_folder|.*_file|.*_keyfile.*|.*_paths?|.*url|uuid|date"
    r"|.*time|.*timestamp|log_.*|.*_log|api_key|admin_api_key|random_.*|seed|status|label|tag|model|latencies_ms"
    r"|served_model_name|trust_remote_code|spec_decode_.*|rtfx|total_.*|num_.*_tokens|sharegpt_.*|issue_rate"
    r"|.*_intvty)"
)
"""Names that are not settings: places, names, and what was measured."""
MODEL_PATHS = ("model_path", "tokenizer_path", "tokenizer_id", "speculative_draft_model_path")
NESTED = ("server_info", "engine", "world_info")
"""Objects of `extra` that hold a server's settings: SGLang's, TensorRT-LLM's."""
NOTED = ("vllm.serve", "inferencex")
"""Clients that keep a server's settings beside their own keys."""


def server_settings(run: ServingRun) -> dict[str, str]:
    """The server's settings by name, except those that are off: from its flags, from what it said of itself,
    and from what its user noted."""
    found: dict[str, Any] = {}
    for flag in run.flags:
        name, _, value = flag.replace("=", " ", 1).replace(": --", ":", 1).partition(" ")
        found[name.removeprefix("--").replace("-", "_")] = value or "on"
    if run.client in NOTED:
        noted = {key: v for key, v in run.extra.items() if key not in ("backend", "endpoint_type")}
        found |= {key: v for key, v in noted.items() if isinstance(v, str | bool | int)}
    for key in NESTED:
        found |= _flat(run.extra.get(key))
    settings = {}
    for name, value in found.items():
        last = re.split("[.:]", name)[-1]
        if last in MODEL_PATHS:
            value = model_name(str(value))
        if str(value).lower() not in OFF and (last in MODEL_PATHS or not STATE.fullmatch(last)):
            settings[name] = "on" if str(value).lower() == "true" else str(value).strip()
    return settings


def _flat(value: object, name: str = "") -> dict[str, Any]:
    """Scalars in nested objects and lists, by joined names."""
    if not isinstance(value, Mapping | list):
        return {name: value} if name else {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = {f"{name}.{key}".lstrip("."): each for key, each in items if key != "internal_states"}
    return {k: v for key, each in inner.items() for k, v in _flat(each, key).items()}


def beside(a: ServingRun, b: ServingRun) -> Iterator[str]:
    """What differs between two runs outside of the identity, a line for each kind."""
    for what in ("image", "client", "protocol", "model"):
        of_a, of_b = getattr(a, what), getattr(b, what)
        if of_a and of_b and of_a.lower() != of_b.lower():
            yield f"{what}: {of_a} against {of_b}"
    unread = {name for name, flag in catalogue().items() if flag.read == "never"}
    variables = [{k: v for k, v in run.environment.items() if k not in unread} for run in (a, b)]
    for kind, (of_one, of_other) in (
        ("flags that differ", (server_settings(a), server_settings(b))),
        ("environment that differs", variables),
    ):
        names = [name for name in {**of_one, **of_other} if of_one.get(name) != of_other.get(name)]
        if of_one and of_other and names:
            pairs = [f"{name} {of_one.get(name, 'unset')} | {of_other.get(name, 'unset')}" for name in names]
            yield f"{kind}: {', '.join(pairs)}"
