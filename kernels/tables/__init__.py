"""Tuned tables of AITER, vLLM and SGLang, looked into as the libraries do it.

Only files are read: nothing of a library is imported, and no file of it is run or written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The GPU that a table is asked for.

    arch:   gfx942, sm_90 ...
    units:  its compute units (CUs, SMs)
    name:   as its driver says it: `AMD Instinct MI300X`, `NVIDIA H200`
    triton: the version of Triton beside the engine; empty where it is not known
    """

    arch: str
    units: int
    name: str
    triton: str = ""


@dataclass(frozen=True)
class Entry:
    """What a table holds for a shape.

    file:   within the library's package, `aiter/configs/...csv`
    line:   of the file, from 1; 0 where the format has no lines to name
    key:    what the library looked for when it found this
    m:      rows (tokens) that the entry was tuned for
    kernel: the kernel's name, or its configuration
    us:     microseconds that the tuner recorded; None where the table has no times
    """

    file: str
    line: int
    key: str
    m: int
    kernel: str
    us: float | None = None


@dataclass(frozen=True)
class Found:
    """One look-up.

    table:    the files that are asked, in a few words or by their name
    entry:    what they hold; None: a miss
    fallback: what runs instead after a miss; empty after a hit
    notes:    what is odd about the hit: a copied time, a file for another Triton
    """

    table: str
    entry: Entry | None
    fallback: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Entries of a table that cannot do what they are there for, or that cannot be read."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return printable(f"{place}: {self.text}")


def printable(text: str) -> str:
    """The text on one line, whatever a file has in it: `?` for what would break or colour the line."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
