"""aiter/ops/gemm_op_a8w8.py: 1x128 by 128x128 block-scaled FP8 GEMMs, and the table that picks among them."""

import pandas as pd
import torch
from torch import Tensor

from ..jit.core import AITER_CONFIGS, compile_ops
from ..jit.utils.chip_info import get_cu_num
from ..jit.utils.chip_info import get_gfx_runtime as get_gfx
from ..jit.utils.torch_guard import torch_compile_guard
from ..utility import dtypes
from . import _gemm_kernels as kernels
from .gemm_op_common import get_padded_m


@compile_ops("module_gemm_a8w8_blockscale", fc_name="gemm_a8w8_blockscale")
def gemm_a8w8_blockscale_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    splitK: int = 0,
    kernelName: str = "",
) -> torch.Tensor:
    """gemm_op_a8w8.py:290, csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale.cu:79."""
    return kernels.ck(XQ, WQ, x_scale, w_scale, Out, splitK, kernelName)


@compile_ops("module_gemm_a8w8_blockscale_cktile", fc_name="gemm_a8w8_blockscale_cktile")
def gemm_a8w8_blockscale_cktile(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    isBpreshuffled: bool = False,
    splitK: int = 0,
    kernelName: str = "",
) -> torch.Tensor:
    """gemm_op_a8w8.py:306, csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_cktile.cu:62."""
    return kernels.cktile(XQ, WQ, x_scale, w_scale, Out, isBpreshuffled, splitK, kernelName)


@compile_ops("module_gemm_a8w8_blockscale_bpreshuffle", fc_name="gemm_a8w8_blockscale_bpreshuffle")
def gemm_a8w8_blockscale_bpreshuffle_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    kernelName: str = "",
) -> torch.Tensor:
    """gemm_op_a8w8.py:323,
    csrc/ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle.cu:65."""
    return kernels.ck_bpreshuffle(XQ, WQ, x_scale, w_scale, Out, kernelName)


@compile_ops(
    "module_gemm_a8w8_blockscale_bpreshuffle_cktile", fc_name="gemm_a8w8_blockscale_bpreshuffle_cktile"
)
def gemm_a8w8_blockscale_bpreshuffle_cktile(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    isBpreshuffled: bool = True,
    kernelName: str = "",
) -> torch.Tensor:
    """gemm_op_a8w8.py:338."""
    return kernels.cktile(XQ, WQ, x_scale, w_scale, Out, isBpreshuffled, 0, kernelName)


@compile_ops(
    "module_gemm_a8w8_blockscale_bpreshuffle_asm",
    fc_name="gemm_a8w8_blockscale_bpreshuffle_asm",
    ffi_type="ctypes",
)
def _gemm_a8w8_blockscale_bpreshuffle_asm(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    splitK: int = -1,
    kernelName: str | None = None,
    bpreshuffle: int = 1,
    zero_bias_buf: Tensor | None = None,
) -> None:
    """gemm_op_a8w8.py:377, csrc/py_itfs_cu/asm_a8w8_blockscale_bpreshuffle.cu:266."""
    kernels.asm_bpreshuffle(A, B, out, A_scale, B_scale, bias, splitK, kernelName, bpreshuffle)


def gemm_a8w8_blockscale_bpreshuffle_asm(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool | None = True,
    zero_bias_buf: Tensor | None = None,
) -> Tensor:
    """gemm_op_a8w8.py:404. The real one makes a buffer of zeros where there is no bias."""
    split = splitK if splitK is not None else -1
    shuffled = int(bpreshuffle) if bpreshuffle is not None else 1
    _gemm_a8w8_blockscale_bpreshuffle_asm(
        A, B, out, A_scale, B_scale, bias, split, kernelName, shuffled, zero_bias_buf
    )
    return out


def get_CKGEMM_config(M: int, N: int, K: int, tuned_file=None):
    """gemm_op_a8w8.py:449: the tuned row of (gfx, CUs, M, N, K) as a dict without the key, or None. M is
    tried as it is, then padded finely (gl 0), then coarsely (gl 1). The real one is behind
    functools.lru_cache."""
    if tuned_file is None:
        tuned_file = AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_FILE
    table = pd.read_csv(tuned_file).drop_duplicates()
    keys = ["gfx", "cu_num", "M", "N", "K"]
    has_gfx = "gfx" in table.columns  # gemm_op_a8w8.py:456: tables without it are keyed by CUs alone
    rows = table.set_index(keys if has_gfx else keys[1:]).to_dict("index")
    for granularity in (None, 0, 1):
        padded = M if granularity is None else get_padded_m(M, N, K, granularity)
        key = (get_cu_num(), padded, N, K)
        config = rows.get((get_gfx(), *key) if has_gfx else key)
        if config is not None:
            return config
    return None


