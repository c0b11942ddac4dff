"""The device that a command names."""

from __future__ import annotations

import sys

from harness.errors import UsageError
from kernels.platform import BUILDS, Platform, detect, unseen


def choose_device(name: str | None = None) -> Platform:
    """The platform of `cpu`, `cuda` or `cuda:1`; without a name the first GPU, else the CPU. Then a line on
    stderr says why a GPU that seems to be here is not taken. Raises UsageError, which names the devices there
    are."""
    try:
        platform = detect(name)
    except LookupError as error:
        raise UsageError(str(error)) from None
    if name is None and (why := unseen()):
        taken = "some GPUs cannot be used" if platform.memory else "not all of the GPU is known"
        if platform.kind == "cpu":
            taken = "the CPU is measured, as no GPU can be"
        print(f"note: {taken}: {why}", file=sys.stderr)
    return platform


def torch_advice(here: Platform) -> str:
    """That the installed torch cannot use this device at all, and what to do; else empty."""
    wrong = here.other_build()
    how = f"install PyTorch's build for {BUILDS[here.kind]} in its place, or measure the CPU: --device cpu"
    return f"{wrong}; {how}" if wrong else ""
