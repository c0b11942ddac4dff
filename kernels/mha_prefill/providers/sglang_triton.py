"""The Triton kernel that SGLang prefills with where no other one is chosen.

Read in extend_attention.py of SGLang 0.5.10, 0.5.18 and 0.5.23, which is in sglang/kernels/ops/attention, and
in older versions in sglang/srt/layers/attention/triton_ops, with how
srt/layers/attention/triton_backend.py calls it. Untested on hardware."""

from __future__ import annotations

from kernels.lazy import torch
from kernels.mha_prefill.layouts import bound, new_tokens, new_tokens_bytes
from kernels.mha_prefill.operands import MhaPrefillOperands, takes
from kernels.op import Prepared, implementation
from kernels.vendor import Sglang, extend_attention

EXTEND = extend_attention()


@implementation(
    "sglang.triton_extend",
    Sglang,
    requires="SGLang of 2025 or later (its kernel takes qo_indptr and kv_indptr), CUDA or ROCm",
    symbols=(EXTEND,),
    fits=takes("bf16"),
    # The rows of cached keys, and copies of the new tokens' keys and values.
    workspace=lambda sizes: 8 * (sizes.keys + sizes.batch) + new_tokens_bytes(sizes),
)
def extend(o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
    """`extend_attention_fwd`: first the cached keys, whose rows a list gives, then the new ones, causal."""
    k, v, update = new_tokens(o)
    begins = torch.tensor([0, *(s.prefix for s in o.sequences)]).cumsum(0).int().to(o.k.device)
    cached_rows = [torch.arange(s.keys.start, s.keys.start + s.prefix) for s in o.sequences]
    of_cached = {"kv_indptr": begins, "kv_indices": torch.cat(cached_rows).to(o.k.device)}
    of_new = {"k_extend": k, "v_extend": v, "extend_seq_lens_cpu": [s.new for s in o.sequences]}
    fixed = {"custom_mask": None, "mask_indptr": None, "k_scale": 1.0, "v_scale": 1.0}
    attend = bound(EXTEND, o, out, **of_cached, **of_new, **fixed)
    return Prepared(o, out, attend, after_load=update)
