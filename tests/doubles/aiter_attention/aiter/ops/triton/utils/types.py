"""aiter/ops/triton/utils/types.py: FP8 by architecture."""

from ....utility.dtypes import fp8 as e4m3_dtype


def get_fp8_e4m3_dtype():
    return e4m3_dtype
