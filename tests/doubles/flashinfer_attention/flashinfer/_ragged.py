"""trtllm_ragged_attention_deepseek: flashinfer/prefill.py:4722-5286; its kernels by
csrc/trtllm_fmha_kernel_launcher.cu:683 (trtllm-gen) and attention/cute_dsl/fmha.py (cute-dsl)."""

from itertools import pairwise

import torch

from flashinfer.utils import FLOAT8, arch, attend, check, vectors

DIMS = ((192, 192, 128), (128, 128, 128), (256, 256, 256))


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    plain = attention_sinks is None and not skip_softmax_threshold_scale_factor and window_left == -1
    plain = plain and not any(num_elts_per_sage_attn_blk) and all(s is None for s in sage_attn_sfs)
    plain = plain and not use_fp16_softmax and not uses_spcompress
    check(plain, "sinks, windows, SageAttention and sparsity are not doubled", NotImplementedError)
    dims = (query.shape[2], key.shape[2], value.shape[2])
    check(dims in DIMS, f"Unsupported head dimensions: query={dims[0]}, key={dims[1]}", AssertionError)
    shape = (*query.shape[:2], value.shape[2])
    if out is None:
        narrow = query.dtype in (*FLOAT8, torch.int8)
        out = torch.full(shape, float("nan"), dtype=torch.bfloat16 if narrow else query.dtype)
    else:
        check(tuple(out.shape) == shape, f"out must have shape {shape}, got {tuple(out.shape)}", ValueError)
        check(not (query.dtype in FLOAT8 and out.dtype in FLOAT8), "FP8 output is not supported", ValueError)
    if return_lse and lse is None:
        lse = torch.full(query.shape[:2], float("nan"))
    check(query.shape[1] % key.shape[1] == 0, "num_qo_heads must be a multiple of num_kv_heads")
    check(key.shape[:2] == value.shape[:2], "value is read by the offsets and heads of key")
    check(arch() in ("sm_100", "sm_103"), "no kernel image is available for this device")
    rows, keys = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    check(len(rows) == len(keys), "the offsets of queries and of keys are equally many")
    for name, starts, x, longest in (("q", rows, query, max_q_len), ("kv", keys, key, max_kv_len)):
        check(starts == sorted(starts), f"cum_seq_lens_{name} decreases")
        check(starts[-1] <= len(x), f"illegal memory access: cum_seq_lens_{name} leads beyond its tensor")
        length = max(_differences(starts))
        check(length <= longest, f"max_{name}_len {longest} is less than a sequence of {length}")
    if backend == "cute-dsl":  # seq_lens, batch_size, workspace_buffer and o_sf_scale are not read
        lse = lse if return_lse else None
        _cute_dsl(query, key, value, out, lse, (bmm1_scale, bmm2_scale))
    else:  # by any other name (:4956)
        check(isinstance(o_sf_scale, (int, float)), "o_sf_scale is a float", TypeError)
        right = type(batch_size) is int and len(rows) == batch_size + 1
        check(right, "batch_size sequences are read, and one offset more")
        for name, t in (("q", cum_seq_lens_q), ("kv", cum_seq_lens_kv)):
            check(_ints(t), f"cum_seq_lens_{name} is read as contiguous int32")
        # the launcher casts its pointer to int*, and the kernel bounds the keys by it
        check(_ints(seq_lens), "seq_lens is read as contiguous int32")
        check(seq_lens.tolist() == _differences(keys), "seq_lens are not the lengths of cum_seq_lens_kv")
        _cpu_lengths(q_seq_lens_cpu, kv_seq_lens_cpu, rows, keys)
        slots = query.shape[1] * batch_size * -(-max_q_len // 256) * 256
        room = workspace_buffer.numel() * workspace_buffer.element_size()
        enough = lse is None or room >= 8 * slots + (1 << 20)
        check(enough, "Buffer overflow when allocating memory for trtllm_gen_softmax_workspace")
        _trtllm_gen(query, key, value, out, lse)
    factors = _scale(bmm1_scale), _scale(bmm2_scale)
    for i in range(len(rows) - 1):
        at, seen = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        o, base2 = attend(query[at], key[seen], value[seen], factors[0], is_causal)
        out[at] = (o * factors[1]).to(out.dtype)
        if lse is not None:
            lse[at] = base2  # lse.cuh:45, cute_dsl/attention/fmha/fmha.py:3098
    return (out, lse) if return_lse else out


def _trtllm_gen(query, key, value, out, lse):
    """The launcher: q has no strides in it (kernelParams.h:237 takes H * d), k and v have; o is packed."""
    types = (query.dtype, key.dtype, value.dtype)
    wide = (torch.float16, torch.bfloat16)
    kinds = [(t, t) for t in wide] + [(torch.float8_e4m3fn, t) for t in wide]
    known = len(set(types)) == 1 and (query.dtype, out.dtype) in kinds
    check(known, f"Missing TRTLLM-GEN kernel ragged attention: {types} to {out.dtype}")
    check(query.is_contiguous(), "q is read as packed rows of H * d")
    check(out.is_contiguous(), "out is written as packed rows of H * dv")
    for name, t in (("query", query), ("key", key), ("value", value), ("out", out)):
        vectors(t, name)
    if lse is not None:  # written whether or not it is asked for
        check(lse.dtype == torch.float32, "lse must be a float32 tensor")
        check(lse.dim() == 2, "lse must be a 2D tensor")
        check(lse.shape == query.shape[:2], "illegal memory access: lse is [tokens, heads]")


def _cute_dsl(query, key, value, out, lse, scales):
    """flashinfer/attention/cute_dsl/fmha.py cute_dsl_fmha_ragged_prefill."""
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    check(query.dtype in dtypes, f"cute-dsl backend only supports {dtypes}", AssertionError)
    numbers = not any(isinstance(scale, torch.Tensor) for scale in scales)
    check(numbers, "cute-dsl backend does not support device tensor scales", AssertionError)
    check(query.dtype == key.dtype, "cute-dsl FMHA requires q.dtype == k.dtype", ValueError)
    check(value.dtype in dtypes and out.dtype in dtypes, "Unsupported pv_dtype or out_dtype", KeyError)
    # flashinfer/cute_dsl/attention/fmha/fmha.py:3149 and :3157; get_cute_dsl_fmha_kernel: "192 only
    # supports FP8". Compiled for 16 bits, SharedStorage (:629) would take 64 KiB of o, 96 of q, 96 of k
    dim = query.shape[2]
    check(dim in (128, 192), "Unsupported head dimension", NotImplementedError)
    wide = dim == 192 and query.dtype != torch.float8_e4m3fn
    check(not wide, "unimplemented dtypes for headdim 192", NotImplementedError)
    check(out.data_ptr() % 32 == 0, "o must be 32-byte aligned", AssertionError)
    for name, t in (("q", query), ("k", key), ("v", value), ("o", out)):
        check(t.is_contiguous(), f"{name}: compile.py compiles for compact tensors")
        check(t.data_ptr() % 16 == 0, f"{name}: compiled for an alignment of 16")
    if lse is not None:
        right = lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == query.shape[:2]
        check(right, "lse is compiled as compact float32 [1, tokens, h_k, h_r]")


def _differences(starts):
    return [b - a for a, b in pairwise(starts)]


def _ints(t):
    return t.dtype == torch.int32 and t.is_contiguous() and t.dim() == 1


def _scale(scale):
    """A float, or the one at a float32 tensor's pointer (bmm1's is multiplied by log2 e on the way)."""
    if isinstance(scale, torch.Tensor):
        check(scale.dtype == torch.float32, "a scale tensor is float32", AssertionError)
        check(scale.numel() == 1, "one scale is read")
        return float(scale)
    check(isinstance(scale, (int, float)), "a scale must be either a double or a tensor", TypeError)
    return float(scale)


def _cpu_lengths(of_q, of_kv, rows, keys):
    """_validate_cpu_seq_lens."""
    both = (of_q is None) == (of_kv is None)
    check(both, "q_seq_lens_cpu and kv_seq_lens_cpu must be provided together", ValueError)
    for name, t, starts in (("q", of_q, rows), ("kv", of_kv, keys)) if of_q is not None else ():
        integers = t.dtype in (torch.int32, torch.int64)
        check(integers, f"{name}_seq_lens_cpu must have dtype torch.int32 or torch.int64", ValueError)
        right = t.tolist() == _differences(starts)
        check(right, f"{name}_seq_lens_cpu are not the lengths of the offsets", ValueError)
