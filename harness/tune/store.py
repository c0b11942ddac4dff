"""The store of tuned configurations. `tune` writes the winners of races here: those of the suite's kernels as
files that `kernels/tuning.py` reads, those of an engine's kernel as the engine's own tables."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import files
from harness.errors import UsageError
from harness.workers.child.profile import bare
from kernels.op import Implementation

ABOUT = "What `python -m harness tune` measured."
NEEDED = ("case", "features", "config")


@dataclass(frozen=True)
class Place:
    """What choices were made for."""

    kind: str
    """cpu, cuda or rocm."""
    arch: str
    device: str = ""
    """The vendor's name; empty for a CPU, and for choices that were only compiled."""
    measured: bool = False
    """False for the choices in the repository that were only compiled for an architecture."""

    @property
    def folder(self) -> str:
        """The name of the folder: `NVIDIA_H200` for a device, else `gfx942`."""
        return re.sub(r"[^\w.-]+", "_", self.device or self.arch).strip("_")


def path(folder: Path, implementation: str, place: Place) -> Path:
    return folder / place.folder / f"{implementation}.json"


def store(
    folder: Path,
    implementation: str,
    place: Place,
    choices: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Path:
    """Writes choices to `<folder>/<arch or device>/<implementation>.json` and returns that path.

    The file is replaced at once or not at all. A choice replaces the one of the same case; choices of other
    cases stay. Raises UsageError where the folder cannot be written or the present file cannot be read.

    choices:    each has `case` (its text), `features` (Tunable.features), `config` (the dataclass as a
                dictionary) and the measurement behind it
    provenance: of these choices, `source` among it (see below). Each choice keeps the `source` that it was
                made from; the file has the rest as of the last write
    """
    lacking = {name for choice in choices for name in NEEDED if name not in choice}
    if lacking:
        raise ValueError(f"a choice of {implementation} lacks {', '.join(sorted(lacking))}")
    file = path(folder, implementation, place)
    marked = [{**choice, "source": provenance["source"]} for choice in choices]
    merged = {choice["case"]: choice for choice in [*read(file)["choices"], *marked]}
    content = {
        **asdict(place),
        "about": ABOUT,
        "provenance": dict(provenance),
        "choices": [merged[case] for case in sorted(merged)],
    }
    try:
        files.replace(file, _text(content))
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; give another folder by --out") from None
    return file


def read(file: Path) -> dict[str, Any]:
    """The content of a file of choices; no choices where there is no file. Raises UsageError where the file
    cannot be read."""
    try:
        return {"choices": []} | json.loads(file.read_text())
    except FileNotFoundError:
        return {"choices": []}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read ({error}): remove it, or give another --out") from None


def _text(content: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a list, so that diffs are readable."""

    def value(of: Any) -> str:
        if not isinstance(of, list) or not of:
            return json.dumps(of)
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in of) + "\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {value(of)}" for name, of in content.items()) + "\n}\n"


def store_winner(
    folder: Path, tables: Mapping[str, Mapping[str, Mapping[str, Any]]], m: int, config: Mapping[str, Any]
) -> Path:
    """Writes a winner into the engine's table files, under the names that the engine looks for, and returns
    the path of the first. Raises UsageError where a file cannot be read or written.

    The engines take the entry of the nearest M, so a file with this M alone would serve all other M too.
    Therefore each file also gets what the engine takes at the other M at present, unless the file has them. A
    winner serves the calls up to half-way to its neighbours in M.

    tables: the files, each with what the engine takes at present by M (EngineTable.files)
    """
    for name, present in tables.items():
        file = folder / name
        try:
            there = json.loads(file.read_text()) if file.exists() else {}
            merged = {**present, **there, str(m): dict(config)}
            ordered = sorted(merged.items(), key=lambda entry: int(entry[0]) if entry[0].isdigit() else -1)
            files.replace(file, json.dumps(dict(ordered), indent=4) + "\n")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot merge a winner into {file}: {error}; give another --out") from None
    return folder / next(iter(tables))


def source(implementation: Implementation) -> str:
    """A hash of twelve digits that changes with the kernels that an implementation compiles.

    It covers the code of all `*_jit` modules that the implementation's module imports, directly or through
    other modules of its op or other `*_jit` modules. Comments, docstrings and module names do not count.
    """
    module = type(implementation).__module__
    op = ".".join(module.split(".")[:2])
    trees = _trees(module, op, {})
    kernels = sorted(bare(tree) for name, tree in trees.items() if name.endswith("_jit"))
    return hashlib.sha256(json.dumps(kernels).encode()).hexdigest()[:12]


def _trees(module: str, op: str, trees: dict[str, ast.Module]) -> dict[str, ast.Module]:
    """Adds the syntax trees of a module and of those that it imports to `trees`, by module name."""
    spec = find_spec(module)
    if spec is not None and spec.origin is not None:
        trees[module] = ast.parse(Path(spec.origin).read_text())
        for name in _imported(trees[module]):
            own = name.startswith(f"{op}.") or (name.startswith("kernels.") and name.endswith("_jit"))
            if own and name not in trees and _is_module(name):
                _trees(name, op, trees)
    return trees


def _is_module(name: str) -> bool:
    """Whether a dotted name is a module, and not a name in one."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
