"""SGLang's Triton kernels for MLA decode, its default on GPUs without a kernel of their own.

Sources: decode_attention.py, extend_attention.py and metadata.py in sglang/kernels/ops/attention of SGLang
0.5.23, and how its sglang/srt/layers/attention/triton_backend.py calls them; in
sglang/srt/layers/attention/triton_ops, where they were before, of SGLang 0.5.10. The "lean" kernel for long
sequences on ROCm, which a server runs only if it is told to, is left out. Untested on hardware; interpreted,
extend_attention.py was right on a bf16 cache."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.platform import of
from kernels.vendor import BLACKWELL, Sglang, extend_attention

# Architectures on which a kernel may begin before the previous one ends, by programmatic dependent launch
# (is_arch_support_pdl of sgl_kernel/utils.py).
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
    """The bytes of partial results, or with several query tokens of the mask and of these tokens' keys."""
    if sizes.q > 1:
        return sizes.q * (sizes.tokens + sizes.batch * WIDTH * 2)
    # An MI300X, which has the most units, is gfx942; the cap of no other device is larger.
    splits = most_splits(sizes.model_len, layouts.MOST_UNITS, "gfx942")
    return layouts.partial_bytes(sizes.batch * sizes.heads * splits)


@implementation(
    "sglang.triton",
    Sglang,
    requires="SGLang for cuda or rocm (read at 0.5.23; older ones as far as their signature agrees)",
    activations="fp8",
    any_fp8=True,
    symbols=(DECODE, SCHEDULE, EXTEND),
    layout=lambda sizes: (sizes.tokens + layouts.SLACK) * (4 + 8),  # the page list, int32 and then int64
    workspace=workspace,
)
def triton(o: MlaDecodeOperands, out: torch.Tensor) -> Call | Prepared:
    """`decode_attention_fwd`: split-KV in two kernels. SGLang's scheduler kernel, which runs before timing,
    chooses the splits of each sequence and notes whether lengths differ (the decode kernel then takes the
    sequences in another order on ROCm). On an FP8 cache the softmax weights are rounded to FP8.

    With several query tokens of a sequence it is `extend_attention_fwd`: one kernel without splits. That
    holds for gfx950 too, where verify_splitkv.py leaves MLA to it (can_handle)."""
    function = DECODE if o.sizes.q == 1 else EXTEND
    if o.is_fp8 and not function.takes("k_scale"):
        raise Unsupported(f"{function.release} has no scales for an FP8 cache")
    if function is EXTEND:
        return verify(o, out)
    device = o.q.device
    batch = len(o.q)
    arch = of(device).arch
    units = layouts.compute_units(device)
    most = most_splits(o.sizes.model_len, units, arch)
    partial = torch.empty(batch, o.heads, most, LATENT, dtype=torch.float32, device=device)
    splits = torch.empty(batch, dtype=torch.int32, device=device)
    uneven = torch.zeros(1, dtype=torch.int32, device=device)
    # A Triton kernel is called as kernel[grid](...), here on a grid of one program. `bind` calls functions or
    # methods of objects, so that kernel[grid] is made a method.
    one_program = SimpleNamespace(get_num_kv_splits_triton=SCHEDULE.find()[(1,)])
    query_tokens = cache_heads = 1
    arguments = (splits, o.lengths, batch, query_tokens, o.heads, cache_heads, most, units)
    most_sequences = max(256, power_of_two(batch))
    SCHEDULE.bind(*arguments, method_of=one_program, MAX_NUM_SEQ=most_sequences, uneven_batch_ptr=uneven)()
    cache = o.kv.view(-1, 1, WIDTH)  # [slots, 1, 576]: SGLang addresses tokens, of one head
    return layouts.bound(
        DECODE,
        o,
        out,
        k_buffer=cache,
        v_buffer=cache[..., :LATENT],
        kv_indptr=layouts.page_starts(o, 1),
        # The kernel multiplies them by 576, which from 3.7 million slots on exceeds int32.
        kv_indices=layouts.page_list(o, 1).long(),
        attn_logits=partial,
        attn_lse=torch.empty_like(partial[..., 0]),
        num_kv_splits=splits,
        max_kv_splits=most,
        has_mla=True,
        use_pdl=arch in WITH_PDL,
        uneven_batch=uneven,
    )


def verify(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """The call with several query tokens. The kernel takes the keys of the query tokens as bf16, in a tensor
    of their own, and all keys before them from the cache. A mask says which keys each query token sees."""
    device = o.q.device
    queries = o.sizes.q
    slots_of_sequences = [o.token_slots(i) for i in range(len(o.host_lengths))]
    new_slots = torch.cat([slots[-queries:] for slots in slots_of_sequences])
    new_keys = o.q.new_empty(len(new_slots), 1, WIDTH)

    def copy_new_keys() -> None:
        # As bytes, because indexing does not take FP8.
        rows = o.kv.view(-1, WIDTH).view(torch.uint8)[new_slots].view(o.kv.dtype)
        new_keys.copy_((rows.float() * o.kv_scale)[:, None])

    copy_new_keys()
    cached_starts = [0, *itertools.accumulate(length - queries for length in o.host_lengths)]
    masks = [torch.ones(queries, n, dtype=torch.uint8).tril(n - queries).flatten() for n in o.host_lengths]
    mask_starts = [0, *itertools.accumulate(map(len, masks))]
    cache = o.kv.view(-1, 1, WIDTH)
    attend = layouts.bound(
        EXTEND,
        o,
        out,
        k_extend=new_keys,
        v_extend=new_keys[..., :LATENT],
        k_buffer=cache,
        v_buffer=cache[..., :LATENT],
        kv_indptr=torch.tensor(cached_starts, dtype=torch.int32, device=device),
        kv_indices=torch.cat([slots[:-queries] for slots in slots_of_sequences]),
        custom_mask=torch.cat(masks).to(device),
        mask_indptr=torch.tensor(mask_starts, device=device),
        is_causal=True,
    )
    return Prepared(o, out, attend, after_load=copy_new_keys)


def most_splits(model_len: int, units: int, arch: str) -> int:
    """SGLang's cap on the splits of a sequence, by the server's context length, the same with and without
    graphs (_mla_decode_kv_splits_cap of triton_backend.py). It is at least 8, the default of the server's
    --triton-attention-num-kv-splits. units: compute units of the device"""
    cap = max(8, min(power_of_two(units), power_of_two(math.ceil(model_len / 32))))
    return min(cap, 256) if arch == "gfx942" else cap


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
