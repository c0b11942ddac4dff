"""A port of loopback for a server of ours."""

from __future__ import annotations

import socket

from harness.errors import UsageError


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
