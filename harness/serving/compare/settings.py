"""Settings of a server and of its client by name, and those in which two runs differ."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.catalogue.flags import catalogue
from harness.files import read_toml
from harness.serving.names import model_name
from harness.serving.schema import OFF, ServingRun

NAMES = read_toml(Path(__file__).with_name("settings.toml"))
STATE = re.compile("|".join(NAMES["state"]))


def server_settings(run: ServingRun) -> dict[str, str]:
    """The server's settings that are on, from its flags and report, and what its user had the client note."""
    values: dict[str, Any] = {}
    for flag in run.flags:  # `--name value`, `--name=value`, or one of these after `role: `
        name, _, value = flag.replace("=", " ", 1).replace(": --", ":", 1).partition(" ")
        values[name.removeprefix("--").replace("-", "_")] = value or "on"
    for key in NAMES["of_server"]:
        values |= flat(run.extra.get(key))
    noted = {}
    if run.client in NAMES["clients_with_notes"]:
        noted = {key: value for key, value in _scalars(run).items() if key not in NAMES["client_keys"]}
    # A user of vLLM's or TensorRT-LLM's client notes as off what may be on by default, so that it counts.
    # InferenceX notes all of its settings, also those that are off by default.
    return _settings(values | noted, also_off=noted if run.client.endswith(".serve") else ())


def client_settings(run: ServingRun) -> dict[str, str]:
    """The client's settings by name, as far as a run has no other place for them."""
    values = _scalars(run)
    if run.client in NAMES["clients_with_notes"]:  # the other scalars are noted of the server
        values = {key: value for key, value in values.items() if key in NAMES["client_keys"]}
    for key, value in run.extra.items():
        if key.startswith(NAMES["csv_settings"]):
            values[key.lower().replace(" ", "_")] = value
    for key in NAMES["of_client"]:
        values |= flat(run.extra.get(key))
    return _settings(values)


def _scalars(run: ServingRun) -> dict[str, Any]:
    """Single values that a client wrote under names (no headings of a table), except the run's protocol."""
    scalars = {k: v for k, v in run.extra.items() if isinstance(v, str | bool | int) and k.isidentifier()}
    return {k: v for k, v in scalars.items() if v != run.protocol}


def _settings(values: Mapping[str, Any], also_off: Collection[str] = ()) -> dict[str, str]:
    """The settings among values that are on. also_off: names of those that count if they are off, too"""
    settings = {}
    for name, value in values.items():
        text = str(value).strip()
        without_indices = re.sub(r"(\.\d+)+$", "", name)  # of a list
        last = re.split("[.:]", without_indices)[-1]
        is_model = last in NAMES["model_paths"]
        if (name in also_off or text.lower() not in OFF) and (is_model or not STATE.fullmatch(last)):
            text = "on" if text.lower() == "true" else text
            settings[name] = model_name(text) if is_model else text
    return settings


def flat(value: object, name: str = "", *, lists: bool = True) -> dict[str, Any]:
    """Scalars in nested objects, by joined names: `a.b`. lists: whether lists are taken apart, too"""
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
    elif lists and isinstance(value, list):
        items = dict(enumerate(value))
    else:
        return {name: value} if name else {}
    scalars: dict[str, Any] = {}
    for key, inner in items.items():
        if key not in NAMES["unlisted"]:
            scalars |= flat(inner, f"{name}.{key}".lstrip("."), lists=lists)
    return scalars


def other_differences(a: ServingRun, b: ServingRun) -> Iterator[str]:
    """The differences between two runs outside of the identity, a line for each kind."""
    for what in ("image", "client", "protocol", "model"):
        text_a, text_b = getattr(a, what), getattr(b, what)
        if text_a and text_b and text_a.lower() != text_b.lower():
            yield f"{what}: {text_a} against {text_b}"
    kinds = [
        ("flags that differ", server_settings(a), server_settings(b)),
        ("environment that differs", _read_variables(a), _read_variables(b)),
    ]
    # A run without any flags or variables does not tell them, unless its client always notes them.
    if not (a.client == b.client and a.client in NAMES["clients_with_notes"]):
        kinds = [(kind, of_a, of_b) for kind, of_a, of_b in kinds if of_a and of_b]
    if a.client == b.client:
        kinds.append(("client's settings that differ", client_settings(a), client_settings(b)))
    for kind, of_a, of_b in kinds:
        names = [name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name)]
        pairs = [f"{name} {of_a.get(name, 'unset')} | {of_b.get(name, 'unset')}" for name in names]
        if pairs:
            yield f"{kind}: {', '.join(pairs)}"


def _read_variables(run: ServingRun) -> dict[str, str]:
    """The run's environment without variables that nothing reads."""
    unread = {name for name, flag in catalogue().items() if flag.read == "never"}
    return {name: value for name, value in run.environment.items() if name not in unread}
