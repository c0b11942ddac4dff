"""Compute units, over which libraries split sequences: the device's own, and for plans of memory the most."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOPPER_UNITS = 132  # of an H100 or H200
MOST_UNITS = 304  # of an MI300X, the most of all


def compute_units(device: torch.device) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
