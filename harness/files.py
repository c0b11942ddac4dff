"""Writes files so that a kill loses nothing, locks them, and writes the output of commands."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.errors import HarnessError, UsageError, mistake
from shapes import toml

Parsed = TypeVar("Parsed")

JsonObject = dict[str, Any]  # as json.loads returns it


def finite(number: float) -> float | None:
    """The number; None where it is infinite or NaN, which JSON cannot hold."""
    return number if math.isfinite(number) else None


def whole_lines(data: bytes) -> int:
    """The number of bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1


def append(path: Path, text: str, finished: Callable[[bytes], int] = whole_lines) -> None:
    """Appends text, and waits until it is on the disk. Where that fails, the file is as it was before, and
    OSError is raised.

    finished: gives the number of bytes at the beginning of a file that are complete; bytes behind them, which
              an earlier kill left, are cut off first
    """
    unwritten = memoryview(text.encode())
    path.touch()
    with path.open("r+b", buffering=0) as file:
        end = finished(file.read())
        file.truncate(end)
        file.seek(end)
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


PID_BYTES = 20  # the length of the process's id in a lock file; earlier versions read and write nothing else


def take_lock(descriptor: int, *, wait: bool = False, about: str = "") -> tuple[str, str]:
    """Locks an open file for this process, writes the process's id and `about` into it, and returns two empty
    texts. If another process has the lock and `wait` is False, returns the id and the text that the other
    process wrote; the id is `?` if the file has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 4096, 0).decode(errors="replace")
        return text[:PID_BYTES].strip() or "?", text[PID_BYTES:]
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid():<{PID_BYTES}}{about}".encode(errors="replace"), 0)
    return "", ""


class JournalFull(HarnessError):
    """A record could not be written; the file is as it was before."""


@contextlib.contextmanager
def explained(what: str, note: str = "", error: type[HarnessError] = UsageError) -> Iterator[None]:
    """Raises an error of one line in place of an OSError: `what`, the system's reason, and the note."""
    try:
        yield
    except OSError as reason:
        raise error(f"{what}: {reason.strerror}{note}") from None


@dataclass
class JsonLines(Generic[Parsed]):
    """A file of JSON records, one in each line. A last line that a kill cut off is no record."""

    path: Path
    parse: Callable[[bytes], Parsed]
    """Makes a record of a line; raises ValueError, KeyError or TypeError where the line is none."""
    read: Callable[[Path], bytes] = Path.read_bytes
    finished: Callable[[bytes], int] = whole_lines  # see `append`

    def append(self, *lines: str) -> None:
        """Appends all of the lines or none; they are on the disk when this returns. Raises JournalFull."""
        with explained(f"cannot write to {self.path}", error=JournalFull):
            append(self.path, "".join(f"{line}\n" for line in lines), self.finished)

    def records(self) -> Iterator[Parsed]:
        """The records in their order. Raises UsageError, which names the line, where one cannot be read."""
        with explained(f"cannot read {self.path}"):
            data = self.read(self.path)
        for number, line in enumerate(data[: whole_lines(data)].splitlines(), 1):
            try:
                yield self.parse(line)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"cannot read {self.path}, line {number}: {mistake(error)}") from None


def read_toml(path: Path) -> JsonObject:
    """The content of a TOML file. Raises UsageError."""
    try:
        with explained(f"cannot read {path}"):
            return toml.read_toml(path)
    except ValueError as error:  # invalid TOML, or bytes that are no UTF-8
        raise UsageError(f"cannot read {path}: {error}") from None


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file, and makes its folder if there is none. A reader gets either the old or the new content
    as a whole. Where that fails, the file is as it was, and OSError is raised."""
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
    """Raises UsageError if one of the two files that `--json` and `--csv` name cannot be written."""
    if json_to == csv_to == "-":
        raise UsageError("give --json - or --csv -, not both: stdout holds one of them")
    for target in filter(None, (json_to, csv_to)):
        path = Path(target)
        if target == "-" or path.is_fifo():
            continue
        with explained(f"cannot write {target}"):
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()


def require_writable_folder(folder: Path, note: str = "") -> None:
    """Makes the folder. Raises UsageError, which ends with the note, if nothing can be written in it."""
    with explained(f"cannot write to {folder}", note):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def write(target: str, text: str, note: str = "") -> None:
    """Writes text to a file, or to stdout for `-`. Raises UsageError, which ends with the note."""
    if target == "-":
        sys.stdout.write(text)
        return
    with explained(f"cannot write {target}", note):
        Path(target).write_text(text, "utf-8")
