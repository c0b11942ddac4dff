"""Doubles of torch 2.13's `torch.nn.functional.scaled_mm` and `torch._scaled_mm` on CUDA, to be patched over
the real ones. DOUBLE_ARCH is sm_90 (the default) or sm_100; cuBLASLt is taken as 12.9 or newer.

Where a fact has no other source it is aten/src/ATen/native/cuda/ScaledBlas.cpp (pytorch main of 2026-08,
whose functions are named); torch 2.13's Python and schemas were compared with the installed package. Version
metadata has no folder here: it would stand in for the real torch's.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
HIGH = (torch.bfloat16, torch.float16, torch.float32)


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: ScalingType | list[ScalingType],
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: ScalingType | list[ScalingType],
    swizzle_a: SwizzleType | list[SwizzleType] | None = None,
    swizzle_b: SwizzleType | list[SwizzleType] | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Signature: torch/nn/functional.py scaled_mm. Checks: TORCH_META_FUNC(_scaled_mm_v2) in
    aten/src/ATen/native/Blas.cpp, ScaledBlasUtils.cpp, then _scaled_mm_cuda_v2_out."""
    scale_a, scale_b = _list(scale_a), _list(scale_b)
    recipe_a, recipe_b = _list(scale_recipe_a), _list(scale_recipe_b)
    _check(
        all(isinstance(r, ScalingType) for r in (*recipe_a, *recipe_b)),
        "recipes are of ScalingType",
        TypeError,
    )
    _matrices(mat_a, mat_b, ValueError)
    if tuple(contraction_dim) not in ((), (1, 0)):
        raise NotImplementedError("the double of scaled_mm does not cover contraction_dim")
    _check(mat_a.dtype in FP8 and mat_b.dtype in FP8, "Expected both inputs to be fp8 or fp4 types")
    # The recipe checks of ScaledBlasUtils.cpp: one fp32 scale per operand; block scales take e4m3fn only.
    recipe = (recipe_a[0], recipe_b[0]) if len(recipe_a) == len(recipe_b) == 1 else None
    one = len(scale_a) == len(scale_b) == 1 and scale_a[0].dtype == scale_b[0].dtype == torch.float32
    e4m3 = mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    _check(
        one and recipe in _IMPLEMENTATIONS and (recipe in _ANY_FP8 or e4m3), "Invalid scaling configuration."
    )
    _operands(mat_a, mat_b, bias, output_dtype or mat_a.dtype, ValueError, scale_a[0], scale_b[0])
    _check(not _list(swizzle_a) or _list(swizzle_a) == [SwizzleType.NO_SWIZZLE], "swizzle_a is NO_SWIZZLE")
    _check(not _list(swizzle_b) or _list(swizzle_b) == [SwizzleType.NO_SWIZZLE], "swizzle_b is NO_SWIZZLE")
    out = torch.empty(
        (mat_a.shape[0], mat_b.shape[1]), dtype=output_dtype or mat_a.dtype, device=mat_a.device
    )
    if 0 in (*mat_a.shape, mat_b.shape[1]):
        return out.zero_() if mat_a.shape[1] == 0 else out
    return _IMPLEMENTATIONS[recipe](mat_a, mat_b, scale_a[0], scale_b[0], bias, out)


def _scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Signature: aten::_scaled_mm's schema (torch/_C/_VariableFunctions.pyi). _scaled_mm_out_cuda: the kind
    of scaling is guessed from the scales' shapes and strides, simpler kinds first (get_joint_scaling)."""
    _matrices(input, mat2, RuntimeError)
    kind = _joint_scaling(input, mat2, scale_a, scale_b)
    if scale_result is not None:
        raise NotImplementedError("the double of _scaled_mm does not cover scale_result")
    dtype = out.dtype if out is not None and out_dtype is None else out_dtype or input.dtype
    _check(out is None or out.dtype == dtype, "out_dtype must match output matrix type", RuntimeError)
    _operands(input, mat2, bias, dtype, RuntimeError, scale_a, scale_b)
    shape = (input.shape[0], mat2.shape[1])
    result = torch.empty(shape, dtype=dtype, device=input.device) if out is None else out.resize_(shape)
    if 0 in (*input.shape, mat2.shape[1]):
        return result.zero_() if input.shape[1] == 0 else result
    if kind in _ANY_FP8:
        return _IMPLEMENTATIONS[kind](input, mat2, scale_a, scale_b, bias, result)
    _cublas(_major() == 9, "block scales of 128 on this device")
    return _block(kind, input, mat2, scale_a, scale_b, bias, result)


def _tensor_wise(a, b, scale_a, scale_b, bias, out):
    """_scaled_tensorwise_tensorwise."""
    _check(scale_a.numel() == 1, "scale_a must have 1 Float element")
    _check(scale_b.numel() == 1, "scale_b must have 1 Float element")
    _multipliable(a, b)
    return _finish((a.float() * scale_a.item()) @ (b.float() * scale_b.item()), bias, out)


