"""aiter/ops/triton/utils/gemm_config_utils.py: the Triton GEMMs' tables, and split-K sizes."""

import copy

from aiter._kernel import cdiv
from aiter.jit.utils.chip_info import get_gfx

# aiter/ops/triton/configs/gemm/gfx942-GEMM-A8W8_BLOCKSCALE.json, ...PRESHUFFLED.json, whole; of gfx950's the
# first entry. The specialised table (is_tuned) is invented: the real ones are for models' sizes.
_ANY = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 2,
    "waves_per_eu": 2,
    "matrix_instr_nonkdim": 16,
    "cache_modifier": ".cg",
    "NUM_KSPLIT": 1,
    "kpack": 2,
}
_SMALL = {**_ANY, "BLOCK_SIZE_M": 8, "BLOCK_SIZE_N": 32, "num_warps": 1, "num_stages": 3, "waves_per_eu": 4}
_TABLES = {
    ("gfx942", "GEMM-A8W8_BLOCKSCALE"): {"any": _ANY},
    ("gfx942", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED"): {"any": {**_ANY, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64}},
    ("gfx950", "GEMM-A8W8_BLOCKSCALE"): {"M_LEQ_8": _SMALL, "any": _ANY},
    ("gfx950", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED"): {"M_LEQ_8": _SMALL, "any": _ANY},
    ("gfx942", "GEMM-A8W8_BLOCKSCALE-N=384-K=512"): {"M_LEQ_16": {**_ANY, "NUM_KSPLIT": 4}, "any": _ANY},
}
STANDARD_M_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def get_gemm_config(
    config_name: str,
    M: int,
    N: int | None = None,
    K: int | None = None,
    bounds: tuple[int, ...] | None = None,
    specialized_filename: str | None = None,
    backend: str | None = None,
    B: int | None = None,
) -> tuple[dict, bool]:
    """gemm_config_utils.py:142: a copy that the caller may change, and whether a table for this N and K gave
    it (an "any" entry always says False)."""
    tables = _TABLES[get_gfx(), config_name]
    specialised = _TABLES.get((get_gfx(), f"{config_name}-N={N}-K={K}"))
    table, tuned = (specialised, True) if specialised else (tables, False)
    for bound in bounds or STANDARD_M_BOUNDS:
        if bound >= M and f"M_LEQ_{bound}" in table:
            return copy.deepcopy(table[f"M_LEQ_{bound}"]), tuned
    return copy.deepcopy(table["any"]), False


def compute_splitk_params(config: dict, K: int) -> dict:
    """gemm_config_utils.py:205: changes the config in place."""
    assert K > 0, "K must be positive"
    config.setdefault("NUM_KSPLIT", 1)
    config.setdefault("cache_modifier", None)
    config["SPLITK_BLOCK_SIZE"] = cdiv(K, config["NUM_KSPLIT"])
    while config["NUM_KSPLIT"] > 1 and config["BLOCK_SIZE_K"] > config["SPLITK_BLOCK_SIZE"]:
        config["NUM_KSPLIT"] = max(config["NUM_KSPLIT"] // 2, 1)
        config["SPLITK_BLOCK_SIZE"] = cdiv(K, config["NUM_KSPLIT"])
    if config["BLOCK_SIZE_K"] > config["SPLITK_BLOCK_SIZE"]:
        block = 1 << (config["SPLITK_BLOCK_SIZE"] - 1).bit_length()
        config["BLOCK_SIZE_K"] = block // 2 if block > config["SPLITK_BLOCK_SIZE"] else block
    config["BLOCK_SIZE_K"] = max(config["BLOCK_SIZE_K"], 16)
    if config["NUM_KSPLIT"] > 1 and config["SPLITK_BLOCK_SIZE"] % config["BLOCK_SIZE_K"]:
        block = config["BLOCK_SIZE_K"]
        config["SPLITK_BLOCK_SIZE"] = cdiv(config["SPLITK_BLOCK_SIZE"], block) * block
        config["NUM_KSPLIT"] = cdiv(K, config["SPLITK_BLOCK_SIZE"])
    return config
