"""`python -m harness list recipes`: the environments of the documents, as rows and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.flag_listing import INDENT, WIDTH
from harness.recipes import recipes
from kernels.platform import Platform


def rows(ops: Sequence[str], here: Platform, suite: str | None) -> list[dict[str, Any]]:
    """All of them; of a platform that is asked about, its own."""
    return [asdict(recipe) for recipe in recipes().values() if here.here or recipe.platform == here.kind]


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join("\n".join(_lines(row)) for row in rows)


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row['name']}  ({row['platform']} {row['arch']})"
    options = f"and, not applied: {' '.join(row['options'])}" if row["options"] else ""
    about = [f"{row['document']}: {row['where']}", row["engine"], row["note"], options]
    for paragraph in filter(None, about):
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
    for variable in row["variables"]:
        setting = variable["name"] if variable["value"] is None else f"{variable['name']}={variable['value']}"
        yield f"{INDENT}{setting}{'  # ' + variable['note'] if variable['note'] else ''}"
