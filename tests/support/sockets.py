"""Addresses at which a process and all that it started listen for TCP (Linux)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> list[str]:
    """IPv4 addresses, those of IPv6 that stand for one too; others as IPv6."""
    inodes = set(_sockets(pid))
    lines = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    fields = [line.split() for line in lines[0] + lines[1]]
    return [_address(f[1].split(":")[0]) for f in fields if f[3] == LISTEN and f[9] in inodes]


def _address(words: str) -> str:
    """Each word of 32 bits is written as the machine holds it."""
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


def _sockets(pid: int) -> Iterator[str]:
    """Inodes of the process and of those below it; one that has just ended has none."""
    with contextlib.suppress(OSError):
        links = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        yield from (link[8:-1] for link in links if link.startswith("socket:["))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _sockets(int(child))
