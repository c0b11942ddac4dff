"""Replays as they are kept: by `serving replay --json`, in its folder, in a stage of an experiment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import archive
from harness.errors import UsageError, mistake, one_line
from harness.serving.replay.schema import Replay


def read_replays(path: Path) -> list[Replay]:
    """Those of a file, or of all JSON files of a folder. Raises UsageError."""
    files = archive.below(path, "*.json") if archive.is_folder(path) else [path]
    return [replay for file in files for replay in _of_file(file)]


def _of_file(path: Path) -> Iterator[Replay]:
    try:
        document = json.loads(archive.read_bytes(path))
        for record in _records(document):
            yield Replay.model_validate(record)
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: no replay: {mistake(error)}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None


def _records(document: Any) -> list[Any]:
    if isinstance(document, dict) and "replays" in document:
        document = document["replays"]
    return document if isinstance(document, list) else [document]
