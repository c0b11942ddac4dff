"""aiter/ops/triton/utils/gemm_config_utils.py: the Triton GEMMs' tables, and split-K sizes."""

import copy

from aiter._kernel import cdiv
from aiter.jit.utils.chip_info import get_gfx


def _tile(m, n, group, warps, stages, waves, modifier, splits=1):
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
        "waves_per_eu": waves,
        "matrix_instr_nonkdim": 16,
        "cache_modifier": modifier,
        "NUM_KSPLIT": splits,
    }


# aiter/ops/triton/configs/gemm/ARCH-NAME.json: gfx942's whole, of gfx950's the first entry and the last. The
# table of N=384 K=512 is invented, as the real ones are for models' sizes.
_ANY_942 = {**_tile(128, 128, 1, 4, 2, 2, ".cg"), "kpack": 2}
_TABLES = {
    ("gfx942", "GEMM-A8W8_BLOCKSCALE"): {"any": _ANY_942},
    ("gfx942", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED"): {"any": _tile(32, 64, 1, 4, 2, 2, None)},
    ("gfx950", "GEMM-A8W8_BLOCKSCALE"): {
        "M_LEQ_8": _tile(8, 32, 1, 1, 3, 4, ".cg"),
        "any": _tile(128, 256, 1, 4, 2, 1, None),
    },
    ("gfx950", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED"): {
        "M_LEQ_8": _tile(8, 16, 1, 1, 3, 4, ".cg"),
        "any": _tile(128, 128, 1, 8, 3, 4, None),
    },
    ("gfx950", "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED-N=2112-K=7168"): {
        "M_LEQ_8": _tile(8, 16, 1, 2, 3, 8, ".cg", splits=14),
        "any": _tile(128, 128, 4, 8, 2, 4, None),
    },
    ("gfx942", "GEMM-A8W8_BLOCKSCALE-N=384-K=512"): {
        "M_LEQ_16": {**_ANY_942, "NUM_KSPLIT": 4},
        "any": _ANY_942,
    },
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
