"""Environment flags and recipes of the catalogue as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import kernels
from harness.catalogue.flags import READ, Flag
from harness.catalogue.recipes import Recipe
from harness.report.terminal import WIDTH

COLUMNS = {"name": 46, "default": 10, "read": 10, "platforms": 14, "ops": 20}
INDENT = "    "


def flags_text(flags: Sequence[Flag]) -> str:
    """By library: a line of facts for each flag, and below it what it does and what its values mean."""
    lines = [_line({name: name for name in COLUMNS} | {"name": "flag"})]
    for library, group in groupby(flags, lambda flag: flag.library):
        lines += ["", library]
        for flag in group:
            lines += [_line(_cells(flag)), *_wrapped(_flag_paragraphs(flag))]
    read = [f"read {when}: {text}" for when, text in READ.items() if any(f.read == when for f in flags)]
    return "\n".join([*lines, "", *read, "--json has what each entry was read in"])


def _line(cells: Mapping[str, str]) -> str:
    return "".join(f"{cells[name]:<{width}}" for name, width in COLUMNS.items()).rstrip()


def _cells(flag: Flag) -> dict[str, str]:
    return {
        "name": flag.name,
        "default": _short("default", flag.default),
        "read": flag.read,
        "platforms": " ".join(flag.platforms),
        "ops": _short("ops", _ops(flag)),
    }


def _ops(flag: Flag) -> str:
    return "all" if set(flag.ops) == set(kernels.OPS) else ", ".join(flag.ops) or "none"


def _short(column: str, text: str) -> str:
    """What has room in a column; else it stands below, in a paragraph."""
    return text if len(text) < COLUMNS[column] else "..."


def _flag_paragraphs(flag: Flag) -> Iterator[str]:
    only = [*flag.archs, *filter(None, [flag.launch and f"{flag.launch} launches"])]
    yield " ".join([flag.effect, *([f"({', '.join(only)} only)"] if only else [])])
    for column, text in (("default", flag.default), ("ops", _ops(flag))):
        if _short(column, text) != text:
            yield f"{column}: {text}"
    values = "; ".join(f"{value}: {meaning}" for value, meaning in flag.values.items())
    if values or flag.takes:
        yield "; or ".join(filter(None, [values, flag.takes]))
    if flag.without:
        yield f"no effect on a kernel on one device: {flag.without}"
    for value, by_op in flag.chooses.items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
    if flag.versions:
        yield f"versions: {flag.versions}"
    if flag.unconfirmed:
        yield f"not confirmed: {flag.unconfirmed}"


def recipes_text(recipes: Sequence[Recipe]) -> str:
    return "\n\n".join("\n".join(_recipe_lines(recipe)) for recipe in recipes)


def _recipe_lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.name}  ({recipe.platform} {recipe.arch})"
    options = f"and, not applied: {' '.join(recipe.options)}" if recipe.options else ""
    about = [f"{recipe.document}: {recipe.where}", recipe.engine, recipe.note, options]
    yield from _wrapped(filter(None, about))
    for variable in recipe.variables:
        setting = variable.name if variable.value is None else f"{variable.name}={variable.value}"
        yield f"{INDENT}{setting}{'  # ' + variable.note if variable.note else ''}"


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    """Each indented, broken into lines."""
    for paragraph in paragraphs:
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
