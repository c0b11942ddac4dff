"""SGLang's Triton kernel for MLA decode, its default on GPUs without a kernel of their own.

Sources: sglang/kernels/ops/attention/decode_attention.py and metadata.py of SGLang 0.5.23, and how its
sglang/srt/layers/attention/triton_backend.py calls them; sglang/srt/layers/attention/triton_ops, where they
were before, of SGLang 0.5.10. The "lean" kernel for long sequences on ROCm is not asked for. Untested on
hardware.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.op import Call, Unsupported, implementation
from kernels.platform import of
from kernels.vendor import BLACKWELL, Sglang

WITH_PDL = ("sm_90", *BLACKWELL, "sm_120")
"""Architectures on which a kernel may begin before the previous one ends (is_arch_support_pdl of
sgl_kernel/utils.py)."""

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


def workspace(sizes: MlaDecodeSizes) -> int:
    # The device with the most units has the lower cap of all devices.
    splits = most_splits(sizes.model_len, layouts.MOST_UNITS, "gfx942")
    return layouts.partial_bytes(sizes.batch * sizes.heads * splits)


@implementation(
    "sglang.triton",
    Sglang,
    requires="SGLang for cuda or rocm (read at 0.5.23; older ones as far as their signature agrees)",
    activations="fp8",
    any_fp8=True,
    symbols=(DECODE, SCHEDULE),
    fits=takes(),
    layout=lambda sizes: (sizes.tokens + layouts.SLACK) * (4 + 8),
    workspace=workspace,
)
def triton(o: MlaDecodeOperands, out: torch.Tensor) -> Call:
    """`decode_attention_fwd`: split-KV in two kernels. SGLang's scheduler kernel chooses the splits of each
    sequence and looks whether lengths differ (sequences then change places on ROCm); it runs before timing.
    On an FP8 cache the softmax weights are rounded to FP8."""
    if o.is_fp8 and not DECODE.takes("k_scale"):
        raise Unsupported(f"{DECODE.release} has no scales for an FP8 cache")
    device = o.q.device
    platform, cores = of(device), layouts.compute_units(device)
    batch, heads = len(o.q), o.heads
    most = most_splits(o.sizes.model_len, cores, platform.arch)
    partial = torch.empty(batch, heads, most, LATENT, dtype=torch.float32, device=device)
    uneven = torch.zeros(1, dtype=torch.int32, device=device)
    # The splits, int32 [batch], by SGLang's own kernel, which also notes in `uneven` if lengths differ.
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    launched = SimpleNamespace(get_num_kv_splits_triton=SCHEDULE.find()[(1,)])
    given = (counts, o.lengths, batch, 1, heads, 1, most, cores)
    room = max(256, power_of_two(batch))
    SCHEDULE.bind(*given, of=launched, MAX_NUM_SEQ=room, uneven_batch_ptr=uneven)()
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
        k_scale=o.kv_scale,
        v_scale=o.kv_scale,
        has_mla=True,
        use_pdl=platform.arch in WITH_PDL,
        uneven_batch=uneven,
    )


def most_splits(model_len: int, cores: int, arch: str) -> int:
    """SGLang's cap, by the server's context length, in graphs and without (_mla_decode_kv_splits_cap of
    triton_backend.py). The least, 8, is the server's --triton-attention-num-kv-splits."""
    cap = max(8, min(power_of_two(cores), power_of_two(math.ceil(model_len / 32))))
    return min(cap, 256) if arch == "gfx942" else cap


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
