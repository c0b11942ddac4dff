"""Pretended Triton driver: a target that is not on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.catalogue.architectures import Architecture


@contextmanager
def pretended(architecture: Architecture) -> Iterator[None]:
    """Within, Triton takes the architecture for the GPU that is here."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Absent(architecture))
    try:
        yield
    finally:
        driver._active = before


class _Absent:
    """As much of a Triton driver as compiling asks for; a device is named by its architecture."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.architecture.triton)

    def get_current_device(self) -> str:
        return self.architecture.arch

    def get_current_stream(self, device: str) -> int:
        return 0
