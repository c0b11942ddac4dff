"""Templates of plans: an engine and its own client on a GPU of today; and set-ups that were published."""

from __future__ import annotations

import difflib
import functools
import json
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.report.text import table
from harness.serving.published.documents import Configuration, configurations
from harness.serving.published.recipe import script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODEL = "/models/DeepSeek-R1-0528"
WIDTH = 100


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("templates.toml").read_text())


def gone() -> dict[str, str]:
    """Flags and variables that today's engines have no more -> what takes their place, if anything."""
    found: dict[str, str] = _file()["gone"]
    return found


def templates() -> dict[str, tuple[str, str]]:
    """Name -> engine and GPU, as `templates.toml` has them."""
    engines = {name: of for name, of in _file().items() if "gpus" in of}
    return {f"{name}-{gpu.lower()}": (name, gpu) for name, of in engines.items() for gpu in of["gpus"]}


def listed() -> list[dict[str, str]]:
    rows = [
        {"template": name, "engine": _file()[engine]["version"], "hardware": f"8 x {gpu}", "kind": "plan"}
        for name, (engine, gpu) in templates().items()
    ]
    return rows + [
        {"template": name, "engine": f"{one.engine} {one.version}".strip(),
         "hardware": f"{one.gpus} x {one.hardware}", "kind": "as published, a script"}
        for name, one in configurations().items()
    ]  # fmt: skip


def list_as(json_to: str | None) -> str:
    if json_to:
        return json.dumps(listed(), indent=1) + "\n"
    return table([list(row.values()) for row in listed()], list(listed()[0])) + "\n"


def template(name: str) -> str:
    """A plan as TOML, or a published set-up as a shell script. Raises UsageError for an unknown name."""
    known, published = templates(), configurations()
    if name in known:
        return _toml(*known[name])
    owners: dict[str, Configuration] = {e: c for c in published.values() for e in c.environments.values()}
    if found := published.get(name) or owners.get(name):
        return script(found, gone())
    near = difflib.get_close_matches(name.lower(), [*known, *published], n=3, cutoff=0.5)
    there = ", ".join(near or [*known, *published])
    raise UsageError(
        f"unknown template {name!r}; {'near' if near else 'there are'}: {there}; --template lists all"
    )


def _toml(engine: str, gpu: str) -> str:
    about = _file()[engine]
    of_gpu = about["gpus"][gpu]
    arm = of_gpu["arm"]
    lines = [
        f"# {about['version']} on 8 x {gpu}, DeepSeek-R1 in FP8, 8192 tokens in and 1024 out, 64 in flight.",
        f"# Set the model's folder (twice), and what the second arm changes; then",
        "#   python -m harness serving ab FILE.toml --dry-run",
        _command("launch", f"{about['launch']} {of_gpu['flags']}"),
        _command("client", about["client"]),
        "prompts = 640  # ten times what is in flight",
        "warm_up_prompts = 128",
        *([f'flush = "{about["flush"]}"'] if "flush" in about else []),
        'metric = "tpot"  # or ttft, ttft_median, throughput',
        "margin = 1.0  # per cent that are worth deciding",
        "launch_minutes = 8",
        "run_minutes = 7.5",
        "",
        "[env]",
        *(f'{key} = "{value}"' for key, value in {**about.get("env", {}), **of_gpu.get("env", {})}.items()),
        "",
        "[arms.base]",
        "",
        "[arms.changed]",
        *([f'flags = "{arm["flags"]}"'] if "flags" in arm else []),
        *(f'env.{key} = "{value}"' for key, value in arm.get("env", {}).items()),
    ]
    return "\n".join(lines) + "\n"


def _command(key: str, text: str) -> str:
    """Of several lines, a flag not parted from its value."""
    words = text.replace("{model}", MODEL).replace(" --", "\0--").split("\0")
    joined = [word.replace(" ", "\0") for word in words]
    lines = textwrap.wrap(" ".join(joined), WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{key} = '''\n" + " \\\n  ".join(line.replace("\0", " ") for line in lines) + "'''"


def print_template(name: str, json_to: str | None) -> None:
    from harness.files import write

    write("-" if name or not json_to else json_to, template(name) if name else list_as(json_to))
