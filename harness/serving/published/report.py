"""Published configurations as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from harness.report.text import table
from harness.serving.published.documents import Configuration
from harness.serving.published.recipe import missing, sections


def list_as_text(configurations: Sequence[Configuration]) -> str:
    rows = [_row(configuration) for configuration in configurations]
    return table([list(row.values()) for row in rows], list(rows[0]))


def list_as_json(configurations: Sequence[Configuration]) -> str:
    return _json([_row(configuration) for configuration in configurations])


def as_json(configuration: Configuration, part: str | None) -> str:
    """part: only those of its sections"""
    return _json(
        _row(configuration)
        | {
            "where": configuration.where,
            "image": configuration.image,
            "environments": configuration.environments,
            "settings": [setting.model_dump() for setting in configuration.settings],
            "sections": [
                asdict(section) for section in sections(configuration) if part in (None, section.part)
            ],
            "missing": missing(configuration),
            "notes": configuration.notes,
        }
    )


def _row(configuration: Configuration) -> dict[str, object]:
    return {
        "recipe": configuration.name,
        "hardware": f"{configuration.gpus} x {configuration.hardware}",
        "engine": configuration.engine,
        "version": configuration.version or "not given",
        "parts": ", ".join(dict.fromkeys(section.part for section in sections(configuration))),
        "document": configuration.document,
    }


def _json(document: object) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
