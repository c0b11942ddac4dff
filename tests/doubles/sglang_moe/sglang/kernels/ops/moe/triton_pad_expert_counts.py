"""kernels/ops/moe/triton_pad_expert_counts.py of SGLang 0.5.23."""

import torch


def pad_expert_counts(counts: torch.Tensor, block_e: int, all_tokens: int) -> torch.Tensor:
    """Line 27: counts rounded up to block_e, the last of them by what is left of all_tokens."""
    padded = (counts.to(torch.int32) + block_e - 1) // block_e * block_e
    padded[-1] += all_tokens - padded.sum().to(torch.int32)
    return padded.to(torch.int32)
