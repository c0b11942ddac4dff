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
    found: dict[str, Any] = {}
    for flag in run.flags:
        name, _, value = flag.replace("=", " ", 1).replace(": --", ":", 1).partition(" ")
        found[name.removeprefix("--").replace("-", "_")] = value or "on"
    for key in NAMES["of_server"]:
        found |= flat(run.extra.get(key))
    noted = {
        key: v for key, v in _scalars(run).items() if run.client in NAMES["noted"] and key not in NAMES["own"]
    }
    return _settings(found | noted, noted if run.client.endswith(".serve") else {})


def client_settings(run: ServingRun) -> dict[str, str]:
    """The client's settings by name, as far as a run has no other place for them."""
    found = {
        key: v for key, v in _scalars(run).items() if run.client not in NAMES["noted"] or key in NAMES["own"]
    }
    found |= {
        k.lower().replace(" ", "_"): v for k, v in run.extra.items() if k.startswith(NAMES["csv_settings"])
    }
    for key in NAMES["of_client"]:
        found |= flat(run.extra.get(key))
    return _settings(found)


def _scalars(run: ServingRun) -> dict[str, Any]:
    """What a client wrote beside its objects, except the protocol, which a run has itself."""
    scalars = {k: v for k, v in run.extra.items() if isinstance(v, str | bool | int) and k.isidentifier()}
    return {k: v for k, v in scalars.items() if v != run.protocol}


def _settings(found: Mapping[str, Any], noted: Collection[str] = ()) -> dict[str, str]:
    """The settings that are on, and those that the user noted. `off` may not be a server's default."""
    settings = {}
    for name, value in found.items():
        text, last = str(value).strip(), re.sub(r"(\.\d+)+$", "", name)  # without indices of a list
        last = re.split("[.:]", last)[-1]
        is_model = last in NAMES["model_paths"]
        if (name in noted or text.lower() not in OFF) and (is_model or not STATE.fullmatch(last)):
            text = "on" if text.lower() == "true" else text
            settings[name] = model_name(text) if is_model else text
    return settings


def flat(value: object, name: str = "", *, lists: bool = True) -> dict[str, Any]:
    """Scalars in nested objects, by joined names. lists: whether lists are taken apart, too"""
    if not (isinstance(value, Mapping) or (lists and isinstance(value, list))):
        return {name: value} if name else {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = {f"{name}.{key}".lstrip("."): each for key, each in items if key not in NAMES["unlisted"]}
    return {k: v for key, each in inner.items() for k, v in flat(each, key, lists=lists).items()}


def beside(a: ServingRun, b: ServingRun) -> Iterator[str]:
    """The differences between two runs outside of the identity, a line for each kind."""
    for what in ("image", "client", "protocol", "model"):
        of_a, of_b = getattr(a, what), getattr(b, what)
        if of_a and of_b and of_a.lower() != of_b.lower():
            yield f"{what}: {of_a} against {of_b}"
    unread = {name for name, flag in catalogue().items() if flag.read == "never"}
    variables = [{k: v for k, v in run.environment.items() if k not in unread} for run in (a, b)]
    kinds = [("flags", [server_settings(a), server_settings(b)]), ("environment", variables)]
    if a.client == b.client:
        kinds.append(("client's settings", [client_settings(a), client_settings(b)]))
    for kind, (one, other) in kinds:
        if kind != "client's settings" and not ((one and other) or a.client == b.client in NAMES["noted"]):
            continue  # one side does not tell them
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            pairs = [f"{name} {one.get(name, 'unset')} | {other.get(name, 'unset')}" for name in names]
            yield f"{kind} that differ{'s' if kind == 'environment' else ''}: {', '.join(pairs)}"
