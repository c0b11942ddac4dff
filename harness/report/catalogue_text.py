"""Flags and recipes as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import kernels
from harness.catalogue.flags import READ, Flag, catalogue
from harness.catalogue.recipes import recipes
from kernels.platform import Platform

FLAGS_WIDTH = 120
COLUMNS = {"name": 46, "default": 10, "read": 10, "platforms": 14, "ops": 40}
INDENT = "    "


def flag_rows(ops: Sequence[str], here: Platform, suite: str | None) -> list[dict[str, Any]]:
    """All there is of each flag; of a platform that is asked about, and of an op, only its own."""
    return [
        asdict(flag) | {"ops": flag.ops}
        for flag in catalogue().values()
        if (here.here or _of(flag, here)) and (set(ops) == set(kernels.OPS) or set(ops) & set(flag.ops))
    ]


def _of(flag: Flag, platform: Platform) -> bool:
    return platform.kind in flag.platforms and (not flag.archs or platform.arch in flag.archs)


def flags_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """By library: a line of facts for each flag, and below it what it does and what its values mean."""
    lines = [_line({name: name for name in COLUMNS} | {"name": "flag"})]
    for library, group in groupby(rows, lambda row: row["library"]):
        lines += ["", library]
        for row in group:
            lines += [_line(_cells(row)), *_below(row)]
    read = [f"read {word}: {words}" for word, words in READ.items() if any(r["read"] == word for r in rows)]
    return "\n".join([*lines, "", *read, "--json has what each entry was read in"])


def _line(cells: Mapping[str, str]) -> str:
    return "".join(f"{cells[name]:<{width}}" for name, width in COLUMNS.items()).rstrip()


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    ops = row["ops"]
    return {
        "name": row["name"],
        "default": row["default"] if _short(row) else "...",
        "read": row["read"],
        "platforms": " ".join(row["platforms"]),
        "ops": "all" if set(ops) == set(kernels.OPS) else ", ".join(ops) or "none",
    }


def _short(row: Mapping[str, Any]) -> bool:
    return len(row["default"]) < COLUMNS["default"]


def _below(row: Mapping[str, Any]) -> Iterator[str]:
    for paragraph in _paragraphs(row):
        yield from textwrap.wrap(
            paragraph, FLAGS_WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )


def _paragraphs(row: Mapping[str, Any]) -> Iterator[str]:
    only = [*row["archs"], *filter(None, [row["launch"] and f"{row['launch']} launches"])]
    yield " ".join([row["effect"], *([f"({', '.join(only)} only)"] if only else [])])
    if not _short(row):
        yield f"default: {row['default']}"
    values = "; ".join(f"{value}: {words}" for value, words in row["values"].items())
    if values or row["takes"]:
        yield "; or ".join(filter(None, [values, row["takes"]]))
    if row["without"]:
        yield f"no effect on a kernel on one device: {row['without']}"
    for value, by_op in row["chooses"].items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
    if row["versions"]:
        yield f"versions: {row['versions']}"
    if row["unconfirmed"]:
        yield f"not confirmed: {row['unconfirmed']}"


def recipe_rows(ops: Sequence[str], here: Platform, suite: str | None) -> list[dict[str, Any]]:
    """All of them; of a platform that is asked about, its own."""
    return [asdict(recipe) for recipe in recipes().values() if here.here or recipe.platform == here.kind]


def recipes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join("\n".join(_recipe_lines(row)) for row in rows)


def _recipe_lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row['name']}  ({row['platform']} {row['arch']})"
    options = f"and, not applied: {' '.join(row['options'])}" if row["options"] else ""
    about = [f"{row['document']}: {row['where']}", row["engine"], row["note"], options]
    for paragraph in filter(None, about):
        yield from textwrap.wrap(
            paragraph, FLAGS_WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
    for variable in row["variables"]:
        setting = variable["name"] if variable["value"] is None else f"{variable['name']}={variable['value']}"
        yield f"{INDENT}{setting}{'  # ' + variable['note'] if variable['note'] else ''}"
