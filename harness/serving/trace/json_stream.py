"""Streaming JSON parser: a file of any size is read in the memory of its largest single value.

Why not ijson 3.6 (yajl2_c): with the three paths that a torch trace needs in one pass, a trace of 80 MB
takes 9.5 s instead of 2.4 s; and yajl refuses what profilers write (NaN, Infinity, a byte order mark, text
that is no UTF-8, control characters in names, integers beyond 64 bits).
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
from harness.serving.clients.files import UnreadableError

PIECE = 1 << 20  # characters read at once
HEAD = 4096  # bytes by which a file's format is told
LARGEST_VALUE = 64 << 20  # characters of one value, beyond which a file is taken for broken
SPACE = re.compile(r"[ \t\r\n]*")
CLOSING = 24  # characters from where the text read so far ends, in which a value may be cut in two
NUMBER = re.compile(r"[-+.eE\d]*")
NOT_FINITE = re.compile(r"[-+]?(inf(inity)?|nan(\(\w*\))?)(?=[\s,\]}])", re.IGNORECASE)
"""As C++ prints such numbers, bare: Kineto of 2021 in a bandwidth."""
WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")

Keys = tuple[str, ...]


class Truncated(UnreadableError):
    """The file ends in the middle of something: its writer was killed, or the disk was full."""


class JsonText:
    """A file's text, unpacked and decoded as it is read; what was read is forgotten.

    `head` is its first bytes; `text` from `at` on is what is there and not yet taken; `more()` makes it
    longer. Raises UnreadableError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.at = 0
        self._before = 0  # characters taken and forgotten
        try:
            self._raw = archive.open_binary(path)
            packed = self._raw.peek(2)[:2] == b"\x1f\x8b"
            self._file: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
            self.head = self._head()
        except (OSError, zlib.error) as error:
            raise UnreadableError(f"cannot read {path}: {getattr(error, 'strerror', '') or error}") from None
        encoding = "utf-16" if self.head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        self._decode = codecs.getincrementaldecoder(encoding)("replace").decode

    def _head(self) -> bytes:
        try:
            return bytes(self._file.peek(HEAD)[:HEAD])
        except EOFError:  # of a gzip file that breaks off; more() says so
            return b""

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def more(self) -> bool:
        """Reads on; False at the end of the file."""
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
        self._before += self.at
        self.text = self.text[self.at :] + self._decode(raw)
        self.at = 0
        return True

    def peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def put(self, start: int, end: int, text: str) -> None:
        """Another text in the place of one that was read."""
        self.text = self.text[:start] + text + self.text[end:]
        self._before += end - start - len(text)

    def lines(self) -> Iterator[str]:
        """The lines from here to the end."""
        while True:
            end = self.text.find("\n", self.at)
            if end < 0:
                if self.more():
                    continue
                if self.at < len(self.text):
                    yield self.text[self.at :]
                return
            start, self.at = self.at, end + 1
            yield self.text[start : self.at]

    def broken(self, why: str) -> UnreadableError:
        return UnreadableError(
            f"cannot read {self.path}: broken JSON at character {self._before + self.at}: {why}"
        )

    def truncated(self) -> Truncated:
        return Truncated(
            f"cannot read {self.path}: it ends in the middle, after {self._before + len(self.text)} "
            "characters; what its profiler wrote last is missing, and shares would be wrong "
            "(--partial takes what there is)"
        )


def items(text: JsonText, enter: Callable[[Keys], bool]) -> Iterator[tuple[Keys, Any]]:
    """(path, value) of every value of a JSON text, in the order of the file.

    A path has the keys from the root, `*` for an array's items. enter: whether a container of that path is
    gone into; one that is not comes whole. Raises UnreadableError where the text is no JSON, Truncated where
    it ends early.
    """
    yield from _value(text, (), enter, json.JSONDecoder(strict=False))
    if text.peek():
        raise text.broken("more after the end")


def _value(
    text: JsonText, path: Keys, enter: Callable[[Keys], bool], decoder: json.JSONDecoder
) -> Iterator[tuple[Keys, Any]]:
    first = text.peek()
    if first not in ("{", "[") or not enter(path):
        yield path, _whole(text, decoder)
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
            key = _whole(text, decoder)
            _next(text, ":")
        yield from _value(text, (*path, key), enter, decoder)
        if _next(text, f",{end}") == end:
            return


def _next(text: JsonText, allowed: str) -> str:
    character = text.peek()
    if not character:
        raise text.truncated()
    if character not in allowed:
        raise text.broken(f"{' or '.join(map(repr, allowed))} is wanted, not {character!r}")
    text.at += 1
    return character


def _whole(text: JsonText, decoder: json.JSONDecoder) -> Any:
    """The value that begins here. Near the end of what is read so far it may go on: then more is read."""
    text.peek()
    while True:
        try:
            value, end = decoder.raw_decode(text.text, text.at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos > len(text.text) - CLOSING
            if cut and text.more():
                continue
            if number := NOT_FINITE.match(text.text, error.pos):
                text.put(*number.span(), "NaN")
                continue
            text.at = error.pos
            raise (text.truncated() if cut and _ends_early(error) else text.broken(error.msg)) from None
        except RecursionError:
            raise text.broken("nested too deep") from None
        cut = len(text.text) - end < CLOSING and not isinstance(value, (dict, list, str))
        if cut and text.more():
            continue
        text.at = end
        return value


def _ends_early(error: json.JSONDecodeError) -> bool:
    """Whether more text might have made sense of it."""
    rest = error.doc[error.pos :].strip()
    in_text = error.msg.startswith("Unterminated") or (error.msg.startswith("Invalid") and '"' not in rest)
    return in_text or bool(NUMBER.fullmatch(rest)) or any(word.startswith(rest) for word in WORDS)


def opened(path: Path) -> JsonText:
    """The text of a file, plain or gzip. Raises UnreadableError where there is none."""
    if path.is_dir():
        raise UnreadableError(f"cannot read {path}: it is a folder")
    text = JsonText(path)
    if not text.peek():
        text.close()
        raise UnreadableError(f"cannot read {path}: it is empty")
    return text
