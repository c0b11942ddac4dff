"""Log of what the plug-in did, in JSON lines: no run counts for an arm whose swap was not called."""

from __future__ import annotations

import json
import os
from typing import Any

_registered = False
_said: set[str] = set()
_called: set[str] = set()


def already_registered() -> bool:
    global _registered
    before, _registered = _registered, True
    return before


def called(swap: str) -> None:
    """The replaced op runs: said once, and next to free after that."""
    if swap not in _called:
        _called.add(swap)
        note("called", swap=swap)


def note(event: str, **facts: Any) -> None:
    """One line, each distinct one once in a process."""
    line = json.dumps({"event": event, **facts}, sort_keys=True)
    path = os.environ.get("KERNEL_BENCH_SWAPS_LOG")
    if not path or line in _said:
        return
    _said.add(line)
    # One short write to a file opened for appending is not torn between processes.
    with open(path, "a") as sink:  # noqa: PTH123
        sink.write(line + "\n")
