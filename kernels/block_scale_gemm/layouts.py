"""Layouts of activations and their scales that several libraries share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def column_major(a_scale: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """A copy of [M, blocks] with strides (1, M rounded up to a multiple): the scales of all rows lie
    together, block by block. With 4 of fp32 a block starts at a multiple of 16 bytes, as TMA wants it."""
    m, blocks = a_scale.shape
    columns = a_scale.new_zeros(blocks, rounded_up(m, multiple)).t()[:m]
    return columns.copy_(a_scale)


def padded_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """[M rounded up to a multiple, columns]: a copy with zeros below, or the tensor itself if M is one."""
    m, columns = tensor.shape
    if m % multiple == 0:
        return tensor
    padded = tensor.new_zeros(rounded_up(m, multiple), columns)
    padded[:m] = tensor
    return padded


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
