"""Finds result blocks in console output as people paste it.

Lines come with log prefixes, quotes, colours and progress bars. A text may have several blocks; they may be
broken off, or glued together. Only what surely belongs to a block is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.serving.clients.format import formats

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
PREFIX = re.compile(
    r"""(?: \s+
        | [>|*$`'"]+ | \#+(?=\s)
        | \[[^\]]*\]:? | \([^)]*\)(?=\s) | <[^>]*>:?
        | \d{4}-\d\d-\d\d[T]? | \d\d[-/]\d\d(?=\s)
        | \d\d?:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?
        | (?:DEBUG|INFO|WARNING|WARN|ERROR|NOTICE)\b:?
        | [A-Z][a-z]{2}\s+\d\d?\s\d\d:\d\d:\d\d\s\S+\s | [\w.-]+\[\d+\]: | [\w./]+\.py:\d+\]?
        | [-:]+(?=\s)
        )+""",
    re.VERBOSE,
)
HEADER = re.compile(r"(?<!=)(={3,})\s*(Serving|Offline Throughput) Benchmark Result\s*={3,}", re.IGNORECASE)
GLUED = 40  # `=` before a header's words: it has 12, or 62 where a closing line of 50 has lost its newline
CLOSING = re.compile(r"={10,}")
SEPARATOR = re.compile(r"-{3,}[^:]*-{3,}|-{10,}")
LINE = re.compile(r"(?P<label>[A-Za-z][^:]*?)\s*(?:\((?P<unit>[^()]*)\))?\s*:\s*(?P<value>\S.*)?")
REMARK = re.compile(r"\s+(?:\(|#|←|<-|//|\\$).*")  # what people write after a number
LONGEST = 300  # no line of a block is longer
AROUND = " \t|*`'\"\\,"
UNITS = ("ms", "s", "req/s", "tok/s", "RPS")


@dataclass
class Block:
    """One result block."""

    line: int  # of its header, from 1
    offline: bool  # whether it is of an engine without a server
    before: list[str]  # the lines above its header, from the end of the block before it on
    values: dict[str, str] = field(default_factory=dict)  # by label in lower case, with its unit: `a b (ms)`
    conflicts: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Labels that are there twice with different values: two blocks in one, or a broken one."""
    closed: bool = False  # whether its last line is there
    cut: str = ""  # the label whose line ends the text without a newline, so that its value may be cut


def plain(text: str) -> list[str]:
    """The lines without colours. Those of a progress bar are lines, too."""
    text = ANSI.sub("", text).replace("\u00a0", " ").replace("\ufeff", "")
    return re.split(r"\r\n|\n|\r", text)


def unprefixed(line: str) -> str:
    """The line without the prefixes of loggers and quotes."""
    match = PREFIX.match(line)
    return line[match.end() :].rstrip() if match else line.rstrip()


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a text, in its order."""
    lines = plain(text)
    headers = {number: match for number, line in enumerate(lines) if (match := HEADER.search(line))}
    next_headers = [*headers, len(lines)][1:]
    is_last_line_whole = not lines[-1][-1:].strip()  # if the text ends with a newline or a blank
    after_block = 0  # the first line after the block before
    for (header, match), next_header in zip(headers.items(), next_headers, strict=True):
        block = Block(header + 1, match[2].lower() != "serving", lines[after_block:header])
        if next_header in headers and len(headers[next_header][1]) >= GLUED:
            block.closed = True  # its closing line is the beginning of the next header
        prefix = lines[header][: match.start()]  # of each line, also where PREFIX does not match it
        body = [line.removeprefix(prefix) for line in lines[header + 1 : next_header]]
        after_block = header + 1 + _fill(block, body)
        if after_block == len(lines) and not is_last_line_whole and not block.closed:
            block.cut = next(reversed(block.values), "")
        yield block


def _fill(block: Block, body: list[str]) -> int:
    """Reads the block's lines, and returns how many of the body's lines it takes. A closed block may have
    other lines among its own (a server's log); any other ends at the first line that is not of a block."""
    end = next((i for i, line in enumerate(body) if CLOSING.fullmatch(unprefixed(line).strip(AROUND))), None)
    block.closed = block.closed or end is not None
    for number, line in enumerate(body[:end]):
        is_of_block = _take(block, unprefixed(line))
        if not is_of_block and not block.closed:
            return number
    return len(body) if end is None else end + 1


def _take(block: Block, line: str) -> bool:
    """Puts the line's value into the block. False if the line does not belong to a block."""
    line = line.strip(AROUND)
    if len(line) > LONGEST:
        return False
    if not line or SEPARATOR.fullmatch(line):
        return True
    match = LINE.fullmatch(line)
    if not match:
        return False
    label = " ".join(match["label"].lower().split()).strip(AROUND)
    key = f"{label} ({' '.join(match['unit'].split())})" if match["unit"] else label
    value = REMARK.sub("", (match["value"] or "").strip(AROUND)).strip(AROUND)
    is_number = value[:1].isdigit() or value[:1] in ("+", "-", ".") or value in ("nan", "inf")
    if not value or not (is_number or label in _labels() or match["unit"] in UNITS):
        return False
    if key in block.values and block.values[key] != value:
        block.conflicts[key] = (block.values[key], value)
    block.values.setdefault(key, value)
    return True


@functools.cache
def _labels() -> set[str]:
    """Labels whose lines belong to a block whatever the value is: one that is no number is then reported."""
    table = formats()["console"]
    numbers = {*table.load.values(), *table.totals.values(), *table.metrics}
    return {"backend", *table.more["limit"], *table.more["rate"], *numbers}
