"""A streaming JSON parser: it reads a file of any size in the memory of its largest single value.

It is used in place of ijson 3.6 (yajl2_c), with which a trace of 80 MB takes 9.5 s and not 2.4 s. Also yajl
refuses what profilers write: NaN, Infinity, a byte order mark, text that is not UTF-8, control characters,
large integers.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import archive
from harness.errors import UnreadableError

PIECE = 1 << 20  # characters that are read at once
HEAD = 4096  # bytes that tell a file's format
LARGEST_VALUE = 64 << 20  # characters; if a value is longer, the file is broken
NEAR_END = 24  # characters before the end of what was read; a value there may continue in the next piece
SPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder(strict=False)

Keys = tuple[str, ...]


class Truncated(UnreadableError):
    """The file ends in the middle of something: its writer was killed, or the disk was full."""


class JsonText:
    """A file's text, plain or gzip, unpacked and decoded as it is read. What was taken is dropped.

    `head` is its first bytes; `text` from `at` on is what was read and not yet taken. Raises UnreadableError,
    and Truncated for a file that breaks off, whose message ends with `if_cut`.
    """

    def __init__(self, path: Path, if_cut: str = "") -> None:
        self.path, self.if_cut = path, if_cut
        self.text = ""
        self.at = 0
        self._dropped = 0  # characters that were taken
        try:
            self._raw = archive.open_binary(path)
            packed = self._raw.peek(2)[:2] == b"\x1f\x8b"
            self._file: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
            self.head = bytes(self._file.peek(HEAD)[:HEAD])
        except EOFError:
            raise self.truncated() from None
        except (OSError, zlib.error) as error:
            raise UnreadableError(f"cannot read {path}: {getattr(error, 'strerror', '') or error}") from None
        encoding = "utf-16" if self.head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        self._decode = codecs.getincrementaldecoder(encoding)("replace").decode

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def read_on(self) -> bool:
        """Reads another piece; False at the end of the file."""
        if len(self.text) - self.at > LARGEST_VALUE:
            raise self.broken(f"a value of more than {LARGEST_VALUE >> 20} MiB")
        try:
            raw = self._file.read1(max(PIECE, len(self.text) - self.at))
        except EOFError:
            raise self.truncated() from None
        except (OSError, zlib.error) as error:
            raise UnreadableError(f"cannot read {self.path}: {error}") from None
        if not raw:
            return False
        self._dropped += self.at
        self.text = self.text[self.at :] + self._decode(raw)
        self.at = 0
        return True

    def peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.read_on():
                return ""

    def take(self, allowed: str) -> str:
        """Takes the next character that is no white space. Raises UnreadableError if it is none of these."""
        character = self.peek()
        if not character:
            raise self.truncated()
        if character not in allowed:
            raise self.broken(f"{' or '.join(map(repr, allowed))} is wanted, not {character!r}")
        self.at += 1
        return character

    def lines(self) -> Iterator[str]:
        """The remaining lines."""
        while True:
            end = self.text.find("\n", self.at)
            if end >= 0:
                start, self.at = self.at, end + 1
                yield self.text[start : self.at]
            elif not self.read_on():
                break
        if self.at < len(self.text):
            yield self.text[self.at :]

    def broken(self, why: str) -> UnreadableError:
        return UnreadableError(
            f"cannot read {self.path}: broken JSON at character {self._dropped + self.at}: {why}"
        )

    def truncated(self) -> Truncated:
        read = self._dropped + len(self.text)
        return Truncated(
            f"cannot read {self.path}: it ends in the middle, after {read} characters{self.if_cut}"
        )


def items(text: JsonText, enter: Callable[[Keys], bool]) -> Iterator[tuple[Keys, Any]]:
    """Path and value of each value of a JSON text, in the order of the file. A path has the keys from the
    root, with `*` for an array's items. A container for whose path `enter` returns False is given whole.
    Raises UnreadableError if the text is no JSON, Truncated if it ends early."""
    yield from _values(text, (), enter)
    if text.peek():
        raise text.broken("more after the end")


def _values(text: JsonText, path: Keys, enter: Callable[[Keys], bool]) -> Iterator[tuple[Keys, Any]]:
    first = text.peek()
    if first not in ("{", "[") or not enter(path):
        yield path, _whole(text)
        return
    end = "}" if first == "{" else "]"
    text.at += 1
    if text.peek() == end:
        text.at += 1
        return
    while True:
        key = "*"
        if first == "{":
            if text.peek() not in ('"', ""):
                raise text.broken("a key is wanted")
            key = _whole(text)
            text.take(":")
        yield from _values(text, (*path, key), enter)
        if text.take(f",{end}") == end:
            return


def _whole(text: JsonText) -> Any:
    """The value that begins here. Near the end of what was read so far it may continue, so more is read."""
    text.peek()
    while True:
        try:
            value, end = DECODER.raw_decode(text.text, text.at)
        except json.JSONDecodeError as error:
            unterminated = error.msg.startswith("Unterminated")
            may_continue = unterminated or error.pos > len(text.text) - NEAR_END
            if may_continue and text.read_on():
                continue
            text.at = error.pos
            # A file that was cut off ends in a string, or without the bracket that closes the whole text.
            is_cut_off = unterminated or not text.text[error.pos :].rstrip().endswith(("]", "}"))
            if may_continue and is_cut_off:
                raise text.truncated() from None
            raise text.broken(error.msg) from None
        except RecursionError:
            raise text.broken("nested too deep") from None
        # A number goes on if more digits follow; objects, lists and strings have an end of their own.
        may_continue = len(text.text) - end < NEAR_END and not isinstance(value, (dict, list, str))
        if may_continue and text.read_on():
            continue
        text.at = end
        return value
