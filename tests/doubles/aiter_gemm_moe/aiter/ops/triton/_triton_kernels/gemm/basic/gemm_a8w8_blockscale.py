"""aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a8w8_blockscale.py: the configuration's lookup."""

from aiter.ops.triton.utils.gemm_config_utils import get_gemm_config


def _get_config(
    M: int,
    N: int,
    K: int,
    shuffle: bool = False,
    backend: str | None = None,
):
    """:430. (config, is_tuned)."""
    return get_gemm_config(
        f"GEMM-A8W8_BLOCKSCALE{'_PRESHUFFLED' if shuffle else ''}", M, N, K, backend=backend
    )
