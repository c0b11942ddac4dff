"""vLLM's own kernels for MLA decode: CUTLASS's for Blackwell, as vLLM builds it; the Triton kernel that it
serves DeepSeek with on GPUs for which it has no other; and the two that it runs on x86-64 servers.

Sources: sm100_cutlass_mla_decode in _custom_ops.py and v1/attention/backends/mla/cutlass_mla.py of vLLM 0.33;
v1/attention/ops/triton_decode_attention.py and v1/attention/backends/mla/triton_mla.py of vLLM 0.32 and 0.33.
vLLM's CPU build switches Triton off, interpreted or not. The rows of GPUs are untested on hardware."""

from __future__ import annotations

import math

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.vendor import BLACKWELL, Vllm, VllmCpu, vllm_operator

# Why a row takes one query token: its backend is SINGLE_ONLY (mla_attention.py).
WHY_ONE_QUERY = "vLLM verifies drafts by its prefill path"
HEADS = 128  # heads of the output of CUTLASS's kernel; vLLM pads the query to as many
TILE = 128  # tokens that CUTLASS's kernel takes at a time: its tables are padded to whole tiles
WORKSPACE = 128 << 20  # bytes that vLLM reserves for CUTLASS's kernel when it starts
CUTLASS = Function("vllm._custom_ops.sm100_cutlass_mla_decode", positions=10)
CUTLASS_BYTES = Function(
    "vllm._custom_ops.sm100_cutlass_mla_get_workspace_size", positions=3, needs="num_kv_splits"
)


