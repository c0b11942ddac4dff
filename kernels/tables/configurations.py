"""Reads a JSON file of Triton configurations by M, as vLLM and SGLang do."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""The sizes without which a launch fails."""

OPTIONS = (
    "SPLIT_K", "SWAP_AB", "USE_TMA", "grf_mode", "kpack", "matrix_instr_nonkdim", "num_ctas", "num_stages",
    "num_warps", "waves_per_eu",
)  # fmt: skip
"""Options for which the kernels have defaults."""

KEY = re.compile(r'"(\s*\d+\s*)"\s*:')


@dataclass(frozen=True)
class Configurations:
    """The contents of a file."""

    file: str
    """Its name in the package, or its path."""
    by_m: Mapping[int, Config] = field(default_factory=dict)
    """Configurations by M, in the file's order."""
    lines: Mapping[int, int] = field(default_factory=dict)
    """The line of each configuration, by M."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Why a launch fails, by M, for the configurations with which it does."""
    triton: str = ""
    """The version of Triton that the file names."""
    odd: tuple[str, ...] = ()
    """Faults that do not keep the engine from loading the file."""
    broken: str = ""
    """Why the engine stops when it loads the file; empty where it loads."""
    line: int = 0
    """The line of what is broken; 0 if unknown."""

    def without(self, name: str) -> list[int]:
        """The M of the entries in which this name is missing or not an integer."""
        by_m = self.by_m
        return [
            m for m in self.bad if not isinstance(by_m[m], dict) or not isinstance(by_m[m].get(name), int)
        ]

    @property
    def thin(self) -> str:
        """Says that there are few entries, as when a tuner was stopped, or only its last process wrote the
        file (vLLM #36840)."""
        keys = sorted(self.by_m)
        if 0 < len(keys) < 8:
            return f"thin: only entries for M {', '.join(map(str, keys))}"
        return f"thin: no entry below M {keys[0]}" if keys and keys[0] > 64 else ""


def parse(file: str, text: str, says_triton: bool) -> Configurations:
    """Reads a file's text. says_triton: whether the engine accepts the key `triton_version` beside the M."""
    if "\ufffd" in text:
        return Configurations(file, broken="not UTF-8")
    doubled: list[str] = []

    def pairs(given: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.extend(key for key, count in Counter(key for key, _ in given).items() if count > 1)
        return dict(given)

    try:
        whole = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}" if text.strip() else "empty, which is not JSON"
        return Configurations(file, broken=reason, line=error.lineno)
    except (ValueError, RecursionError) as error:
        return Configurations(file, broken=f"not JSON: {error}")
    if not isinstance(whole, dict):
        return Configurations(file, broken="not a JSON object")
    triton = str(whole.pop("triton_version", "")) if says_triton else ""
    lines = {int(key[1]): text.count("\n", 0, key.start()) + 1 for key in KEY.finditer(text)}
    by_m: dict[int, Config] = {}
    for key, config in whole.items():
        try:
            by_m[int(key)] = config
        except ValueError:
            return Configurations(file, broken=f"the key {key!r} is not a number of rows")
    bad = {m: reason for m, config in by_m.items() if (reason := _refused(config))}
    odd = [f"the key {key} occurs twice, and the last one counts" for key in doubled]
    if unknown := {name for m in by_m.keys() - bad.keys() for name in by_m[m]} - {*TILE, *OPTIONS}:
        odd.append(f"no kernel is known to take {', '.join(sorted(unknown))}")
    return Configurations(file, by_m, lines, bad, triton, tuple(odd))


def _refused(config: object) -> str:
    """Why a launch with this configuration fails; empty where it does not."""
    if not isinstance(config, dict):
        return "not a configuration"
    if missing := [name for name in TILE if name not in config]:
        return f"no {', '.join(missing)}"
    wrong = [name for name in (*TILE, *OPTIONS) if not isinstance(config.get(name, 0), int)]
    wrong += [name for name in TILE if name not in wrong and config[name] < 1]
    return ", ".join(f"{name} is {config[name]!r}" for name in wrong)


def as_text(config: Config) -> str:
    """`16x128x128 group 1, 2 warps, 4 stages, waves_per_eu 0`: M, N and K of the tile, then the rest."""
    tile = "x".join(str(config[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    parts = [f"{tile} group {config['GROUP_SIZE_M']}"]
    parts += [f"{config[f'num_{what}']} {what}" for what in ("warps", "stages") if f"num_{what}" in config]
    rest = [name for name in config if name not in (*TILE, "num_warps", "num_stages")]
    return ", ".join([*parts, *(f"{name} {config[name]}" for name in rest)])
