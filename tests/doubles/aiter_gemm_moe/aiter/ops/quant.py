"""aiter/ops/quant.py: activations to FP8, one scale per token and 128 columns."""

import functools

import torch
from torch import Tensor

from .._kernel import fp8, quantise, raw
from ..jit.core import compile_ops
from ..jit.utils.torch_guard import torch_compile_guard
from ..utility import dtypes
from .enum import QuantType


@compile_ops("module_quant", develop=True)
def dynamic_per_token_scaled_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    scale_ub: torch.Tensor | None = None,
    shuffle_scale: bool = False,
    num_rows: torch.Tensor | None = None,
    num_rows_factor: int = 1,
) -> None:
    """quant.py:755, csrc/kernels/quant_kernels.cu:720. Here: input viewed as [-1, 128], out [rows, columns]
    fp8. shuffle_scale stores scales column-major, `rows` apart, in a tensor whose shape does not say so; rows
    past num_rows * num_rows_factor are left as they were."""
    if not input.is_contiguous() or not out.is_contiguous():
        raise RuntimeError("input and out must be contiguous")
    if input.dtype not in (torch.float16, torch.bfloat16):  # AITER_DISPATCH_FLOATING16_TYPES
        raise RuntimeError(f"dynamic_per_group_scaled_quant_kernel: {input.dtype} is not fp16 or bf16")
    if input.shape[-1] != 128 or out.dtype != fp8():
        raise NotImplementedError("the double quantises groups of 128 to FP8 alone")
    groups = out.shape[-1] // 128
    rows = out.numel() // out.shape[-1]
    if num_rows is not None:
        if num_rows.dtype != torch.int32:
            raise RuntimeError("num_rows would be misread: it must be int32")
        rows = int(num_rows[0]) * num_rows_factor
    values, scale = quantise(input.reshape(-1, groups, 128)[:rows])
    raw(out, (rows, groups, 128), (groups * 128, 128, 1)).copy_(values)
    raw(scales, (rows, groups), (1, rows) if shuffle_scale else (groups, 1)).copy_(scale)


@torch_compile_guard()
def per_group_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = dtypes.i8,
    group_size: int = 128,
    transpose_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
    scale_type: torch.dtype = dtypes.fp32,
) -> tuple[Tensor, Tensor]:
    """quant.py:440. quant_dtype is int8 unless said. With transpose_scale the scales still have the shape
    [..., K/128] and look contiguous."""
    if scale is not None:
        raise ValueError("unsupported: static per token quant")
    assert group_size in [32, 64, 128], f"unsupported group size {group_size=}, only support [32, 64, 128]"
    if group_size != 128 or scale_type != dtypes.fp32:
        raise NotImplementedError("the double quantises groups of 128 with fp32 scales alone")
    # What is not written is not zero: poison.
    scale = torch.full((*x.shape[:-1], x.shape[-1] // 128), float("nan"), dtype=scale_type, device=x.device)
    y = torch.full(x.shape, 1.0, device=x.device).to(quant_dtype)
    dynamic_per_token_scaled_quant(
        y,
        x.view(-1, 128),
        scale,
        shuffle_scale=transpose_scale,
        num_rows=num_rows,
        num_rows_factor=num_rows_factor,
    )
    return y, scale


@functools.lru_cache
def get_hip_quant(qType):
    """quant.py:368. per_128x128 has no quantiser: activations of such layers are per_1x128."""
    quantisers = {
        QuantType.No.value: lambda *a, **k: (a[0], None),
        QuantType.per_1x128.value: functools.partial(per_group_quant_hip, group_size=128),
    }

    def raise_NotImplementedError(*a, **k):
        raise NotImplementedError(f"unsupported quant type {qType=}")

    return quantisers.get(qType.value, raise_NotImplementedError)


@compile_ops("module_quant", develop=True)
def partial_transpose(out: Tensor, input: Tensor, num_rows: Tensor) -> None:
    """quant.py:1225, csrc/kernels/quant_kernels.cu:1152: num_rows is a tensor, not optional."""
    if not out.is_contiguous() or not input.is_contiguous():
        raise RuntimeError("out and input must be contiguous")
    rows, columns = int(num_rows[0]), input.shape[-1]
    raw(out, (rows, columns), (1, rows)).copy_(input.reshape(-1, columns)[:rows])
