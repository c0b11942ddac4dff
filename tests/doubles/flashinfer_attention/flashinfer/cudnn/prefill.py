"""cudnn_batch_prefill_with_kv_cache over packed q, k and v: flashinfer/cudnn/prefill.py, by the graph that
_build_prefill_graph makes. Pages, the cubin path and 4-D tensors are not doubled."""

import torch

from flashinfer.utils import FLOAT8, arch, attend, check

try:
    import cudnn

    CUDNN_AVAILABLE = True
except Exception:
    cudnn = None
    CUDNN_AVAILABLE = False


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    doubled = CUDNN_AVAILABLE and backend != "cubin" and block_tables is None and q.dim() == 3
    check(doubled, "pages and the cubin path (no cudnn to import) are not doubled", NotImplementedError)
    tokens = batch_offsets_units == "tokens"
    check(tokens or batch_offsets_units == "elements", "batch_offsets_units: elements or tokens", ValueError)
    check(actual_seq_lens_q is not None or (tokens and batch_offsets_q is not None),
          "actual_seq_lens_q may be omitted only with tokens and batch_offsets_q", ValueError)  # fmt: skip
    check(actual_seq_lens_kv is not None or (tokens and batch_offsets_k is not None),
          "actual_seq_lens_kv may be omitted only with tokens and batch_offsets_k", ValueError)  # fmt: skip
    sequences = len(batch_offsets_q) - 1 if actual_seq_lens_q is None else actual_seq_lens_q.shape[0]
    heads, d_qk, kv_heads, d_vo = *q.shape[1:], *v_cache.shape[1:]
    shape = (sequences, max_token_per_sequence, heads)
    if return_lse and lse is None:
        lse = torch.full(shape, float("nan"))
    check(lse is None or lse.shape == shape,
          "lse must have shape (num_sequences, max_token_per_sequence, h_qo)", ValueError)  # fmt: skip
    o_data_type = q.dtype if o_data_type is None else o_data_type
    if out is None:
        out = torch.full((len(q), heads, d_vo), float("nan"), dtype=o_data_type)
    if tokens:
        batch_offsets_o = batch_offsets_q if batch_offsets_o is None else batch_offsets_o
        batch_offsets_v = batch_offsets_k if batch_offsets_v is None else batch_offsets_v
    check(sequences == 1 or not (batch_offsets_q is None or batch_offsets_o is None),
          "batch_offsets_q and batch_offsets_o are required when batch_size > 1", ValueError)  # fmt: skip
    check(sequences == 1 or not (batch_offsets_k is None or batch_offsets_v is None),
          "without ragged offsets k and v are read max_sequence_kv rows apart")  # fmt: skip

    half = q.dtype in (torch.float16, torch.bfloat16)
    check(half or (q.dtype in FLOAT8 and cudnn.backend_version() >= 91701),
          "FP8 is not supported in cuDNN backend version < 9.17.1")  # fmt: skip
    check(q.dtype == k_cache.dtype == v_cache.dtype, "q, k and v have one data type")
    check(arch() in ("sm_90", "sm_100", "sm_103"), "no engine for this device")
    check((d_qk, d_vo) in ((192, 128), (128, 128)), "head_dim_qk must be 128 or 192, head_dim_vo 128")
    check(k_cache.shape == (len(v_cache), kv_heads, d_qk), f"k must be [m, {kv_heads}, {d_qk}]")
    check(heads % kv_heads == 0, "num_qo_heads must be a multiple of num_kv_heads")
    check(isinstance(scale, (int, float)), "attn_scale is baked into the graph as a number", TypeError)
    check(out.dtype == o_data_type, f"out {out.dtype} under a pointer to {o_data_type}")
    check(half or o_data_type not in FLOAT8, "FP8 output is not doubled", NotImplementedError)
    check(out.is_contiguous() and out.shape == (len(q), heads, d_vo), "o is packed rows of H * dv")
    for name, t in (("q", q), ("k", k_cache), ("v", v_cache), ("out", out), ("workspace", workspace_buffer)):
        check(t.stride(-1) == 1 and t.data_ptr() % 16 == 0, f"{name}: last stride 1, aligned to 16 bytes")
    check(not return_lse or (lse.dtype == torch.float32 and lse.is_contiguous()), "stats are packed FLOAT")
    check(batch_offsets_stats is None, "ragged statistics are not doubled", NotImplementedError)

    if half:
        check(q_scale is k_scale is v_scale is None, "the graph of 16-bit inputs has no scales")
        scales = (1.0, 1.0, 1.0)
    else:
        scales = [_one(n, t) for n, t in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))]
    # cuDNN's backend 9.24 with cudnn-frontend 1.25 reads offsets of tokens as such; the result is the same
    units = [heads * d_qk, kv_heads * d_qk, kv_heads * d_vo, heads * d_vo] if tokens else [1] * 4
    offsets = (batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o)
    starts = [_offsets(t, sequences, unit) for t, unit in zip(offsets, units, strict=True)]
    rows = _lengths("actual_seq_lens_q", actual_seq_lens_q, batch_offsets_q, max_token_per_sequence)
    cols = _lengths("actual_seq_lens_kv", actual_seq_lens_kv, batch_offsets_k, max_sequence_kv)
    check(len(rows) == len(cols), "as many lengths of keys as of queries")
    for i, (n, m) in enumerate(zip(rows, cols, strict=True)):
        lengths = (n, m, m, n)
        query, key, value, o = (
            _view(t, begin[i], length)
            for t, begin, length in zip((q, k_cache, v_cache, out), starts, lengths, strict=True)
        )
        found, base2 = attend(query, key, value, scale * scales[0] * scales[1], causal)
        o.copy_(found * scales[2])
        if return_lse:  # cuDNN's statistics are natural logarithms
            lse[i, :n] = base2 * 0.6931471805599453
    return out, (lse if return_lse else None)


def _one(name, t):
    right = isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.numel() == 1
    check(right, f"{name} is a float32 tensor of shape (1, 1, 1, 1)")
    return float(t)


def _offsets(t, sequences, unit):
    if t is None:
        return [0] * (sequences + 1)
    check(t.dtype in (torch.int32, torch.int64), "a ragged offset is INT32 or INT64")
    check(t.shape == (sequences + 1,) and t.is_contiguous(), "ragged offsets are [b + 1]")
    return (t * unit).tolist()  # in t's own type: int32 wraps


def _lengths(name, t, offsets, longest):
    if t is None:
        lengths = (offsets[1:] - offsets[:-1]).tolist()
    else:
        right = t.dtype == torch.int32 and t.shape[1:] == (1, 1, 1) and t.is_contiguous()
        check(right, f"{name} is int32 [b, 1, 1, 1]")
        lengths = t.flatten().tolist()
    check(max(lengths) <= longest, f"{name}: a sequence is longer than the graph's dim")
    return lengths


def _view(t, begin, length):
    """`length` rows from an offset in elements on, by the tensor's own strides."""
    size = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    end = begin + (length - 1) * t.stride(0) + (t.shape[1] - 1) * t.stride(1) + t.shape[2]
    check(0 <= begin and end <= size, "illegal memory access: a ragged offset beyond its buffer")
    return t.as_strided((length, *t.shape[1:]), t.stride(), t.storage_offset() + begin)
