"""What vLLM itself runs for MLA prefill on CPUs: dense attention in torch, one request after the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch


class Dense(Vllm):
    """`CPUSDPAMLAPrefillBackend._ragged_sdpa` of vLLM 0.32: the scores of all heads in fp32, written out."""

    name = "vllm.dense"
    requires = "vLLM's CPU build"
    kinds = ("cpu",)
    allocates = True
    rebinds = True

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        fresh = need(all(prefix == 0 for prefix, _ in sizes.lengths()), "takes no cached prefix")
        return Support.all_of(takes(sizes, "bf16"), fresh)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Scores, mask and probabilities of the longest sequence, its operands in fp32, the output twice."""
        longest = max(new for _, new in sizes.lengths())
        scores = longest * longest * (3 * 4 * sizes.heads + 1)
        return (
            scores
            + longest * sizes.heads * 4 * (2 * WIDTH + 3 * VALUE)
            + 4 * sizes.queries * sizes.heads * VALUE
        )

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        try:
            from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend as Backend
        except ImportError as error:
            raise Unsupported(f"vllm has no prefill backend for CPUs: {error}") from error
        if not hasattr(Backend, "_ragged_sdpa"):
            raise Unsupported("this vllm's prefill backend for CPUs is another one (0.32 has it)")
        return _Dense(operands, Backend._ragged_sdpa)


class _Dense(Prepared):
    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__(operands, None)
        self.attend, self.backend = attend, SimpleNamespace(scale=operands.score_scale)

    def call(self) -> None:
        o = self.operands
        self.attended = self.attend(self.backend, o.q, o.k, o.v, o.cu_q, o.cu_k, True, False)

    def result(self) -> torch.Tensor:
        return self.attended
