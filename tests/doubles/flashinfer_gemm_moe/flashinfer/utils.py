"""flashinfer/utils.py: what callers and the doubled functions share."""

import os

import torch


class BackendSupportedError(Exception):
    pass


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Of DOUBLE_ARCH: (9, 0) for sm_90, the default, (10, 0) for sm_100."""
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    return divmod(int(digits), 10)


def check_shape_dtype_device(x, expected_shape, expected_dtype, expected_device, name) -> None:
    if expected_shape and x.shape != torch.Size(expected_shape):
        raise ValueError(f"Invalid shape of {name}: expected {expected_shape}, got {x.shape}")
    if expected_dtype and x.dtype != expected_dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {expected_dtype}, got {x.dtype}")
    if expected_device and x.device != expected_device:
        raise ValueError(f"Invalid device of {name}: expected {expected_device}, got {x.device}")
