"""aiter/mla.py get_meta_param: into how many splits non-persistent decode cuts the keys."""

from __future__ import annotations

import torch


def busiest(batch: int, average: float, units: int) -> int:
    """Of 1 to 16 splits the one with the compute units kept busiest, less the overhead of a split; ties: the
    fewer. `average`: keys of a sequence."""

    def value(i):
        busy = batch * i / ((batch * i + units - 1) // units * units)
        return busy * average / (average + 84.1 * i)

    return max(range(1, 17), key=value)


def indptr(splits: int, batch: int) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * splits, splits, dtype=torch.int)
