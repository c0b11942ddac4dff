"""kernels/ops/activation/activation.py of SGLang 0.5.23."""

import torch


def silu_and_mul(
    input: torch.Tensor,
    out: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    expert_step: int = 1,
    *,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
) -> torch.Tensor:
    """Line 228: the gate is the first half."""
    if expert_ids is not None:
        raise NotImplementedError("the double of SGLang does not cover expert_ids of silu_and_mul")
    half = input.shape[-1] // 2
    if out is None:
        out = input.new_empty(*input.shape[:-1], half)
    gate, up = input.view(-1, 2 * half).float().chunk(2, -1)
    out.view(-1, half).copy_(gate / (1 + torch.exp(-gate)) * up)
    return out
