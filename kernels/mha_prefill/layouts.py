"""What the rows of several libraries share: arguments by the libraries' names, the new tokens apart from the
cached ones, as an engine holds them, and v as wide as q and k.

One call attends to cached and new tokens, as in SGLang. vLLM attends to chunks of the cached tokens without a
mask, and merges the results (run_prefill_context_chunk in
v1/attention/backends/mla/prefill/{aiter_flash_attn,flashinfer,trtllm_ragged}.py of vLLM 0.33)."""

from __future__ import annotations

from typing import Any

from kernels.attention import arguments_of
from kernels.binding import Function
from kernels.lazy import torch
from kernels.mha_prefill.operands import GUARD, VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, guarded
from kernels.op import Call, Prepared

# The arguments of FlashAttention's `flash_attn_varlen_func`, and of AITER's, which follows it.
VARLEN = "q k v softmax_scale cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal"
DESCALES = "q_descale k_descale v_descale"


def bound(
    function: Function, o: MhaPrefillOperands, out: torch.Tensor | None = None, /, **further: Any
) -> Call:
    """The call of a library's function with the arguments below that it declares, and with `further` ones,
    which take precedence. All libraries align the causal mask to the last key."""
    by_names = {  # a key holds all names that libraries have for its value
        "q query Q q_extend": o.q,
        "k key K k_buffer": o.k,
        "v value V v_buffer": o.v,
        "out output o_extend": out,
        "softmax_scale sm_scale": o.scale,
        "causal is_causal": True,
        "cu_seqlens_q qo_indptr seqstart_q cum_seq_lens_q": o.cu_q,
        "cu_seqlens_k kv_indptr seqstart_k cum_seq_lens_kv": o.cu_k,
        "max_seqlen_q max_q_len max_qlen max_len_extend max_token_per_sequence": o.sizes.most_new,
        "max_seqlen_k max_kv_len max_sequence_kv": o.sizes.most_keys,
        "batch_size": len(o.sequences),
        "num_qo_heads num_kv_heads num_head_k num_heads_k": o.sizes.heads,
        "head_dim_qk": WIDTH,
        "head_dim_vo": VALUE,
        "q_data_type kv_data_type": o.q.dtype,
        "q_descale q_scale": o.q_descale,
        "k_descale k_scale": o.k_descale,
        "v_descale v_scale": o.v_descale,
    }
    return function.bind(**arguments_of(function, by_names) | further)


def varlen(
    o: MhaPrefillOperands, function: Function, v: torch.Tensor | None = None, **further: Any
) -> Prepared:
    """One call on all sequences with cumulative lengths, which allocates its output. v: such as `padded`"""
    v = o.v if v is None else v
    return Prepared(o, None, bound(function, o, v=v, **further), inputs=inputs_with(o, v), result=output_of)


def inputs_with(o: MhaPrefillOperands, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """`inputs` of a Prepared whose call reads v here, and q and k where they are."""
    return o.live_tensors() | {"v": v[..., :VALUE]}


def output_of(returned: Any) -> torch.Tensor:
    """The output [T, heads, 128] among what a call returned, in some versions with the log-sums."""
    output: torch.Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return output[..., :VALUE]


def allocated_bytes(sizes: MhaPrefillSizes, width: int = VALUE) -> int:
    """The bytes of an output of this width that a call allocates, and of a sum of exponentials per row."""
    return sizes.queries * sizes.heads * (width * 2 + 4)


def padded(v: torch.Tensor) -> torch.Tensor:
    """v as wide as q and k, filled up with zeros, for kernels that take one head size only."""
    wide = guarded((*v.shape[:2], WIDTH), v.device, v.dtype).zero_()
    wide[..., :VALUE] = v
    return wide


def padded_bytes(sizes: MhaPrefillSizes) -> int:
    return (sizes.keys + 2 * GUARD) * sizes.heads * WIDTH * 2


def new_tokens(o: MhaPrefillOperands) -> tuple[torch.Tensor, torch.Tensor, Call]:
    """k and v of the new tokens, [T, heads, width], and a function that updates them after `load`. Where
    tokens are cached, k and v are copies, as an engine holds them apart from its cache."""
    if len(o.k) == len(o.q):
        return o.k, o.v, lambda: None
    rows = torch.cat([torch.arange(s.keys.stop - s.new, s.keys.stop) for s in o.sequences]).to(o.k.device)
    k, v = o.k[rows], o.v[rows]

    def update() -> None:
        k.copy_(o.k[rows])
        v.copy_(o.v[rows])

    return k, v, update


def new_tokens_bytes(sizes: MhaPrefillSizes) -> int:
    copied_tokens = sizes.queries if sizes.keys > sizes.queries else 0
    return copied_tokens * sizes.heads * (WIDTH + VALUE) * 2
