"""Commands that a user names for an engine or a client."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from harness.errors import NothingRan, UsageError


def words_of(command: str, what: str) -> tuple[str, ...]:
    """The command's words, its program with the whole path: it is run in another folder. A program that is
    filled in later ({python}) is not looked for.

    what: `engine` or `client`. Raises UsageError for a quote that does not end, NothingRan where there is no
    such program: before anything was started that has to wait for it.
    """
    try:
        program, *rest = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{what} {command!r} cannot be read: {error}") from None
    if program.startswith("{"):
        return program, *rest
    found = shutil.which(program)
    if found is None:
        raise NothingRan(f"{what} {program} is missing here: install it, or name another with --{what}")
    return str(Path(found).absolute()), *rest
