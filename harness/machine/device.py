"""The device that a command names."""

from __future__ import annotations

import sys

from harness.errors import UsageError
from kernels.platform import BUILDS, Platform, detect, unseen


def choose_device(name: str | None = None) -> Platform:
    """Returns the platform of `cpu`, `cuda` or `cuda:1`; without a name that of the first GPU, or of the CPU
    where there is no GPU. Without a name it also writes a line to stderr if a GPU that seems to be present
    cannot be used. Raises UsageError, which lists the devices."""
    try:
        platform = detect(name)
    except LookupError as error:
        raise UsageError(str(error)) from None
    if name is None and (why := unseen()):
        if platform.kind == "cpu":
            effect = "the CPU is measured, as no GPU can be"
        elif platform.memory:
            effect = "some GPUs cannot be used"
        else:
            effect = "not all of the GPU is known"
        print(f"note: {effect}: {why}", file=sys.stderr)
    return platform


def torch_advice(here: Platform) -> str:
    """Says what to do where the installed torch was not built for this device; empty where it was."""
    wrong = here.other_build()
    how = f"install PyTorch's build for {BUILDS[here.kind]} in its place, or measure the CPU: --device cpu"
    return f"{wrong}; {how}" if wrong else ""
