"""tokenspeed_mla/utils.py and mla_helpers.py of tokenspeed-mla 2.0.4."""

import os

import torch


def capability() -> tuple[int, int]:
    """mla_helpers.py:25 get_mla_decode_arch."""
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    device = divmod(int(digits), 10)
    if device not in ((10, 0), (10, 3), (10, 7)):
        raise ValueError(f"MLA decode requires SM100, SM103 or SM107, got {device}")
    return device


def get_num_sm(device: torch.device) -> int:
    """The device's multiprocessors; those of a B200."""
    return 148


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def fold(heads: int, queries: int, tile: int) -> int:
    """mla_helpers.py get_mla_decode_fold_sq_factor: query tokens that share a tile."""
    most = min(queries, tile // heads)
    return next((n for n in range(most, 1, -1) if queries % n == 0), 1)
