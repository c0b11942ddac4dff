"""Files that a kill or a full disk leaves whole: added to a piece at a time, or replaced at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def whole_lines(data: bytes) -> int:
    """How many bytes end with the last whole line."""
    return data.rfind(b"\n") + 1


def append(path: Path, text: str, finished: Callable[[bytes], int] = whole_lines) -> None:
    """Adds text in one write and waits until it is on the disk. Raises OSError, the file then as it was.

    finished: how many of the file's bytes stand; what an earlier kill left behind them is cut off first
    """
    rest = memoryview(text.encode())
    path.touch()
    with path.open("r+b", buffering=0) as file:
        end = finished(file.read())
        file.truncate(end)
        file.seek(end)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file, and its folder where there is none, so that whoever reads it has all of the old or of
    the new. Raises OSError, the file then as it was."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
