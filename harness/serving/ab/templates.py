"""Templates of plans: an engine with its own client on a current GPU, and published set-ups."""

from __future__ import annotations

from pathlib import Path

from harness.errors import UsageError
from harness.files import read_toml
from harness.serving.published_documents import configurations, script
from shapes.names import unknown

MODEL = "/models/DeepSeek-R1-0528"
TEMPLATES = read_toml(Path(__file__).with_name("templates.toml"))
GONE: dict[str, str] = TEMPLATES["gone"]
"""From flags and variables that current engines no longer have to what replaces them, if anything."""


def _plans() -> dict[str, tuple[str, str]]:
    """From name to engine and GPU, as templates.toml has them."""
    engines = {name: table["gpus"] for name, table in TEMPLATES.items() if "gpus" in table}
    return {f"{name}-{gpu.lower()}": (name, gpu) for name, gpus in engines.items() for gpu in gpus}


def listed() -> list[dict[str, str]]:
    """A row of the table of templates for each plan, then for each published set-up."""
    rows = []
    for name, (engine, gpu) in _plans().items():
        version = TEMPLATES[engine]["version"]
        rows.append({"template": name, "kind": "a plan", "engine": version, "hardware": f"8 x {gpu}"})
    for name, setup in configurations().items():
        server, machine = f"{setup.engine} {setup.version}", f"{setup.gpus} x {setup.hardware}"
        kind = "as published, a script"
        rows.append({"template": name, "kind": kind, "engine": server, "hardware": machine})
    return rows


def template_text(name: str) -> str:
    """A plan as TOML, or a published set-up as a script, by one of its names. Raises UsageError."""
    if name in _plans():
        return _toml(*_plans()[name])
    for setup in configurations().values():
        if name in (setup.name, *setup.environments.values()):
            return script(setup, GONE)
    known = [row["template"] for row in listed()]
    raise UsageError(unknown("template", name, known, "serving ab --template"))


def _toml(engine: str, gpu: str) -> str:
    """The plan of an engine on a GPU: the template, filled in with their tables of templates.toml."""
    of_engine = TEMPLATES[engine]
    of_gpu = of_engine["gpus"][gpu]
    values = {"flush": "", **of_engine, **of_gpu, "gpu": gpu}
    values["env"] = _lines("", {**of_engine.get("env", {}), **of_gpu.get("env", {})})
    values["arm_env"] = _lines("env.", of_gpu["arm"].get("env", {}))
    values["arm_flags"] = of_gpu["arm"].get("flags", "")
    return str(TEMPLATES["template"]["plan"]).format(**values).replace("{model}", MODEL)


def _lines(prefix: str, values: dict[str, str]) -> str:
    return "".join(f'{prefix}{key} = "{value}"\n' for key, value in values.items())
