"""Doubles of a server and a client as commands, and which processes a test has left, told by a mark."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.paths import ROOT

MARK = "KERNEL_BENCH_TEST"
DOUBLES = ROOT / "tests" / "doubles"
SERVER = f"{sys.executable} -S {DOUBLES}/fake_server.py {{port}}"
CLIENT = f"{sys.executable} -S {DOUBLES}/fake_client.py {{url}} {{result}} {{seed}}"


def marked(mark: str, name: str = MARK) -> list[int]:
    """The living processes that have the mark in their environment, under that name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"{name}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if ours and state not in "ZX":
            found.append(int(folder.name))
    return found


def comes(condition: Callable[[], object], within: float = 120.0) -> bool:
    """Whether it comes true in time: what a starved machine needs, where it fails only."""
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def gone(mark: str) -> bool:
    return comes(lambda: not marked(mark))