@implementation(
    "vllm.cutlass_mla",
    Vllm,
    requires="vLLM for CUDA (read at 0.33), sm_100 or sm_103",
    kinds=("cuda",),
    archs=BLACKWELL,
    symbols=(CUTLASS, CUTLASS_BYTES),
    # It takes no scales, so that an FP8 cache would need scales of 1.
    fits=takes("bf16", most_heads=HEADS, page_divides=TILE, why_most_q=WHY_ONE_QUERY),
    layout=lambda sizes: sizes.batch * math.ceil(sizes.model_len / sizes.page) * 4,
    workspace=lambda sizes: (
        WORKSPACE + layouts.cache_bytes(sizes) + sizes.batch * HEADS * 2 * (WIDTH + LATENT)
    ),
)
def cutlass(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """vLLM's first choice on Blackwell after FlashInfer's kernels. It gets a cache without NaN."""
    batch, heads = len(o.q), o.heads
    cache, padded_q = layouts.FiniteCache(o), o.q.new_zeros(batch, 1, HEADS, WIDTH)
    q = padded_q[:, :, :heads]
    q.copy_(o.q)
    padded_out = out if heads == HEADS else out.new_empty(batch, 1, HEADS, LATENT)
    no_log_sums = torch.empty(0, device=out.device)
    split_by_kernel = -1  # the kernel chooses the number of splits
    units = layouts.compute_units(out.device)
    # As in vLLM, the first argument is TILE tokens for each query token of a sequence, which is one here.
    needed_bytes = CUTLASS_BYTES.bind(TILE, batch, units, num_kv_splits=split_by_kernel)()
    room = torch.empty(max(WORKSPACE, needed_bytes), dtype=torch.uint8, device=out.device)
    # It splits a single sequence by the width of the table (set_split_kv in sm100_mla.hpp).
    table = layouts.finite_table(o, o.page, TILE // o.page, min_tokens=o.sizes.model_len)
    q_parts = layouts.latent_and_rope(padded_q[:, 0])
    outputs = (padded_out[:, 0], no_log_sums)
    call = CUTLASS.bind(*outputs, *q_parts, cache.kv, o.lengths, table, room, o.scale, split_by_kernel)
    return cache.prepared(out, call, padded_out[:, :, :heads], q)


ARGUMENTS = "q k_buffer v_buffer o req_to_token b_seq_len attn_logits num_kv_splits sm_scale page_size"
SCALES = "k_scale v_scale"
TRITON = Function(
    "vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd",
    "vllm.attention.ops.triton_decode_attention.decode_attention_fwd",
    needs=ARGUMENTS,
    wishes=f"lse is_mla {SCALES}",
)


@implementation(
    "vllm.triton",
    Vllm,
    requires="vLLM for cuda or rocm (read at 0.33; older ones as far as their signature agrees)",
    any_fp8=True,
    symbols=(TRITON,),
    # The page table of `one_token_sequences`.
    layout=lambda sizes: (
        sizes.batch * sizes.q * (math.ceil(max(sizes.lengths()) / sizes.page) + 1) * 4 if sizes.q > 1 else 0
    ),
    workspace=lambda sizes: split_bytes(sizes, sizes.model_len),
)
def triton(o: MlaDecodeOperands, out: torch.Tensor) -> Call:
    """`decode_attention_fwd`: split-KV in two kernels, into as many parts as in vLLM's graphs, which are
    recorded for the server's context length. An FP8 cache is dequantised to bf16 on the way.

    It takes one query token of each sequence. For several, vLLM makes each query token a sequence, so that
    the cache is read q times. It does so in the call of each layer, this row before timing."""
    if o.is_fp8 and not TRITON.takes("k_scale"):
        raise Unsupported(f"{TRITON.release} has no scales for an FP8 cache")
    return split_kv(o, out, TRITON, o.sizes.model_len)


def split_kv(o: MlaDecodeOperands, out: torch.Tensor, function: Function, longest: int) -> Call:
    """`decode_attention_fwd` of vLLM or AITER, with the splits of a sequence of `longest` tokens."""
    table, lengths = layouts.one_token_sequences(o)
    rows = o.packed.shape[:2]  # sequences of one query token, and heads
    splits = splits_for(longest, layouts.compute_units(o.q.device))
    cache = o.kv[:, :, None]
    # fp32 []; 1.0 on a bf16 cache too, because a call that gets no scales makes such tensors each time.
    scale = torch.tensor(o.kv_scale, dtype=torch.float32, device=o.q.device)
    return layouts.bound(
        function, o, out, k_buffer=cache, v_buffer=cache[..., :LATENT], req_to_token=table, b_seq_len=lengths,
        attn_logits=torch.empty(*rows, splits, LATENT + 1, dtype=torch.float32, device=o.q.device),
        num_kv_splits=splits, k_scale=scale, v_scale=scale, lse=o.q.new_empty(rows), is_mla=True,
    )  # fmt: skip


def split_bytes(sizes: MlaDecodeSizes, longest: int) -> int:
    """The bytes of partial results, for as many splits as the largest device makes."""
    return layouts.partial_bytes(sizes.rows * splits_for(longest, layouts.MOST_UNITS))


def splits_for(longest: int, units: int) -> int:
    """vLLM's choice (_compute_num_kv_splits of triton_mla.py): a power of two with which splits have about
    512 tokens, but at most two splits for each compute unit."""
    of_512_tokens = max(1, longest // 512)
    power_of_two = 1 << (of_512_tokens - 1).bit_length()  # the next one above
    return min(power_of_two, 2 * units)


# On CPUs

VEC = vllm_operator("mla_decode_kvcache", positions=6)
VEC_PAGE = 16  # tokens of a page, built into the kernel
AMX = vllm_operator("decode_attention_cpu", positions=17)


@implementation(
    "vllm.vec",
    VllmCpu,
    requires="vLLM's CPU build, AVX-512 with bf16",
    symbols=(VEC,),
    rebinds=True,
    stationary=lambda operands: operands.split_pages(VEC_PAGE),
    fits=takes("bf16", page_multiple_of=VEC_PAGE, why_most_q=WHY_ONE_QUERY),
)
def vec(o: MlaDecodeOperands, out: torch.Tensor, table: torch.Tensor) -> Call:
    """`mla_decode_kvcache`, of the backend CPU_MLA: one thread for each sequence."""
    return VEC.bind(out[:, 0], o.packed, o.kv.view(-1, VEC_PAGE, WIDTH), o.scale, table, o.lengths)


@implementation(
    "vllm.amx",
    VllmCpu,
    symbols=(AMX,),
    onednn_isa="AVX512_CORE_BF16",
    rebinds=True,
    # The rows of tokens, int32 [batch, tokens]; the sequences' numbers and lengths, int64 [batch].
    stationary=lambda o: (o.split_pages(1), torch.arange(len(o.q)), o.lengths.long()),
    fits=takes("bf16", why_most_q=WHY_ONE_QUERY),
    # Partial results of 64 splits at most.
    workspace=lambda sizes: layouts.partial_bytes(sizes.batch * sizes.heads * 64) + sizes.tokens * 4,
)
def amx(o: MlaDecodeOperands, out: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> Call:
    """`decode_attention_cpu` (SGLang's CPU kernel), of the backend AMX_MLA: split over the cache, with a
    combine. Built on oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""
    kv = o.kv.view(-1, 1, WIDTH)
    # As _compute_num_kv_splits of vllm/v1/attention/backends/mla/amx_mla.py of vLLM 0.32.
    splits = splits_for(max(o.host_lengths), torch.get_num_threads())
    partial = torch.zeros(len(o.packed), o.heads, splits, LATENT + 1)
    no_new_tokens = (None, None, None)  # key, value and slots: all tokens are in the cache
    arguments = (o.packed, kv, kv[..., :LATENT], out[:, 0], *no_new_tokens, partial, *tables, o.scale)
    # logit_cap, is_cross_attn, sliding_window_size, encoder_lens and sinks
    return AMX.bind(*arguments, 0.0, False, 0, None, None)
