"""Where a command's output goes."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.errors import UsageError


def write(target: str, text: str, note: str = "") -> None:
    """To a file, or to stdout for `-`. Raises UsageError where that cannot be done; note: ends its line."""
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}{note}") from None