def gfx950_a8w8_blockscale_ASM(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor, dtype=dtypes.bf16
):
    """gemm_op_a8w8.py:1090. What it calls is defined nowhere in this version (line 1101, noqa: F821)."""
    return gfx950_a8w8_blockscale_asm(XQ, WQ, x_scale, w_scale, Y)  # noqa: F821


@torch_compile_guard()
def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = dtypes.bf16,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    """gemm_op_a8w8.py:805. Weights and both scales row-major; the output is made here."""
    assert dtype in [dtypes.bf16, dtypes.fp16], f"Output {dtype=} is currently not supported in gemm_a8w8"
    m, k = XQ.shape
    n = WQ.shape[0]
    Y = torch.empty(m, n, dtype=dtype, device=XQ.device)
    if isBpreshuffled:
        if get_gfx() in ["gfx950"] and m >= 16 and k >= 512 and dtype == dtypes.bf16:
            return gfx950_a8w8_blockscale_ASM(XQ, WQ, x_scale, w_scale, Y)
        raise AssertionError("asm kernel only support B preshuffle and m >= 16")
    config = get_CKGEMM_config(m, n, k, AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE)
    if config is not None:
        picked = {"ck": gemm_a8w8_blockscale_ck, "cktile": gemm_a8w8_blockscale_cktile}
        libtype = config["libtype"]
        assert libtype in picked, f"Unsupported libtype {libtype} for gemm_a8w8_blockscale"
        split, name = int(config.get("splitK", 0)), str(config.get("kernelName", ""))
        return picked[libtype](XQ, WQ, x_scale, w_scale, Y, splitK=split, kernelName=name)
    try:
        return gemm_a8w8_blockscale_ck(XQ, WQ, x_scale, w_scale, Y)
    except RuntimeError as e:
        raise RuntimeError(
            f"gemm_a8w8_blockscale failed for shape M={m}, N={n}, K={k}, {dtype=}, config={config}: {e}"
        ) from e


@torch_compile_guard()
def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = dtypes.bf16,
    out: Tensor | None = None,
) -> Tensor:
    """gemm_op_a8w8.py:909 (`out` since v0.1.20). Weights through shuffle_weight (16, 16); x_scale holds its
    data column-major, in an [M, K/128] tensor that is either contiguous or of strides (1, M)
    (op_tests/test_gemm_a8w8_blockscale.py:113-139)."""
    assert dtype in [dtypes.bf16, dtypes.fp16], f"Output {dtype=} is currently not supported in gemm_a8w8"
    m, k = XQ.shape
    n = WQ.shape[0]
    if out is not None:
        assert out.shape == (m, n) and out.dtype == dtype and out.device == XQ.device, (
            f"gemm_a8w8_blockscale_bpreshuffle: out buffer {tuple(out.shape)}/{out.dtype} "
            f"!= expected ({m},{n})/{dtype}"
        )
    Y = out if out is not None else torch.empty(m, n, dtype=dtype, device=XQ.device)
    config = get_CKGEMM_config(m, n, k, AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE)
    if config is not None:
        libtype, name = config["libtype"], str(config.get("kernelName", ""))
        if libtype == "triton":
            from aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale import gemm_a8w8_blockscale_preshuffle

            return gemm_a8w8_blockscale_preshuffle(
                XQ,
                WQ.reshape(n // 16, k * 16),
                x_scale,
                w_scale,
                dtype=dtype,
                y=Y,
                backend=name if name in ("triton", "gluon") else None,
                is_x_scale_tranposed=x_scale.stride(0) != 1,
            )
        if libtype == "cktile":
            return gemm_a8w8_blockscale_bpreshuffle_cktile(XQ, WQ, x_scale, w_scale, Y, kernelName=name)
        if libtype == "ck":
            return gemm_a8w8_blockscale_bpreshuffle_ck(XQ, WQ, x_scale, w_scale, Y, kernelName=name)
        if libtype == "asm":
            split = int(config["splitK"])
            return gemm_a8w8_blockscale_bpreshuffle_asm(
                XQ, WQ, Y, x_scale, w_scale, splitK=split, kernelName=name
            )
        raise NotImplementedError(f"the double has no {libtype} kernel")
    try:
        return gemm_a8w8_blockscale_bpreshuffle_ck(XQ, WQ, x_scale, w_scale, Y)
    except RuntimeError as e:
        raise RuntimeError(
            f"gemm_a8w8_blockscale_bpreshuffle failed for shape M={m}, N={n}, K={k}, {dtype=}, {config=}: {e}"
        ) from e
