"""Files: appended to and replaced so that a kill loses nothing; where a command's output goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.errors import HarnessError, UsageError, mistake

Kind = TypeVar("Kind")

JsonObject = dict[str, Any]  # as json.loads gives it: what is in it only its reader knows


def whole_lines(data: bytes) -> int:
    """How many bytes end with the last whole line."""
    return data.rfind(b"\n") + 1


def append(path: Path, text: str, finished: Callable[[bytes], int] = whole_lines, known: int = -1) -> int:
    """Adds text in one write and waits until it is on the disk; gives the file's length. Raises OSError, the
    file then as it was.

    finished: how many of the file's bytes stand; what an earlier kill left behind them is cut off first
    known:    the file's length after this process last wrote it: if it is that still, all of it stands
    """
    rest = memoryview(text.encode())
    path.touch()
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end != known:
            file.seek(0)
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
        return file.tell()


def take_lock(descriptor: int, *, wait: bool = False) -> str:
    """Locks an open file for this process, whose id it then holds; empty once that is done. Where another has
    it and this one is not to wait, the id of that process, `?` where the file does not hold it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return os.pread(descriptor, 20, 0).decode().strip() or "?"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return ""


class JournalFull(HarnessError):
    """A record could not be written; the file is as it was before."""


@dataclass
class JsonLines(Generic[Kind]):
    """A file of JSON records, one a line, to which each is added whole; what a kill cut off is none.

    parse:    a line as a record; raises ValueError, KeyError or TypeError for what is none
    read:     the file's bytes
    finished: how many of them stand (see `append`)
    length:   of the file, in bytes, after the last record was added
    """

    path: Path
    parse: Callable[[bytes], Kind]
    read: Callable[[Path], bytes] = Path.read_bytes
    finished: Callable[[bytes], int] = whole_lines
    length: int = -1

    def append(self, *lines: str) -> None:
        """On the disk when this returns, all of them or none. Raises JournalFull."""
        try:
            text = "".join(f"{line}\n" for line in lines)
            self.length = append(self.path, text, self.finished, self.length)
        except OSError as error:
            raise JournalFull(f"cannot write to {self.path}: {error.strerror}") from None

    def records(self) -> Iterator[Kind]:
        """In their order. Raises UsageError, which names the line, for what cannot be read."""
        try:
            data = self.read(self.path)
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}") from None
        for number, line in enumerate(data[: whole_lines(data)].splitlines(), 1):
            try:
                yield self.parse(line)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"cannot read {self.path}, line {number}: {mistake(error)}") from None


def read_toml(path: Path) -> JsonObject:
    """What a TOML file says. Raises UsageError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a mistake in the TOML, or bytes that are no UTF-8
        raise UsageError(f"cannot read {path}: {error}") from None


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


def require_writable_folder(folder: Path, note: str = "") -> None:
    """Makes it where there is none. Raises UsageError where nothing can be written in it; note: ends its
    line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}{note}") from None


def write(target: str, text: str, note: str = "") -> None:
    """To a file, or to stdout for `-`. Raises UsageError where that cannot be done; note: ends its line."""
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}{note}") from None
