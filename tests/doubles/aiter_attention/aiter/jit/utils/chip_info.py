"""The device: its architecture in DOUBLE_ARCH, its compute units from `CU_NUM` or by architecture."""

import os

_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}  # MI300X and MI355X, undivided


def get_gfx() -> str:
    arch = os.environ.get("DOUBLE_ARCH", "gfx942")
    if arch not in _COMPUTE_UNITS:
        raise RuntimeError(f"get_gfx: no double of {arch}; architectures: {', '.join(_COMPUTE_UNITS)}")
    return arch


get_gfx_runtime = get_gfx  # aiter/utility/dtypes.py asks this one


def get_cu_num() -> int:
    # aiter/jit/utils/chip_info.py get_cu_num_custom_op: CU_NUM overrides what rocminfo says
    return int(os.environ.get("CU_NUM", "0")) or _COMPUTE_UNITS[get_gfx()]
