"""aiter/utility/dtypes.py: names for torch's dtypes; fp8 is the GPU's own."""

import torch

from ..jit.utils.chip_info import get_gfx_runtime

fp8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[get_gfx_runtime()]  # dtypes.py:13
fp8_e8m0 = torch.float8_e8m0fnu
fp16 = torch.float16
bf16 = torch.bfloat16
fp32 = torch.float32
i32 = torch.int32
i16 = torch.int16
i8 = torch.int8
u8 = torch.uint8
i64 = torch.int64
