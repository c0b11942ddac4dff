"""Terminal output: colour and width of a file, and the same as plain text."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 100
"""Of what is no terminal: text that is kept reads the same wherever it was made."""
WIDEST = 120
"""Of a terminal: longer lines are hard to follow."""


def show(what: RenderableType, file: TextIO) -> None:
    """Prints with the colours and in the width of a terminal; to anything else as plain text."""
    if file.isatty():
        _console(file, None, "auto").print(what, crop=False)
    else:
        encoding = file.encoding or "utf-8"
        print(plain(what).encode(encoding, "replace").decode(encoding), file=file)
    file.flush()


def plain(what: RenderableType, columns: int | None = None) -> str:
    """Without colour, and without blanks at the end of lines; as a terminal of so many columns shows it."""
    file = io.StringIO()
    console = _console(file, columns or WIDTH, None, terminal=columns is not None)
    console.print(what, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _console(
    file: TextIO, columns: int | None, colour: Literal["auto"] | None, terminal: bool | None = None
) -> Console:
    from rich.console import Console

    console = Console(
        file=file,
        width=columns,
        color_system=None if os.environ.get("NO_COLOR") else colour,
        force_terminal=terminal,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.width = min(console.width, WIDEST) if columns is None else columns
    return console
