"""Recipes: the environments that the documents set, as named sets of flags.

The data is `catalogue/recipes.json`, each with its document and the lines it stands on. What of a recipe is
no environment variable, the options of its server, is listed beside it and not applied.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import DATA


@dataclass(frozen=True)
class Variable:
    """One setting of a recipe.

    value: as the document writes it; None where it is filled in at run time
    line:  of the document
    note:  what is known of it in the engine that the recipe runs
    """

    name: str
    value: str | None
    line: int
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """document, where: its title, and the place in it; engine: what it starts, with version and image;
    options: of that server, which are no environment variables; note: what a reader should know."""

    name: str
    document: str
    where: str
    platform: str
    arch: str
    engine: str
    variables: tuple[Variable, ...]
    options: tuple[str, ...] = ()
    note: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Its variables that have a value, in the document's order."""
        return {v.name: v.value for v in self.variables if v.value is not None}


@functools.cache
def recipes() -> dict[str, Recipe]:
    """By name."""
    entries = json.loads((DATA / "recipes.json").read_text())["recipes"]
    return {entry["name"]: _recipe(entry) for entry in entries}


def _recipe(entry: JsonObject) -> Recipe:
    variables = tuple(Variable(**variable) for variable in entry["variables"])
    return Recipe(**entry | {"variables": variables, "options": tuple(entry.get("options", ()))})


def find(name: str) -> Recipe:
    """Raises UsageError for an unknown one."""
    if name not in recipes():
        raise UsageError(f"unknown recipe {name!r}; recipes: {', '.join(recipes())}")
    return recipes()[name]
