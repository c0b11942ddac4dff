"""What vLLM itself runs for MLA prefill on CPUs: dense attention in torch, one request after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function, Symbol
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch

PLACE = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa.CPUSDPAMLAPrefillBackend"
BACKEND = Symbol(PLACE)
ATTEND = Function(f"{PLACE}._ragged_sdpa", positions=7)


class Dense(Vllm):
    """`CPUSDPAMLAPrefillBackend._ragged_sdpa` of vLLM 0.32: the scores of all heads in fp32, written out."""

    name = "vllm.dense"
    requires = "vLLM's CPU build"
    kinds = ("cpu",)
    symbols = (BACKEND, ATTEND)
    since = "0.32"
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
        return _Dense(operands)


class _Dense(Prepared):
    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands) -> None:
        super().__init__(operands, None)
        o, backend_class = operands, BACKEND.find()
        backend = backend_class.__new__(backend_class)  # it reads its scale alone
        backend.scale = o.score_scale
        self.attend = ATTEND.bind(o.q, o.k, o.v, o.cu_q, o.cu_k, True, False, of=backend)

    def call(self) -> None:
        self.attended = self.attend()

    def result(self) -> torch.Tensor:
        return self.attended
