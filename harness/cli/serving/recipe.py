"""`python -m harness serving recipe [NAME]`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from harness.errors import OK
from harness.files import write
from harness.serving.published.documents import Configuration, configurations
from harness.serving.published.recipe import find, missing, script, sections


def show(name: str | None, part: str | None, json_to: str | None) -> int:
    """Prints the list of recipes, or one of them as a shell script. Returns the exit code."""
    if name is None:
        rows = [_row(one) for one in configurations().values()]
        if json_to:
            _json(json_to, rows)
        else:
            print(tabulate([list(row.values()) for row in rows], list(rows[0]), disable_numparse=True))
        return OK
    one = find(name)
    if json_to:
        whole = _row(one) | {
            "where": one.where,
            "image": one.image,
            "environments": one.environments,
            "settings": [setting.model_dump() for setting in one.settings],
            "sections": [asdict(section) for section in sections(one) if part in (None, section.part)],
            "missing": missing(one),
            "notes": one.notes,
        }
        _json(json_to, whole)
    else:
        print(script(one, part or ""), end="")
    return OK


def _row(one: Configuration) -> dict[str, Any]:
    return {
        "recipe": one.name,
        "hardware": f"{one.gpus} x {one.hardware}",
        "engine": one.engine,
        "version": one.version or "not given",
        "parts": ", ".join(dict.fromkeys(section.part for section in sections(one))),
        "document": one.document,
    }


def _json(target: str, whole: Any) -> None:
    write(target, json.dumps(whole, indent=1, allow_nan=False) + "\n")
