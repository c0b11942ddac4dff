"""aiter/ops/triton/gemm/basic/gemm_a8w8_blockscale.py: Triton's block-scaled GEMMs. They read all by
strides."""

import torch

from aiter._kernel import as_fp8, cdiv, raw, rows_scaled, unshuffle
from aiter.ops.triton._triton_kernels.gemm.basic.gemm_a8w8_blockscale import _get_config
from aiter.ops.triton.utils.gemm_config_utils import compute_splitk_params


def _next_power_of_2(n):
    return 1 << (n - 1).bit_length()


def _run(x, w, x_scale, w_scale, y, config, dtype, skip_reduce):
    """w [N, K] in rows, x_scale [M, K/128] and w_scale [N/128, K/128] as the kernel sees them; GROUP_K is
    BLOCK_SIZE_K (gemm_a8w8_blockscale.py:123)."""
    (m, k), n, splits = x.shape, w.shape[0], config["NUM_KSPLIT"]
    if x.dtype != w.dtype:
        raise RuntimeError(f"tl.dot of {x.dtype} and {w.dtype}")
    config["GROUP_K"] = _next_power_of_2(cdiv(k, w_scale.shape[1]))
    config["GROUP_N"] = _next_power_of_2(cdiv(n, w_scale.shape[0]))
    assert config["GROUP_K"] == config["BLOCK_SIZE_K"], "GROUP_K must equal BLOCK_SIZE_K"
    if config["GROUP_K"] != 128 or cdiv(k, 128) > x_scale.shape[1]:
        raise RuntimeError(
            f"x_scale {tuple(x_scale.shape)} would be overrun, or K={k} is not in groups of 128"
        )
    rows = w_scale.repeat_interleave(config["GROUP_N"], 0)[:n].repeat_interleave(128, 1)[:, :k]
    a, b = rows_scaled(as_fp8(x, "x"), x_scale), as_fp8(w, "w").float() * rows
    step = config["SPLITK_BLOCK_SIZE"]
    parts = [a[:, i * step : (i + 1) * step] @ b[:, i * step : (i + 1) * step].T for i in range(splits)]
    if splits > 1 and skip_reduce:
        return torch.stack(parts)  # fp32 [NUM_KSPLIT, M, N], not reduced
    if y is None:
        y = torch.empty((m, n), dtype=dtype, device=x.device)
    if tuple(y.shape) != (m, n):
        raise RuntimeError(f"y {tuple(y.shape)} would be overrun")
    return y.copy_(torch.stack(parts).sum(0))


def _backend(backend):
    backend = (backend or "triton").lower()
    assert backend in ("triton", "gluon"), f"Unknown backend '{backend}', must be 'triton' or 'gluon'"
    assert backend != "gluon", "Gluon backend requires one of ('gfx1250',)"
    return backend


def gemm_a8w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: float | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: dict | None = None,
    skip_reduce: bool | None = False,
    kernel_type: str = "bandwidth_bound",
    backend: str | None = None,
):
    """:43. x [M, K], w [N, K] not shuffled, x_scale [M, K/128], w_scale [N/128, K/128], of any strides. A
    config that is given is changed; y, if given, decides the output's dtype."""
    m, k = x.shape
    assert x.shape[1] == w.shape[1], "Incompatible dimensions!!!"
    backend = _backend(backend)
    if config is None:
        config, _ = _get_config(m, w.shape[0], k, backend=backend)
    compute_splitk_params(config, k)
    return _run(x, w, x_scale, w_scale, y, config, dtype, skip_reduce)


def gemm_a8w8_blockscale_preshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: float | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: dict | None = None,
    skip_reduce: bool | None = False,
    is_x_scale_tranposed: bool | None = True,
    kernel_type: str = "bandwidth_bound",
    backend: str | None = None,
):
    """:253. w [N/16, K*16]: a view of the (16, 16)-shuffled weight. x_scale: column-major data in a
    contiguous [M, K/128] tensor, or with is_x_scale_tranposed=False one that is read by its strides
    (:423)."""
    m, k = x.shape
    n = w.shape[0] * 16
    assert x.shape[1] == w.shape[1] // 16, "Incompatible dimensions!!!"
    backend = _backend(backend)
    if config is None:
        config, _ = _get_config(m, n, k, True, backend=backend)
    config.pop("kernel_type", None)
    if config["NUM_KSPLIT"] > 1 and k % (config["NUM_KSPLIT"] * 128):
        raise RuntimeError(f"K={k} does not split {config['NUM_KSPLIT']} ways")  # unlike above, not repaired
    config["SPLITK_BLOCK_SIZE"] = cdiv(k, config["NUM_KSPLIT"])
    if config["BLOCK_SIZE_K"] > config["SPLITK_BLOCK_SIZE"]:
        block = _next_power_of_2(config["SPLITK_BLOCK_SIZE"])
        config["BLOCK_SIZE_K"] = block // 4 if block > config["SPLITK_BLOCK_SIZE"] else block
    if k % config["BLOCK_SIZE_K"]:  # the masked load of w has the shape of an unshuffled one
        raise RuntimeError(
            f"K={k} is not whole tiles of {config['BLOCK_SIZE_K']}: the kernel does not compile"
        )
    if is_x_scale_tranposed:
        strides = (x_scale.stride(1), x_scale.numel() // x_scale.stride(0))
    else:
        strides = x_scale.stride()
    scale = raw(x_scale, (m, cdiv(k, 128)), strides)
    weight = unshuffle(w.reshape(n, k))
    return _run(x, weight, scale, w_scale, y, config, dtype, skip_reduce)
