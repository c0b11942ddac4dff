"""The device that a command names."""

from __future__ import annotations

import sys

from harness.errors import UsageError
from kernels.platform import Platform, detect, unseen


def choose_device(name: str | None = None) -> Platform:
    """The platform of `cpu`, `cuda` or `cuda:1`; without a name the first GPU, else the CPU. Then a line on
    stderr says why a GPU that seems to be here is not taken. Raises UsageError, which names the devices there
    are."""
    try:
        platform = detect(name)
    except LookupError as error:
        raise UsageError(str(error)) from None
    if name is None and (why := unseen()):
        taken = (
            "the CPU is measured, as no GPU can be"
            if platform.kind == "cpu"
            else "not all of the GPU is known"
        )
        print(f"note: {taken}: {why}", file=sys.stderr)
    return platform
