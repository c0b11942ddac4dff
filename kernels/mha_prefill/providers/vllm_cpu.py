"""The attention kernel that SGLang and vLLM built for prefill on x86-64 servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.mha_prefill.layouts import Extended, apart_bytes
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support
from kernels.vendor import VllmCpu, vllm_operator

if TYPE_CHECKING:
    import torch

EXTEND = vllm_operator("extend_attention_cpu", positions=18)


class VllmExtendPrefill(VllmCpu):
    """`extend_attention_cpu` (SGLang's CPU kernel): cached keys through a table of rows, then the new ones,
    causal. Built on oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not. vLLM's
    backend AMX_MLA calls it absorbed, on the latents; SGLang's `intel_amx` backend as here, with heads."""

    name = "vllm.extend"
    symbols = (EXTEND,)
    onednn_isa = "AVX512_CORE_BF16"
    rebinds = True

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, "bf16")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Its table of rows, and the new tokens' keys and values where they stand apart from cached ones."""
        table = 8 * sizes.batch * max(prefix + new for prefix, new in sizes.lengths())
        return table + apart_bytes(sizes)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _VllmExtendPrefill(operands, out)


class _VllmExtendPrefill(Extended):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        import torch

        super().__init__(operands, out)
        o, sequences, (most_new, longest) = operands, operands.sequences, operands.longest
        table = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, s in zip(table, sequences, strict=True):
            row[: s.length] = torch.arange(s.keys.start, s.keys.stop)
        self.attend = EXTEND.bind(
            o.q,
            self.k,
            self.v,
            out,
            o.k,
            o.v,
            table,
            torch.arange(len(sequences)),
            torch.tensor([s.length for s in sequences]),
            torch.tensor([s.new for s in sequences]),
            o.cu_q[:-1].long(),
            most_new,
            o.scale,
            0.0,
            False,
            0,
            None,
            None,
        )

    def call(self) -> None:
        self.attend()
