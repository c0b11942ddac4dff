"""Output with the colours and the width of a terminal, or as plain text."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

WIDTH = 100
"""Characters of a line where the output is no terminal, so that stored text is the same everywhere."""
COMMAND = "  "  # begins a line that is a command
WIDEST = 120  # the most characters of a line in a terminal: longer lines are hard to follow


def show(renderable: RenderableType, file: TextIO) -> None:
    """Prints with the colours and the width of a terminal, or as plain text to another file. Lines of a str
    that begin with COMMAND are never broken, so that they can be copied."""
    if file.isatty():
        console = _console(file=file, color_system=None if os.environ.get("NO_COLOR") else "auto")
        console.width = min(console.width, WIDEST)
        console.print(_with_whole_commands(renderable), crop=False)
    else:
        encoding = file.encoding or "utf-8"
        # A character that the encoding cannot hold becomes `?`.
        print(plain_text(renderable).encode(encoding, "replace").decode(encoding), file=file)
    file.flush()


def line_width() -> int:
    """Characters of a line of stdout."""
    return min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else WIDTH


def wrapped(text: str, start: str, indent: str, width: int) -> str:
    """The text as lines that break between words; the first begins with `start`, the others with `indent`."""
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def plain_text(renderable: RenderableType, columns: int | None = None) -> str:
    """The text without colours, as a terminal of so many columns shows it, or as it stands in a file."""
    file, is_terminal = io.StringIO(), columns is not None
    console = _console(file=file, color_system=None, force_terminal=is_terminal, width=columns or WIDTH)
    console.print(_with_whole_commands(renderable), crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _with_whole_commands(renderable: RenderableType) -> RenderableType:
    """A str as lines of which commands are never broken; anything else as it is."""
    from rich.console import Group
    from rich.text import Text

    if not isinstance(renderable, str):
        return renderable
    lines = renderable.split("\n")
    return Group(*(whole_line(line) if line.startswith(COMMAND) else Text(line) for line in lines))


def whole_line(text: str) -> Text:
    """A line that is never broken."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ignore")


def _console(**settings: Any) -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, legacy_windows=False, **settings)
