"""aiter/utility/dtypes.py: the dtypes there are, FP8 by architecture."""

import torch

from ..jit.utils.chip_info import get_gfx_runtime

# defaultDtypes: e4m3fnuz on gfx942, e4m3fn on gfx950; fixed at import
fp8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[get_gfx_runtime()]
fp16 = torch.float16
bf16 = torch.bfloat16
fp32 = torch.float32
i8 = torch.int8
u8 = torch.uint8
i16 = torch.int16
i32 = torch.int32
i64 = torch.int64
u32 = torch.uint32
u64 = torch.uint64

_IDS = {fp8: 0, fp16: 2, bf16: 3, fp32: 4, u32: 7, i32: 8, i16: 9, i8: 10, u8: 11, i64: 12, u64: 13}


def _aiter_dtype_id(dtype) -> int:
    """The other architecture's FP8 has no id: a tensor of it reaches no compiled op."""
    try:
        return _IDS[dtype]
    except KeyError:
        raise AssertionError(f"Unsupported dtype: {dtype}") from None
