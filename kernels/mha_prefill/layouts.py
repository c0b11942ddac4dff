"""What several libraries ask for: the operands by the names that they have there, new tokens apart from
cached ones, as an engine holds them, and v as wide as q and k.

Over a cached prefix vLLM attends to chunks without a mask and merges them (run_prefill_context_chunk in
v1/attention/backends/mla/prefill/{aiter_flash_attn,flashinfer,trtllm_ragged}.py of vLLM 0.33); SGLang makes
one call, as here.
"""

from __future__ import annotations

from typing import Any

from kernels.attention import needed
from kernels.binding import Function
from kernels.lazy import torch
from kernels.mha_prefill.operands import GUARD, VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, guarded
from kernels.op import Call, Prepared

# What a call of FlashAttention's `flash_attn_varlen_func` needs by name, and of AITER's after it.
VARLEN = "q k v softmax_scale cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal"
DESCALES = "q_descale k_descale v_descale"


def bound(
    function: Function, o: MhaPrefillOperands, out: torch.Tensor | None = None, /, **further: Any
) -> Call:
    """The call of a library's function with the operands that it needs, and with further arguments, which
    replace those below. All libraries align the causal mask to the last key."""
    (most_new, longest), heads = o.sizes.longest, o.q.shape[1]
    usual = {
        "q query Q q_extend": o.q,
        "k key K k_buffer": o.k,
        "v value V v_buffer": o.v,
        "out output o_extend": out,
        "softmax_scale sm_scale": o.scale,
        "causal is_causal": True,
        "cu_seqlens_q qo_indptr seqstart_q cum_seq_lens_q": o.cu_q,
        "cu_seqlens_k kv_indptr seqstart_k cum_seq_lens_kv": o.cu_k,
        "max_seqlen_q max_q_len max_qlen max_len_extend max_token_per_sequence": most_new,
        "max_seqlen_k max_kv_len max_sequence_kv": longest,
        "batch_size": len(o.sequences),
        "num_qo_heads num_kv_heads num_head_k num_heads_k": heads,
        "head_dim_qk": WIDTH,
        "head_dim_vo": VALUE,
        "q_data_type kv_data_type": o.q.dtype,
        "q_descale q_scale": o.q_descale,
        "k_descale k_scale": o.k_descale,
        "v_descale v_scale": o.v_descale,
    }
    return function.bind(**needed(function, usual) | further)


def varlen(
    o: MhaPrefillOperands, function: Function, v: torch.Tensor | None = None, **further: Any
) -> Prepared:
    """One call on all sequences with cumulative lengths, which allocates its output. v: in another layout"""
    v = o.v if v is None else v
    return Prepared(o, None, bound(function, o, v=v, **further), inputs=reading(o, v), result=of_values)


def reading(o: MhaPrefillOperands, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """The live operands of a call that reads v in a layout of its own."""
    return o.live_tensors() | {"v": v[..., :VALUE]}


def of_values(returned: Any) -> torch.Tensor:
    """The output that a library returned, some versions with the sums of exponentials."""
    output: torch.Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return output[..., :VALUE]


def allocated_bytes(sizes: MhaPrefillSizes, width: int = VALUE) -> int:
    """The bytes of an output that a call allocates, and of a sum of exponentials for each row."""
    return sizes.queries * sizes.heads * (width * 2 + 4)


def padded(v: torch.Tensor) -> torch.Tensor:
    """v as wide as q and k, filled up with zeros, for kernels that take one head size only."""
    wide = guarded((*v.shape[:2], WIDTH), v.device, v.dtype).zero_()
    wide[..., :VALUE] = v
    return wide


def padded_bytes(sizes: MhaPrefillSizes) -> int:
    return (sizes.keys + 2 * GUARD) * sizes.heads * WIDTH * 2


def new_tokens(o: MhaPrefillOperands) -> tuple[torch.Tensor, torch.Tensor, Call]:
    """k and v of the new tokens, [T, heads, width]: the canonical tensors where no token is cached, else
    copies, as an engine holds them apart from its cache; and a function that makes the copies anew."""
    if len(o.k) == len(o.q):
        return o.k, o.v, lambda: None
    rows = torch.cat([torch.arange(s.keys.stop - s.new, s.keys.stop) for s in o.sequences]).to(o.k.device)
    k, v = o.k[rows], o.v[rows]

    def copy() -> None:
        k.copy_(o.k[rows])
        v.copy_(o.v[rows])

    return k, v, copy


def new_tokens_bytes(sizes: MhaPrefillSizes) -> int:
    """The bytes of those copies."""
    copied = sizes.queries if sizes.keys > sizes.queries else 0
    return copied * sizes.heads * (WIDTH + VALUE) * 2
