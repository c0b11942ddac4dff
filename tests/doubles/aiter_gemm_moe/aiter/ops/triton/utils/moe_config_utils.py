"""aiter/ops/triton/utils/moe_config_utils.py: the Triton MoE GEMM's table."""

import functools

import torch

from aiter.jit.utils.chip_info import get_gfx

# aiter/ops/triton/configs/moe/gfx942-MOE-FP8_W8A8.json and gfx950's: M, N, K tiles of small_M, medium_M,
# large_M
_TILES = {
    "gfx942": ((64, 64, 128), (128, 128, 128), (128, 128, 128)),
    "gfx950": ((64, 64, 128), (128, 128, 128), (256, 256, 128)),
}


def get_optimal_moe_config(
    dtype: torch.dtype,
    use_int8_w8a16: bool | None = False,
    use_int8_w8a8: bool | None = False,
    use_fp8_w8a8: bool | None = False,
    use_int4_w4a16: bool | None = False,
    use_mxfp4: bool | None = False,
    M: int = 1,
):
    """:72. Without use_fp8_w8a8 the real one gives other tables; the double refuses."""
    if not use_fp8_w8a8:
        raise NotImplementedError("the double has the FP8 table alone")
    block_m, block_n, block_k = _TILES[get_gfx()][0 if M < 256 else 1 if M < 1024 else 2]
    return {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": 4,
        "num_warps": 8,
        "num_stages": 2,
        "waves_per_eu": 0,
        "matrix_instr_nonkdim": 16,
    }


def get_optimal_moe_config_func(
    dtype: torch.dtype,
    use_int8_w8a16: bool | None = False,
    use_int8_w8a8: bool | None = False,
    use_fp8_w8a8: bool | None = False,
    use_int4_w4a16: bool | None = False,
    use_mxfp4: bool | None = False,
):
    """:110. To be called with M=."""
    return functools.partial(
        get_optimal_moe_config, dtype, use_int8_w8a16, use_int8_w8a8, use_fp8_w8a8, use_int4_w4a16, use_mxfp4
    )
