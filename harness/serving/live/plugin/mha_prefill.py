"""The engine's attention of prefill, heads unpacked from latents, by an implementation of `mha_prefill`."""

from __future__ import annotations

from itertools import pairwise

import torch

from . import report
from .suite import Swapped, swapped


def apply(swap: str) -> None:
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend as Backend

    implementation = swapped(swap)
    run = Backend.run_prefill_new_tokens

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if return_softmax_lse or output_scale is not None:
            return run(self, q, k, v, return_softmax_lse, out, output_scale)
        attended = prefill(implementation, q, k, v, self._prefill_metadata.query_start_loc, self.scale)
        return attended if out is None else out.copy_(attended)

    Backend.run_prefill_new_tokens = run_prefill_new_tokens
    report.note("replaced", swap=swap, layers="all")


def prefill(
    implementation: Swapped,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """bf16 [tokens, heads, 128] of q and k bf16 [tokens, heads, 192] and v [tokens, heads, 128]; request i
    has the rows starts[i] to starts[i + 1], none cached."""
    from kernels.mha_prefill.operands import MhaPrefillOperands, sequences_of
    from kernels.mha_prefill.sizes import MhaPrefillSizes

    bounds = starts.tolist()
    new = [end - start for start, end in pairwise(bounds)]
    sizes = MhaPrefillSizes(len(new), f"{min(new)}..{max(new)}", heads=q.shape[1])
    cumulative = starts.int()
    operands = MhaPrefillOperands(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cumulative,
        cumulative,
        sequences_of([(0, tokens) for tokens in new]),
        sizes,
        scale,
    )
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    return implementation.run_once(operands, out)
