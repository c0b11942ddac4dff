"""The device that a command names."""

from __future__ import annotations

from harness.errors import UsageError
from kernels.platform import Platform, detect


def choose_device(name: str | None = None) -> Platform:
    """The platform of `cpu`, `cuda` or `cuda:1`; without a name the first GPU, else the CPU. Raises
    UsageError, which names the devices there are."""
    try:
        return detect(name)
    except LookupError as error:
        raise UsageError(str(error)) from None