def _row_wise(a, b, scale_a, scale_b, bias, out):
    """_scaled_rowwise_rowwise: cuBLASLt on sm_90, CUTLASS from sm_100 on."""
    (m, _), n = a.shape, b.shape[1]
    _check(scale_a.dim() == 2 and scale_a.shape == (m, 1), f"scale_a must have shape [{m}, 1]")
    _check(scale_b.numel() == n, f"scale_b must have {n} Float elements, got {scale_b.numel()}")
    _check(scale_b.dim() == 2, "Dimension out of range", IndexError)
    _check(scale_b.stride(1) == 1, f"expected scale_b.stride(1) to be 1, but got {scale_b.stride(1)}")
    _check(scale_a.stride(0) == 1 or m == 1, "scale_a is read from consecutive addresses")
    _check(scale_b.shape[0] == 1 or scale_b.stride(0) == 1, "scale_b is read from consecutive addresses")
    _check(out.dtype in HIGH, "Only bf16, fp16, and fp32 high precision output types are supported")
    _multipliable(a, b)
    rows, columns = scale_a.as_strided((m, 1), (1, 1)), scale_b.as_strided((1, n), (n, 1))
    return _finish((a.float() * rows) @ (b.float() * columns), bias, out)


def _block_of(kind):
    def run(a, b, scale_a, scale_b, bias, out):
        if _major() != 9:  # _check_deepseek_support
            raise NotImplementedError(
                "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90"
            )
        for name, scale, side, outer in (
            ("a", scale_a, kind[0], a.shape[0]),
            ("b", scale_b, kind[1], b.shape[1]),
        ):
            _block_scale(f"scale_{name}", scale, side, outer, a.shape[1])
        return _block(kind, a, b, scale_a, scale_b, bias, out)

    return run


def _block_scale(name, scale, kind, outer, k):
    """_scaled_block1x128_block128x128 and its like: 1x128 [outer, ceil(k/128)], strides (1, outer); 128x128
    [round_up(ceil(k/128), 4), ceil(outer/128)], strides (1, the former). Of one column (1, 1) will do."""
    _check(scale.dim() == 2, "Dimension out of range", IndexError)
    groups = _ceil(k, 128)
    if kind is ScalingType.BlockWise1x128:
        shape, column = (outer, groups), outer
    else:
        shape, column = (_ceil(groups, 4) * 4, _ceil(outer, 128)), _ceil(groups, 4) * 4
    got = f"got {tuple(scale.shape)}, strides {scale.stride()}"
    _check(
        tuple(scale.shape) == shape, f"{name} must have shape {shape[0]} x {shape[1]} Float elements, {got}"
    )
    strided = scale.stride(0) == 1 and (scale.stride(1) == column or (shape[1] == 1 and scale.stride(1) == 1))
    _check(strided, f"{name} must have strides (1, {column}); {got}")


def _block(kind, a, b, scale_a, scale_b, bias, out):
    """cuBLASLt reads 1x128 scales outer-major and 128x128 scales K-major, stride round_up(K/128, 4)."""
    _cublas(out.dtype in HIGH, f"output dtype {out.dtype} with block scales (pytorch issue 160816)")
    m, k = a.shape
    # Not in aten: cuBLASLt refuses 1x128 scales of an M that is no multiple of 4 (vLLM's pull request 49932).
    _cublas(kind[0] is not ScalingType.BlockWise1x128 or m % 4 == 0, f"M={m}, not a multiple of 4")
    _multipliable(a, b)
    left = a.float() * _read(scale_a, kind[0], m, k)
    right = b.float() * _read(scale_b, kind[1], b.shape[1], k).T
    return _finish(left @ right, bias, out)


def _read(scale, kind, outer, k):
    """[outer, k] of fp32, from storage."""
    groups = _ceil(k, 128)
    if kind is ScalingType.BlockWise1x128:
        shape, strides, repeat = (outer, groups), (1, outer), 1
    else:
        shape, strides, repeat = (_ceil(outer, 128), groups), (_ceil(groups, 4) * 4, 1), 128
    last = scale.storage_offset() + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    inside = last < scale.untyped_storage().nbytes() // 4
    _check(inside, "CUDA error: an illegal memory access was encountered (scales)", RuntimeError)
    return (
        scale.as_strided(shape, strides).repeat_interleave(repeat, 0)[:outer].repeat_interleave(128, 1)[:, :k]
    )


