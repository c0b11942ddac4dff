"""The store of tuned configurations. `tune` writes the winners of races here: those of the suite's kernels as
files that `kernels/tuning.py` reads, those of an engine's kernel as the engine's own tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import files
from harness.errors import UsageError
from kernels.tuning import Target

ABOUT = "What `python -m harness tune` measured."


def folder_name(target: Target) -> str:
    """The name of a target's folder: `NVIDIA_H200` for a device, else `gfx942`."""
    return re.sub(r"[^\w.-]+", "_", target.device or target.arch).strip("_")


def path(folder: Path, implementation: str, target: Target) -> Path:
    return folder / folder_name(target) / f"{implementation}.json"


def store(file: Path, target: Target, choice: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Writes a choice that was measured on a target to a file (see `path`).

    The file is replaced at once or not at all. The choice replaces the one of the same case; choices of other
    cases stay. Raises UsageError where the folder cannot be written or the present file cannot be read.

    choice:     has `case` (its text), `features` (Tunable.features), `config` (its values by name) and the
                measurement behind it
    provenance: of this choice. The choice keeps its `source`; the file has the rest as of the last write
    """
    merged = {old["case"]: old for old in read(file)["choices"]}
    merged[choice["case"]] = {**choice, "source": provenance["source"]}
    content = {
        "kind": target.kind,
        "arch": target.arch,
        "device": target.device,
        "measured": True,
        "about": ABOUT,
        "provenance": dict(provenance),
        "choices": [merged[case] for case in sorted(merged)],
    }
    try:
        files.replace(file, _text(content))
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; give another folder by --out") from None


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
