"""aiter/jit/utils/chip_info.py: the GPU's name and compute units, which the real one reads from rocminfo."""

import os


def get_gfx():
    return get_gfx_runtime()


def get_gfx_runtime() -> str:
    gfx = os.environ.get("DOUBLE_ARCH", "gfx942")
    if gfx not in ("gfx942", "gfx950"):
        raise KeyError(f"Unknown GPU architecture: {gfx}. Supported architectures: ['gfx942', 'gfx950']")
    return gfx


def get_cu_num():
    """chip_info.py:133 get_cu_num_custom_op: CU_NUM, else the device's: MI300X has 304, MI350X 256."""
    return int(os.getenv("CU_NUM", "0")) or {"gfx942": 304, "gfx950": 256}[get_gfx_runtime()]


def gfx_from_cu_num(cu_num) -> str:
    """chip_info.py:79 _LEGACY_CU_NUM_TO_GFX: tables without a gfx column."""
    return {256: "gfx950", 80: "gfx942", 304: "gfx942"}.get(int(cu_num)) or get_gfx_runtime()
