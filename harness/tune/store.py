"""The store of tuned configurations: choices as files, which `kernels/tuning.py` reads at run time: `harness
tune` stores here what it found, compiled or measured."""

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
from harness.workers.child.source_hash import bare
from kernels.op import Implementation

ABOUT = {
    False: "What `python -m harness tune` compiled, and ranked by harness/tune/cost_model.py; "
    "none of it was run.",
    True: "What `python -m harness tune` measured.",
}
NEEDED = ("case", "features", "config")


@dataclass(frozen=True)
class Place:
    """What choices were made for.

    kind, arch: as of kernels.tuning.Target
    device:     the vendor's name; empty where they were only compiled
    measured:   whether they were timed there
    """

    kind: str
    arch: str
    device: str = ""
    measured: bool = False

    @property
    def folder(self) -> str:
        """`gfx942`, or `NVIDIA_H200` of a device."""
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
    """Writes choices to `<folder>/<arch or device>/<implementation>.json`, all at once or not at all. Those
    of other cases that are there stay; of the same case they are replaced. Gives the file.

    choices:    each with `case` (its text), `features` (Tunable.features), `config` (the dataclass as a
                dictionary) and whatever says why: estimate_us, bound_by; time_us, runner_up ...
    provenance: of these choices: triton, commit, date, `source` (see below) ...; each choice keeps the
                `source` it was made from, and the file the rest of the last who wrote
    Raises UsageError where the folder cannot be written, or what is there cannot be read.
    """
    lacking = {name for choice in choices for name in NEEDED if name not in choice}
    if lacking:
        raise ValueError(f"a choice of {implementation} lacks {', '.join(sorted(lacking))}")
    to = path(folder, implementation, place)
    marked = [{**choice, "source": provenance["source"]} for choice in choices]
    merged = {choice["case"]: choice for choice in [*read(to)["choices"], *marked]}
    file = {
        **asdict(place),
        "about": ABOUT[place.measured],
        "provenance": dict(provenance),
        "choices": [merged[case] for case in sorted(merged)],
    }
    write(to, file)
    return to


def read(file: Path) -> dict[str, Any]:
    """A file of choices; without any where there is none. Raises UsageError where it is broken."""
    try:
        return {"choices": []} | json.loads(file.read_text())
    except FileNotFoundError:
        return {"choices": []}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read ({error}): remove it, or give another --out") from None


def write(to: Path, file: Mapping[str, Any]) -> None:
    """JSON with a line for each entry of its lists, atomically."""
    try:
        files.replace(to, _lines(file))
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror}; give another folder by --out") from None


def _lines(file: Mapping[str, Any]) -> str:
    def value(of: Any) -> str:
        if not isinstance(of, list) or not of:
            return json.dumps(of)
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in of) + "\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {value(of)}" for name, of in file.items()) + "\n}\n"


def source(implementation: Implementation) -> str:
    """Twelve digits that change with the kernels that an implementation compiles: of the code of the `*_jit`
    modules that it imports, directly or by way of others of its op or of other `*_jit` modules. Comments,
    docstrings and the names of modules do not count."""
    module = type(implementation).__module__
    op = ".".join(module.split(".")[:2])
    trees = _trees(module, op, {})
    kernels = sorted(bare(tree) for name, tree in trees.items() if name.endswith("_jit"))
    return hashlib.sha256(json.dumps(kernels).encode()).hexdigest()[:12]


def _trees(module: str, op: str, trees: dict[str, ast.Module]) -> dict[str, ast.Module]:
    """Module -> syntax tree, of this one and of those that it leads to."""
    spec = find_spec(module)
    if spec is not None and spec.origin is not None:
        trees[module] = ast.parse(Path(spec.origin).read_text())
        for name in _imported(trees[module]):
            own = name.startswith(f"{op}.") or (name.startswith("kernels.") and name.endswith("_jit"))
            if own and name not in trees and _is_module(name):
                _trees(name, op, trees)
    return trees


def _is_module(name: str) -> bool:
    """Not a name in one."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
