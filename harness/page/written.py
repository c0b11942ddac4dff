"""Sections of what commands wrote with --json, each by what is in it."""

from __future__ import annotations

import json
from pathlib import Path

from harness import archive
from harness.errors import UsageError, one_line
from harness.page.compiled import compiled_section
from harness.page.document import PageSection
from harness.page.serving.forecast import forecast_section
from harness.page.serving.replay import replay_section, replays


def written_section(path: Path) -> PageSection:
    """Of `serving predict`, `what-if`, `replay` or `compile`. Raises UsageError."""
    try:
        document = json.loads(archive.read_bytes(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    if isinstance(document, dict) and "compiles" in document:
        return compiled_section(document, path.name)
    if isinstance(document, dict) and "workloads" in document:
        return forecast_section(document, path.name)
    if not document:
        raise UsageError(f"{path} is empty")
    return replay_section(replays(document, str(path)), path.name)
