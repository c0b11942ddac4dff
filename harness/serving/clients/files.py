"""Reads files that come from outside. If a file is not what it seems to be, the error is one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import archive
from harness.errors import UnreadableError
from harness.serving.clients.fields import NUMBER, Fields

LARGEST_FILE = 512 * 2**20  # bytes; traces are read by harness/serving/trace, in bounded memory
DEEPEST = 64  # levels of a JSON value; clients write three
DELIMITERS = ",;\t"  # of cells; spreadsheets of some languages write the semicolon
DEEPEST_HEADER = 3  # lines of a CSV's column names
# The first bytes of files that are no text, and what they are.
MAGIC = {
    b"PK\x03\x04": "a ZIP archive or a spreadsheet", b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ": "packed with xz", b"BZh": "packed with bzip2", b"SQLite format 3": "a SQLite database",
    b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"\x80\x04\x95": "a pickle",
}  # fmt: skip
# The escape of half a character beyond 16 bits, as `\ud83d`.
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Document:
    """A file as read."""

    path: Path
    kind: Literal["json", "jsonl", "csv", "text"]
    text: str
    content: Any = None
    """Of `json` one value; of `jsonl` a list of (line number, object); of `csv` a list of (line number, row
    by column name), with the names in `header`; of `text` nothing."""
    header: tuple[str, ...] = ()
    broken: str = ""  # why it is not what its name or its beginning says; its kind is `text` then

    def rows(self) -> list[Any]:
        """The values of a JSON or JSONL file that may be rows; none of other files."""
        if self.kind == "json":
            return self.content if isinstance(self.content, list) else [self.content]
        return [row for _, row in self.content] if self.kind == "jsonl" else []

    def candidates(self) -> list[Mapping[str, Any]]:
        """The objects (of a CSV one with its columns) by whose keys a client is recognised; or none."""
        if self.kind == "csv":
            return [dict.fromkeys(self.header)]
        rows = self.rows()
        return rows if all(isinstance(row, Mapping) for row in rows) else []


def read(path: Path) -> Document:
    """Reads a file. Raises UnreadableError if it is missing, too large, or no text."""
    text = _text(path)
    if not text.strip():
        raise UnreadableError(f"cannot read {path}: it is empty")
    start, name = text.lstrip()[0], path.name.lower().removesuffix(".gz")
    try:
        if start in "{[":  # lines of a log may begin like this, too
            return _json(path, text)
        if name.endswith((".csv", ".tsv")):
            return _csv(path, text)
    except UnreadableError as error:
        # By its first line a table that is no proper CSV may be known to be another tool's.
        header = tuple(cell.strip() for cell in text.lstrip().split("\n", 1)[0].split(","))
        return Document(path, "text", text, header=header, broken=str(error))
    if name.endswith((".json", ".jsonl")):
        why = f"cannot read {path}: it is not JSON (it starts with {start!r})"
        return Document(path, "text", text, broken=why)
    return Document(path, "text", text)


def _text(path: Path) -> str:
    try:
        raw = _bytes(path)
        for magic, kind in MAGIC.items():
            if raw.startswith(magic):
                raise UnreadableError(f"cannot read {path}: it is {kind}: unpack or export it first")
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        if "\0" in text:
            raise ValueError(f"character {text.index(chr(0))} is NUL: no text, or not saved as UTF-8")
    except archive.BrokenArchive as error:
        raise UnreadableError(str(error)) from None
    except IsADirectoryError:
        raise UnreadableError(f"cannot read {path}: it is a directory; name the files in it") from None
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is no {error.encoding}: no text, or not saved as UTF-8"
        raise UnreadableError(f"cannot read {path}: {why}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UnreadableError(f"cannot read {path}: {getattr(error, 'strerror', '') or error}") from None
    return text


def _bytes(path: Path) -> bytes:
    """The whole file, unpacked, if it is no larger than a client writes."""
    with archive.open_binary(path) as file:
        raw = file.read(LARGEST_FILE + 1)
    if raw[:2] == b"\x1f\x8b" and len(raw) <= LARGEST_FILE:
        with gzip.open(io.BytesIO(raw)) as packed:
            raw = packed.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        why = f"over {LARGEST_FILE >> 20} MiB is more than a client writes; a trace: serving trace FILE"
        raise UnreadableError(f"cannot read {path}: {why}")
    return raw


def _json(path: Path, text: str) -> Document:
    """Reads one JSON value, or else JSONL. Raises UnreadableError."""
    try:
        return Document(path, "json", text, _parsed(text))
    except ValueError as error:
        broken = f"cannot read {path}: broken JSON: {error}"
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    has_object_in_first_line = lines[0][1].rstrip().endswith("}")
    if len(lines) < 2 or not has_object_in_first_line:
        raise UnreadableError(broken)
    rows = []
    for number, line in lines:
        try:
            rows.append((number, _parsed(line)))
        except ValueError as error:
            raise UnreadableError(f"cannot read {path}, line {number}: broken JSON: {error}") from None
    return Document(path, "jsonl", text, rows)


def _parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for a key that is there twice and deep nesting."""

    def mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise ValueError(f"key {key!r} stands twice in one object")
            mapping[key] = value
        return mapping

    try:
        value = json.loads(text, object_pairs_hook=mapping_of)
        if HALF_CHARACTER.search(text):  # no encoding can express it
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        if _depth(value) <= DEEPEST:
            return value
    except RecursionError:
        pass
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def _depth(value: Any) -> int:
    """Levels of objects and lists in a value; 0 for a text or a number."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


def _csv(path: Path, text: str) -> Document:
    first = text.lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(DELIMITERS, key=first.count)
    try:
        reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UnreadableError(f"cannot read {path}: broken CSV: {error}") from None
    header, lines = _header([row for _, row in rows[:DEEPEST_HEADER]])
    if not header:
        raise UnreadableError(f"cannot read {path}: a column name stands twice in its first line")
    body = []
    for number, row in rows[lines:]:
        if len(row) != len(header):
            why = f"{len(row)} cells under {len(header)} columns; is the file cut off, or a comma unquoted?"
            raise UnreadableError(f"cannot read {path}, line {number}: {why}")
        cells = [(name, cell.strip()) for name, cell in zip(header, row, strict=True)]
        body.append((number, {name: cell for name, cell in cells if name or cell}))
    return Document(path, "csv", text, body, header)


def _header(rows: list[list[str]]) -> tuple[tuple[str, ...], int]:
    """The names of the columns, and the number of lines that they take: the fewest in which the names are
    unique, joined by ` / ` (guidellm writes group, name and statistic in three lines). ((), 0) if they never
    are."""
    names = [""] * (len(rows[0]) if rows else 0)
    for lines, row in enumerate(rows, 1):
        has_number = any(NUMBER.fullmatch(cell) for cell in row if cell)
        if len(row) != len(names) or (lines > 1 and has_number):
            break
        cells = [cell.strip() for cell in row]
        names = [" / ".join(filter(None, pair)) for pair in zip(names, cells, strict=True)]
        not_empty = [name for name in names if name]
        if len(set(not_empty)) == len(not_empty):
            return tuple(names), lines
    return (), 0


def objects(document: Document) -> list[Fields]:
    """Each object of a JSON or JSONL file or row of a CSV. Raises UnreadableError if one is no object."""
    rows = list(enumerate(document.rows())) if document.kind == "json" else document.content
    fields = []
    for number, row in rows:
        where = f"{document.path}:{number}"
        if document.kind == "json":
            where = f"{document.path}[{number}]" if len(rows) > 1 else str(document.path)
        if not isinstance(row, Mapping):
            raise UnreadableError(f"cannot read {where}: an object is wanted, not {type(row).__name__}")
        fields.append(Fields(where, row, as_text=document.kind == "csv"))
    return fields
