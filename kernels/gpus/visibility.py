"""Which devices a process may use: CUDA_VISIBLE_DEVICES and similar variables select and renumber them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

VARIABLES = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
"""Groups of variables, which apply one after the other. In a group only the first that is set applies."""


def visible(
    kind: str,
    devices: Sequence[T],
    name: Callable[[T], str],
    environment: Mapping[str, str] = os.environ,
) -> list[T]:
    """The selected devices, in the order in which torch numbers them.

    devices: all devices, in the driver's order
    name:    returns the driver's identifier of a device
    """
    for variables in VARIABLES[kind]:
        variable = next((v for v in variables if v in environment), None)
        if variable is not None:
            names = [name(device).lower() for device in devices]
            chosen = _chosen(names, environment[variable], variable == "ROCR_VISIBLE_DEVICES")
            devices = [devices[number] for number in chosen]
    return list(devices)


def _chosen(names: Sequence[str], setting: str, is_rocr: bool) -> list[int]:
    """The numbers of the devices that a setting selects, by numbers or by beginnings of names. An entry that
    fits no device, or several, ends the list. If a device is listed twice, torch takes none at all
    (torch.cuda._parse_visible_devices), and ROCr ends the list there (RvdFilter::BuildUsrDeviceList)."""
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
