"""Look-ups in the tuned tables of AITER, vLLM and SGLang, done as these libraries do them.

Only files are read: no library is imported, and none of its files is run or written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The GPU for which a table is asked.

    arch:   its architecture: gfx942, sm_90 ...
    units:  how many compute units (CUs, SMs) it has
    name:   what its driver calls it: `AMD Instinct MI300X`, `NVIDIA H200`
    triton: the version of Triton that the engine runs with; empty where it is not known
    """

    arch: str
    units: int
    name: str
    triton: str = ""


@dataclass(frozen=True)
class Entry:
    """What a table holds for a shape.

    file:   its name in the library's package, `aiter/configs/...csv`
    line:   the entry's line in the file, from 1; 0 where the line is not known
    key:    what the library looked for when it found this entry
    m:      the number of rows (tokens) that the entry was tuned for
    kernel: the kernel's name, or its configuration
    us:     the microseconds that the tuner recorded; None where the table has no times
    """

    file: str
    line: int
    key: str
    m: int
    kernel: str
    us: float | None = None


@dataclass(frozen=True)
class Found:
    """The result of one look-up.

    table:    the file that the library reads, or the files in a few words
    entry:    the entry that it takes; None after a miss
    fallback: what runs after a miss; empty after a hit
    notes:    what is odd about a hit (a copied time, a file for another Triton), or why there is no hit
    """

    table: str
    entry: Entry | None
    fallback: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What is wrong with a table: a file cannot be read, or no look-up can use some of its entries."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return printable(f"{place}: {self.text}")


def printable(text: str) -> str:
    """The text on one line, whatever a file has in it: `?` for what would break or colour the line."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
