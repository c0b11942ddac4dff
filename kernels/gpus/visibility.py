"""Which devices a process is shown: CUDA_VISIBLE_DEVICES and its like, which renumber them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

# One group after the other applies; in a group the first that is set.
VARIABLES = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}


def visible(
    kind: str,
    devices: Sequence[T],
    name: Callable[[T], str],
    environment: Mapping[str, str] = os.environ,
) -> list[T]:
    """The devices that are left, in the order in which torch numbers them.

    devices: in the driver's order
    name:    of a device, as the driver tells it (a UUID)
    """
    for variables in VARIABLES[kind]:
        setting = next((environment[v] for v in variables if v in environment), None)
        devices = _chosen(devices, setting, name)
    return list(devices)


def _chosen(devices: Sequence[T], setting: str | None, name: Callable[[T], str]) -> Sequence[T]:
    """By numbers, or beginnings of names. As in CUDA and ROCm the first that fits none ends the list."""
    if setting is None:
        return devices
    shown: list[T] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            fits = [d for i, d in enumerate(devices) if i == int(entry)]
        else:
            fits = [d for d in devices if entry and name(d).lower().startswith(entry.lower())]
        if len(fits) != 1:
            break
        shown += fits
    return shown
