"""SGLang's Triton kernels for MLA decode, its default on GPUs without a kernel of their own.

Sources: decode_attention.py, extend_attention.py and metadata.py in sglang/kernels/ops/attention of SGLang
0.5.23, and how its sglang/srt/layers/attention/triton_backend.py calls them; in
sglang/srt/layers/attention/triton_ops, where they were before, of SGLang 0.5.10. The "lean" kernel for long
sequences on ROCm is not asked for. Untested on hardware; extend_attention.py was right interpreted, on a bf16
cache.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, MOST_QUERIES, WIDTH, MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.platform import of
from kernels.vendor import BLACKWELL, Sglang, extend_attention

# Where a kernel may begin before the previous one ends (is_arch_support_pdl of sgl_kernel/utils.py).
WITH_PDL = ("sm_90", *BLACKWELL, "sm_120")

DECODE = Function(
    *(f"{ops}.decode_attention.decode_attention_fwd" for ops in Sglang.ATTENTION),
    needs="q k_buffer v_buffer o kv_indptr kv_indices attn_logits attn_lse num_kv_splits max_kv_splits "
    "sm_scale",
    wishes="k_scale v_scale has_mla use_pdl uneven_batch",
)
SCHEDULE = Function(
    *(f"{ops}.metadata.get_num_kv_splits_triton" for ops in Sglang.ATTENTION),
    "sglang.srt.layers.attention.triton_backend.get_num_kv_splits_triton",
    positions=8,
    needs="MAX_NUM_SEQ",
    wishes="uneven_batch_ptr",
)
EXTEND = extend_attention(when="q>1")


def workspace(sizes: MlaDecodeSizes) -> int:
    if sizes.q > 1:  # the mask, keys of the query tokens
        return sizes.q * (sizes.tokens + sizes.batch * WIDTH * 2)
    # The device with the most units has the lower cap of all devices.
    splits = most_splits(sizes.model_len, layouts.MOST_UNITS, "gfx942")
    return layouts.partial_bytes(sizes.batch * sizes.heads * splits)


@implementation(
    "sglang.triton",
    Sglang,
    requires="SGLang for cuda or rocm (read at 0.5.23; older ones as far as their signature agrees)",
    activations="fp8",
    any_fp8=True,
    symbols=(DECODE, SCHEDULE, EXTEND),
    fits=takes(most_q=MOST_QUERIES),
    layout=lambda sizes: (sizes.tokens + layouts.SLACK) * (4 + 8),
    workspace=workspace,
)
def triton(o: MlaDecodeOperands, out: torch.Tensor) -> Call | Prepared:
    """`decode_attention_fwd`: split-KV in two kernels. SGLang's scheduler kernel chooses the splits of each
    sequence and looks whether lengths differ (sequences then change places on ROCm); it runs before timing.
    On an FP8 cache the softmax weights are rounded to FP8.

    Where a sequence has several query tokens, `extend_attention_fwd` in one kernel, without splits; on gfx950
    too, where verify_splitkv.py leaves MLA to it (can_handle)."""
    function = DECODE if o.sizes.q == 1 else EXTEND
    if o.is_fp8 and not function.takes("k_scale"):
        raise Unsupported(f"{function.release} has no scales for an FP8 cache")
    if function is EXTEND:
        return verify(o, out)
    device = o.q.device
    batch = len(o.q)
    arch = of(device).arch
    cores = layouts.compute_units(device)
    most = most_splits(o.sizes.model_len, cores, arch)
    partial = torch.empty(batch, o.heads, most, LATENT, dtype=torch.float32, device=device)
    uneven = torch.zeros(1, dtype=torch.int32, device=device)
    # The splits, int32 [batch], by SGLang's own kernel, which also notes in `uneven` if lengths differ.
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    # A Triton kernel is called through the grid that launches it: here with one program.
    one_program = SimpleNamespace(get_num_kv_splits_triton=SCHEDULE.find()[(1,)])
    query_tokens = cache_heads = 1
    given = (counts, o.lengths, batch, query_tokens, o.heads, cache_heads, most, cores)
    most_sequences = max(256, power_of_two(batch))
    SCHEDULE.bind(*given, method_of=one_program, MAX_NUM_SEQ=most_sequences, uneven_batch_ptr=uneven)()
    cache = o.kv.view(-1, 1, WIDTH)  # [slots, 1, 576]: SGLang addresses tokens, of one head
    return layouts.bound(
        DECODE,
        o,
        out,
        k_buffer=cache,
        v_buffer=cache[..., :LATENT],
        kv_indptr=layouts.page_starts(o, 1),
        # int32 ends at 3.7 million slots: the kernel multiplies by 576.
        kv_indices=layouts.page_list(o, 1).long(),
        attn_logits=partial,
        attn_lse=torch.empty_like(partial[..., 0]),
        num_kv_splits=counts,
        max_kv_splits=most,
        has_mla=True,
        use_pdl=arch in WITH_PDL,
        uneven_batch=uneven,
    )


def verify(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """The kernel takes the keys of the query tokens as bf16, in a tensor of their own, and all keys before
    them from the cache. A mask says which keys each query token sees."""
    device = o.q.device
    queries = o.sizes.q
    slots_of_sequences = [o.token_slots(i) for i in range(len(o.host_lengths))]
    new_slots = torch.cat([slots[-queries:] for slots in slots_of_sequences])
    new = o.q.new_empty(len(new_slots), 1, WIDTH)

    def copy() -> None:
        # As bytes, because indexing does not take FP8.
        rows = o.kv.view(-1, WIDTH).view(torch.uint8)[new_slots].view(o.kv.dtype)
        new.copy_((rows.float() * o.kv_scale)[:, None])

    copy()
    masks = []
    cached_ends = [0]
    mask_ends = [0]
    for length in o.host_lengths:
        mask = torch.ones(queries, length, dtype=torch.uint8).tril(length - queries)
        masks.append(mask.flatten())
        mask_ends.append(mask_ends[-1] + mask.numel())
        cached_ends.append(cached_ends[-1] + length - queries)
    cache = o.kv.view(-1, 1, WIDTH)
    attend = layouts.bound(
        EXTEND,
        o,
        out,
        k_extend=new,
        v_extend=new[..., :LATENT],
        k_buffer=cache,
        v_buffer=cache[..., :LATENT],
        kv_indptr=torch.tensor(cached_ends, dtype=torch.int32, device=device),
        kv_indices=torch.cat([slots[:-queries] for slots in slots_of_sequences]),
        custom_mask=torch.cat(masks).to(device),
        mask_indptr=torch.tensor(mask_ends, device=device),
        is_causal=True,
    )
    return Prepared(o, out, attend, after_load=copy)


def most_splits(model_len: int, cores: int, arch: str) -> int:
    """SGLang's cap by the server's context length, which is the same with and without graphs
    (_mla_decode_kv_splits_cap of triton_backend.py). It is at least 8, the default of the server's
    --triton-attention-num-kv-splits."""
    cap = min(power_of_two(cores), power_of_two(math.ceil(model_len / 32)))
    cap = max(8, cap)
    return min(cap, 256) if arch == "gfx942" else cap


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
