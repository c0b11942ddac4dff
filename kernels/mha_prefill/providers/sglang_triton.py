"""The Triton kernel that SGLang prefills with where nothing else is chosen.

Read in extend_attention.py of SGLang 0.5.10, 0.5.18 and 0.5.23, in sglang/kernels/ops/attention, before in
sglang/srt/layers/attention/triton_ops, with how srt/layers/attention/triton_backend.py calls it. Untested on
hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.mha_prefill.layouts import Extended, apart_bytes
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch

# Versions without is_causal are. On ROCm the lengths make a grid without idle programs.
EXTEND = Function(
    *(f"{ops}.extend_attention.extend_attention_fwd" for ops in Sglang.ATTENTION),
    needs="q_extend k_extend v_extend o_extend k_buffer v_buffer qo_indptr kv_indptr kv_indices custom_mask "
    "mask_indptr max_len_extend sm_scale",
    wishes="is_causal k_scale v_scale extend_seq_lens_cpu",
)


class SglangExtendPrefill(Sglang):
    """`extend_attention_fwd`: cached keys through a table of rows, then the new ones, causal among those."""

    name = "sglang.triton_extend"
    requires = "SGLang of 2025 or later (its kernel takes qo_indptr and kv_indptr), CUDA or ROCm"
    symbols = (EXTEND,)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, "bf16")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Its table of rows, and the new tokens' keys and values where they stand apart from cached ones."""
        return 8 * (sizes.keys + sizes.batch) + apart_bytes(sizes)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _SglangExtendPrefill(operands, out)


def cached_rows(o: MhaPrefillOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sequence the rows of k and v that are cached: int32 [batch + 1] where they begin, and int64."""
    import torch

    begins = torch.tensor([0, *(s.prefix for s in o.sequences)], dtype=torch.int32).cumsum(0).int()
    rows = [torch.arange(s.keys.start, s.keys.start + s.prefix) for s in o.sequences]
    return begins.to(o.k.device), torch.cat(rows).to(o.k.device)


class _SglangExtendPrefill(Extended):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        o = operands
        begins, cached = cached_rows(o)
        self.attend = EXTEND.bind(
            q_extend=o.q,
            k_extend=self.k,
            v_extend=self.v,
            o_extend=out,
            k_buffer=o.k,
            v_buffer=o.v,
            qo_indptr=o.cu_q,
            kv_indptr=begins,
            kv_indices=cached,
            custom_mask=None,
            mask_indptr=None,
            max_len_extend=o.longest[0],
            sm_scale=o.scale,
            is_causal=True,
            k_scale=1.0,
            v_scale=1.0,
            extend_seq_lens_cpu=[s.new for s in o.sequences],
        )

    def call(self) -> None:
        self.attend()
