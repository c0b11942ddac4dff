"""What the kernels of flashinfer 0.6.18 share: checks of flashinfer/utils.py, and the attention itself."""

import math
import os

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # utils.py:175, is_float8


def arch():
    return os.environ.get("DOUBLE_ARCH", "sm_90")


def check(right, message, kind=RuntimeError):
    if not right:
        raise kind(message)


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size, num_qo_heads, sm_count):
    """utils.py:869: four bytes for each head of each sequence, or each processor, in eights."""
    return -(-max(batch_size * num_qo_heads, sm_count) // 8) * 8 * 4


def check_shape_dtype_device(x, expected_shape, expected_dtype, expected_device, name):
    """utils.py:765."""
    check(not expected_shape or x.shape == torch.Size(expected_shape), f"Invalid shape of {name}", ValueError)
    check(not expected_dtype or x.dtype == expected_dtype, f"Invalid dtype of {name}", ValueError)
    check(not expected_device or x.device == expected_device, f"Invalid device of {name}", ValueError)


def vectors(t, name):
    """Loads of 128 bits (fa2: load_128b_async; TMA the same): last stride 1, base and others on 16 bytes."""
    outer = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    right = t.stride(-1) == 1 and t.data_ptr() % 16 == 0
    right = right and all(s * t.element_size() % 16 == 0 for s in outer)
    check(right, f"{name}: misaligned, the kernel reads 16 bytes at a time along a last stride of 1")


def attend(q, k, v, scale, causal):
    """q [n, H, d], k [m, h, d], v [m, h, dv] -> out f32 [n, H, dv], lse f32 [n, H] to base 2.

    causal is aligned to the bottom right: key j is hidden from query i where j + n > m + i (mla.cuh:463,
    prefill.cuh:1517, hopper/mainloop_mma.cuh:94). A row that sees no key is zero, its lse -inf.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if causal:
        hidden = torch.arange(m)[None, :] + n > m + torch.arange(n)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if m else torch.full(scores.shape[:2], -math.inf)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), (lse / math.log(2)).T
