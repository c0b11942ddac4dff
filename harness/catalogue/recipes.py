"""Recipes: the environments that documents set, as named sets of flags; and guides to tuning that name flags.
The data is in `catalogue/recipes.json`, with the document and the lines of each."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.paths import DATA
from shapes.names import unknown


@dataclass(frozen=True)
class Variable:
    name: str
    value: str | None  # as the document writes it; None where it is filled in at run time
    line: int  # the line of the document; 0 where it is not known
    note: str = ""  # what is known of the variable in the engine that the recipe runs


@dataclass(frozen=True)
class Recipe:
    """The environment that a document sets for an engine. The document is a recipe or a guide."""

    name: str
    document: str  # the title of the document
    where: str  # the place in the document
    platform: str
    arch: str
    engine: str  # the engine that the document starts, with version and image
    variables: Sequence[Variable]
    options: Sequence[str] = ()
    """Options of the server. They are listed but not applied, as they are no environment variables."""
    note: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Its variables that have a value, in the document's order."""
        return {v.name: v.value for v in self.variables if v.value is not None}


@functools.cache
def recipes() -> dict[str, Recipe]:
    """The recipes by name, without guides."""
    return _read("recipes")


@functools.cache
def recipes_and_guides() -> Sequence[Recipe]:
    return [*recipes().values(), *_read("guides").values()]


def _read(key: str) -> dict[str, Recipe]:
    by_name = {}
    for entry in json.loads((DATA / "recipes.json").read_bytes())[key]:
        variables = [Variable(**variable) for variable in entry.pop("variables")]
        by_name[entry["name"]] = Recipe(**entry, variables=variables)
    return by_name


def find(name: str) -> Recipe:
    """The recipe of this name. Raises UsageError for an unknown one."""
    if name not in recipes():
        raise UsageError(unknown("recipe", name, recipes(), "list recipes"))
    return recipes()[name]