def _joint_scaling(a, b, scale_a, scale_b):
    """get_joint_scaling."""
    for kind in _IMPLEMENTATIONS:
        if _is_kind(kind[0], a, scale_a) and _is_kind(kind[1], b.t(), scale_b.t()):
            return kind
    raise RuntimeError(
        f"Invalid scaling configuration: scale_a {tuple(scale_a.shape)} {scale_a.stride()}, "
        f"scale_b {tuple(scale_b.shape)} {scale_b.stride()}"
    )


def _is_kind(kind, t, scale):
    """is_desired_scaling: is_tensorwise_scaling, is_rowwise_scaling, is_blockwise_{1x128,128x128}_scaling."""
    if t.dtype not in FP8 or scale.dtype != torch.float32:
        return False
    if kind is ScalingType.TensorWise:
        return scale.numel() == 1
    outer, groups = t.shape[0], _ceil(t.shape[1], 128)
    if scale.dim() != 2:
        return False
    if kind is ScalingType.RowWise:
        return tuple(scale.shape) == (outer, 1) and scale.is_contiguous()

    def side(dim, size, stride):  # check_size_stride
        return scale.size(dim) == size and (size <= 1 or scale.stride(dim) == stride)

    if kind is ScalingType.BlockWise1x128:
        return side(0, outer, 1) and side(1, groups, outer)
    return side(0, _ceil(outer, 128), groups) and side(1, groups, 1)


def _matrices(a, b, error):
    _check(a.dim() == 2, "mat_a must be a matrix", error)
    _check(b.dim() == 2, "mat_b must be a matrix", error)
    _check(
        a.shape[1] == b.shape[0],
        f"mat_a and mat_b shapes cannot be multiplied ({a.shape} and {b.shape})",
        error,
    )


def _operands(a, b, bias, dtype, error, *scales):
    """What both entry points check, in words nearly the same."""
    n = b.shape[1]
    _check(a.shape[1] % 16 == 0, "Expected trailing dimension of mat1 to be divisible by 16", error)
    _check(
        b.shape[0] % 16 == 0 and n % 16 == 0, f"mat2 shape {tuple(b.shape)} must be divisible by 16", error
    )
    _check(a.dtype in FP8 and b.dtype in FP8, "Expected Float8 matrices", error)
    both = a.dtype == b.dtype == torch.float8_e5m2
    _check(not both, "Multiplication of two Float8_e5m2 matrices is not supported")
    _cublas(not {a.dtype, b.dtype} & set(FP8[2:]), "fnuz FP8, which is AMD's")
    if bias is not None:
        _check(bias.numel() == n, f"Bias must be size {n} but got {bias.numel()}", error)
        _check(dtype != torch.float32, "Bias is not supported when out_dtype is set to Float32", error)
        wanted = torch.float16 if dtype == torch.float16 else torch.bfloat16
        fits = bias.dtype == wanted or (dtype in FP8 and bias.dtype == torch.float16)
        _check(fits, f"Bias must be {wanted} to compute {dtype} output, but got {bias.dtype}", error)
    tensors = [t for t in (a, b, *scales, bias) if t is not None]
    _check(len({t.device for t in tensors}) == 1, "Expected all tensors to be on the same GPU", RuntimeError)


def _multipliable(a, b):
    """_scaled_gemm: on sm_90 row-major by column-major. cublasCommonArgs copies what is neither."""
    column_major = b.stride(0) == 1 and b.stride(1) >= max(1, b.shape[0])
    row_major = a.stride(1) == 1 and a.stride(0) >= max(1, a.shape[1])
    if _major() == 9:
        _check(
            column_major and row_major,
            "Only multiplication of row-major and column-major matrices is supported by cuBLASLt",
            RuntimeError,
        )
    for t, stride in ((a, a.stride(0)), (b, b.stride(1))):
        if row_major and column_major:
            _cublas(t.data_ptr() % 16 == 0 and stride % 16 == 0, "an operand that is not aligned to 16 bytes")


def _finish(product, bias, out):
    if bias is not None:
        product = product + bias.float()
    return out.copy_(product)


def _major() -> int:
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    return int(digits) // 10


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _list(value) -> list:
    """torch/nn/functional.py _expand_single_value."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _check(holds: bool, what: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(what)


def _cublas(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(
            f"CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic ({what})"
        )


_ROW, _BLOCK, _SQUARE = ScalingType.RowWise, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
_ANY_FP8 = ((ScalingType.TensorWise, ScalingType.TensorWise), (_ROW, _ROW))
# In the order in which get_joint_scaling tries them.
_IMPLEMENTATIONS = {
    _ANY_FP8[0]: _tensor_wise,
    _ANY_FP8[1]: _row_wise,
    (_SQUARE, _BLOCK): _block_of((_SQUARE, _BLOCK)),
    (_BLOCK, _SQUARE): _block_of((_BLOCK, _SQUARE)),
    (_BLOCK, _BLOCK): _block_of((_BLOCK, _BLOCK)),
}
