"""Control-C while a command measures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import click

from harness.errors import STOPPED


@contextlib.contextmanager
def interruptible(what_next: str) -> Iterator[None]:
    """Control-C ends the command with one line, which says what is kept and how to go on, if anything is."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("; ".join(filter(None, ["stopped", what_next])), err=True)
        sys.exit(STOPPED)


RECORDED = "finished cases are recorded, --resume RUN measures the rest"
