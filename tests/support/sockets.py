"""Addresses at which a process and all that it started listen for TCP (Linux)."""

import contextlib
import socket
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> list[str]:
    """IPv4 addresses, those of IPv6 that stand for one too; others as IPv6."""
    inodes = {inode for process in (pid, *_descendants(pid)) for inode in _sockets(process)}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                addresses.append(_address(fields[1].split(":")[0]))
    return addresses


def _address(words: str) -> str:
    """Each word of 32 bits is written as the machine holds it."""
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    if len(packed) == 4:
        return socket.inet_ntoa(packed)
    text = socket.inet_ntop(socket.AF_INET6, packed)
    return text.removeprefix("::ffff:")


def _descendants(pid: int) -> list[int]:
    below = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, thread.read_text().split()):
                below += [child, *_descendants(child)]
    return below


def _sockets(pid: int) -> set[str]:
    """Inodes."""
    try:
        links = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}
