"""Files: JSON lines appended, whole files replaced, so that a kill loses nothing; output of commands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, UsageError

JsonObject = dict[str, Any]  # as json.loads gives it: what is in it only its reader knows


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


class JournalFull(HarnessError):
    """What is finished could not be written; the journal is as it was before."""


def append_to_journal(
    path: Path, text: str, finished: Callable[[bytes], int] = whole_lines, stays: str = ""
) -> None:
    """As append; raises JournalFull. stays: ends its line"""
    try:
        append(path, text, finished)
    except OSError as error:
        raise JournalFull(f"cannot write to {path}: {error.strerror}{stays}") from None


def numbered_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a journal, from 1; a last one that a kill broke off is none."""
    yield from enumerate(data[: whole_lines(data)].splitlines(), 1)


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


def require_writable(json_to: str | None, csv_to: str | None) -> None:
    """Raises UsageError before anything is measured if either could not be written after."""
    if json_to == csv_to == "-":
        raise UsageError("give --json - or --csv -, not both: stdout holds one of them")
    for target in filter(None, (json_to, csv_to)):
        path = Path(target)
        if target == "-" or path.is_fifo():
            continue
        try:
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}") from None


def write(target: str, text: str, note: str = "") -> None:
    """To a file, or to stdout for `-`. Raises UsageError where that cannot be done; note: ends its line."""
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}{note}") from None
