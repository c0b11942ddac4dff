"""Look-ups in the tuned tables of AITER, vLLM and SGLang, as these libraries do them. Their files are only
read: nothing of a library is imported or run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes.toml import read_toml

RULES_TOML: Mapping[str, Any] = read_toml(Path(__file__).with_name("rules.toml"))
"""What rules.toml has, by section."""


def files_text(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


@dataclass(frozen=True)
class Entry:
    """What a table has for a shape."""

    file: str
    """The file's name in the library's package, such as `aiter/configs/...csv`."""
    line: int
    """The entry's line in the file, from 1; 0 if unknown."""
    key: str
    """By what the library finds it, as a text: for AITER's GEMM `gfx942,304,64,2112,7168`."""
    m: int
    """The number of rows that it is for."""
    kernel: str
    """What it makes the library run: the kernel's name or its configuration."""
    us: float | None = None
    """The microseconds that the tuner recorded; None where the table has no times."""


@dataclass(frozen=True)
class Found:
    """The result of a look-up."""

    table: str
    """The file that the library reads, or a few words for several files."""
    entry: Entry | None
    """The entry that the library uses; None after a miss."""
    fallback: str = ""
    """What runs after a miss; empty after a hit."""
    notes: tuple[str, ...] = ()
    """What is doubtful about a hit, such as a copied time, or why it is a miss."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a table, such as a file that cannot be read, or entries that no look-up can find."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{place}: {self.text}"
        # A cell of a table, which the text may quote, may hold a line break.
        return "".join(character if character.isprintable() else "?" for character in text)
