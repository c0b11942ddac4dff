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
        variable = next((v for v in variables if v in environment), None)
        if variable is not None:
            names = [name(device).lower() for device in devices]
            chosen = _chosen(names, environment[variable], variable == "ROCR_VISIBLE_DEVICES")
            devices = [devices[number] for number in chosen]
    return list(devices)


def _chosen(names: Sequence[str], setting: str, is_rocr: bool) -> list[int]:
    """By numbers, or beginnings of names. The first that fits none, or several, ends the list. Of one that
    stands there twice torch makes an empty list (torch.cuda._parse_visible_devices), and ROCr ends it there
    (RvdFilter::BuildUsrDeviceList)."""
    chosen: list[int] = []
    for entry in (part.strip().lower() for part in setting.split(",")):
        if entry.isdigit():
            fits = [number for number in range(len(names)) if number == int(entry)]
        else:
            fits = [number for number, name in enumerate(names) if entry and name.startswith(entry)]
        if len(fits) != 1:
            break
        if fits[0] in chosen:
            return chosen if is_rocr else []
        chosen += fits
    return chosen
