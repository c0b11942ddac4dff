"""Templates of plans: an engine and its own client on a GPU of today; and set-ups that were published."""

from __future__ import annotations

import difflib
import functools
import textwrap
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.report.text import table
from harness.serving.clients.files import toml
from harness.serving.published.documents import configurations, script

MODEL = "/models/DeepSeek-R1-0528"
WIDTH = 100


@functools.cache
def _file() -> dict[str, Any]:
    return toml(Path(__file__).with_name("templates.toml"))


def gone() -> dict[str, str]:
    """Flags and variables that today's engines have no more -> what takes their place, if anything."""
    found: dict[str, str] = _file()["gone"]
    return found


def _plans() -> dict[str, tuple[str, str]]:
    """Name -> engine and GPU, as templates.toml has them."""
    engines = {name: of["gpus"] for name, of in _file().items() if "gpus" in of}
    return {f"{name}-{gpu.lower()}": (name, gpu) for name, gpus in engines.items() for gpu in gpus}


def listed() -> list[dict[str, str]]:
    plans = {n: (_file()[engine]["version"], f"8 x {gpu}", "a plan") for n, (engine, gpu) in _plans().items()}
    scripts = {
        name: (f"{one.engine} {one.version}", f"{one.gpus} x {one.hardware}", "as published, a script")
        for name, one in configurations().items()
    }
    keys = ("template", "engine", "hardware", "kind")
    return [dict(zip(keys, (name, *row), strict=True)) for name, row in (plans | scripts).items()]


def template_text(name: str) -> str:
    """A plan as TOML, or a published set-up as a shell script, by its name or that of an environment of it;
    the list where no name is given. Raises UsageError for an unknown name."""
    if not name:
        return table([list(row.values()) for row in listed()], list(listed()[0])) + "\n"
    if name in _plans():
        return _toml(*_plans()[name])
    for one in configurations().values():
        if name in (one.name, *one.environments.values()):
            return script(one, gone())
    known = [row["template"] for row in listed()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    there = f"{'near' if near else 'there are'}: {', '.join(near or known)}"
    raise UsageError(f"unknown template {name!r}; {there}; --template lists all")


def _toml(engine: str, gpu: str) -> str:
    about = _file()[engine]
    of_gpu = about["gpus"][gpu]
    env, arm = {**about.get("env", {}), **of_gpu.get("env", {})}, of_gpu["arm"]
    return f"""\
# {about["version"]} on 8 x {gpu}, DeepSeek-R1 in FP8, 8192 tokens in and 1024 out, 64 in flight. Set the
# model's folder (twice), and what the second arm changes; then: serving ab FILE.toml --dry-run
{_command("launch", f"{about['launch']} {of_gpu['flags']}")}
{_command("client", about["client"])}
prompts = 640  # ten times what is in flight
warm_up_prompts = 128
flush = "{about.get("flush", "")}"  # a path to POST to, that empties the prefix cache
metric = "tpot"  # what decides: or ttft, ttft_median, throughput
margin = 1.0  # per cent that are worth deciding
launch_minutes = 8
run_minutes = 7.5

[env]
{"".join(f'{key} = "{value}"' + chr(10) for key, value in env.items())}
[arms.base]

[arms.changed]
{"".join(f'env.{key} = "{value}"' + chr(10) for key, value in arm.get("env", {}).items())}\
flags = "{arm.get("flags", "")}"
"""


def _command(key: str, text: str) -> str:
    """Of several lines, a flag not parted from its value."""
    words = text.replace("{model}", MODEL).replace(" --", "\n--").replace(" ", "\0").replace("\n", " ")
    lines = textwrap.wrap(words, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{key} = '''\n" + " \\\n  ".join(line.replace("\0", " ") for line in lines) + "'''"
