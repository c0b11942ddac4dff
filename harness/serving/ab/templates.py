"""Templates of plans: an engine with its own client on a current GPU, and published set-ups."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.files import read_toml
from harness.serving.published_documents import configurations, script
from shapes.names import unknown

MODEL = "/models/DeepSeek-R1-0528"


@functools.cache
def _file() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("templates.toml"))


def gone() -> dict[str, str]:
    """From flags and variables that current engines no longer have to what replaces them, if anything."""
    found: dict[str, str] = _file()["gone"]
    return found


def _plans() -> dict[str, tuple[str, str]]:
    """From name to engine and GPU, as templates.toml has them."""
    engines = {name: of["gpus"] for name, of in _file().items() if "gpus" in of}
    return {f"{name}-{gpu.lower()}": (name, gpu) for name, gpus in engines.items() for gpu in gpus}


def listed() -> list[dict[str, str]]:
    plans = {n: ("a plan", _file()[engine]["version"], f"8 x {gpu}") for n, (engine, gpu) in _plans().items()}
    scripts = {
        name: ("as published, a script", f"{one.engine} {one.version}", f"{one.gpus} x {one.hardware}")
        for name, one in configurations().items()
    }
    keys = ("template", "kind", "engine", "hardware")
    return [dict(zip(keys, (name, *row), strict=True)) for name, row in (plans | scripts).items()]


def template_text(name: str) -> str:
    """A plan as TOML, or a published set-up as a script, by one of its names. Raises UsageError."""
    if name in _plans():
        return _toml(*_plans()[name])
    for one in configurations().values():
        if name in (one.name, *one.environments.values()):
            return script(one, gone())
    known = [row["template"] for row in listed()]
    raise UsageError(unknown("template", name, known, "serving ab --template"))


def _toml(engine: str, gpu: str) -> str:
    about = _file()[engine]
    of_gpu = about["gpus"][gpu]
    arm, env = of_gpu["arm"], {**about.get("env", {}), **of_gpu.get("env", {})}
    changes = {"arm_env": _lines("env.", arm.get("env", {})), "arm_flags": arm.get("flags", "")}
    values = {"flush": "", **about, **of_gpu, "gpu": gpu, "env": _lines("", env), **changes}
    return str(_file()["template"]["plan"]).format(**values).replace("{model}", MODEL)


def _lines(prefix: str, values: dict[str, str]) -> str:
    return "".join(f'{prefix}{key} = "{value}"\n' for key, value in values.items())
