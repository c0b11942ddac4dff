"""Launching of engine and client processes: free ports, command lines, termination."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from harness.errors import NothingRan, UsageError


def free_port(wanted: int | None = None) -> int:
    """`wanted` if it is free, any free one if none is wanted. Raises UsageError where `wanted` is taken.

    Nothing holds it until the server does; whoever comes in between is found out by the server's name.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise UsageError(
                f"port {wanted} of 127.0.0.1 is taken ({error.strerror}): name another with --port, or none"
            ) from None
        return probe.getsockname()[1]


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
    path = shutil.which(program)
    if path is None:
        raise NothingRan(f"{what} {program} is missing here: install it, or name another with --{what}")
    return str(Path(path).absolute()), *rest


@contextlib.contextmanager
def termination_is_an_interrupt() -> Iterator[None]:
    """SIGTERM ends servers as control-C does. Of kill -9 their guards take care."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
