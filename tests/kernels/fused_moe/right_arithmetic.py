"""Right fused MoE layers in the arithmetic of libraries, written in plain torch, in order of their error, the
largest first.

A kernel's source is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from dataclasses import replace
from functools import partial

import torch

from kernels.fused_moe.mistakes import Plan, by_blocks, layer
from kernels.mistakes import Mistake, bf16
from tests.support.library_roundings import fourteen_bits, truncated


def in_parts(x: torch.Tensor, w: torch.Tensor, count: int) -> torch.Tensor:
    """x @ w^T with K split into so many parts."""
    parts = zip(x.tensor_split(count, 1), w.tensor_split(count, 1), strict=True)
    return torch.stack([x_part @ w_part.T for x_part, w_part in parts]).sum(0)


GROUPED = "kernels/fused_moe/triton/grouped.py"
ROUNDS_H = partial(Plan, requant=True)
HOPPER = partial(by_blocks, sums=fourteen_bits)
IN_BF16 = Plan(x=bf16, w13=bf16, w2=bf16, gate_up=bf16, h=bf16, expert_out=bf16, weighted=bf16)
# (name, plan, source) of each right call
BF16: tuple[tuple[str, Plan, str], ...] = (
    ("bf16 everywhere", IN_BF16, "torch 2.13, bf16 matmul"),
    ("bf16 products", Plan(x=bf16, w13=bf16, w2=bf16, h=bf16), "assumed: vLLM's CPU kernels"),
    ("bf16 between the products", Plan(gate_up=bf16, h=bf16), "assumed"),
    ("the sum in bf16 after each expert", Plan(expert_out=bf16, total=bf16), "assumed"),
    ("bf16 results of experts", Plan(expert_out=bf16, weighted=bf16), "assumed"),
    ("fp32", Plan(), "kernels/fused_moe/providers/torch_eager.py"),
)
FP8: tuple[tuple[str, Plan, str], ...] = (
    ("the sum truncated after each expert", ROUNDS_H(total=truncated), "assumed: AITER's atomics in bf16"),
    ("the sum in bf16 after each expert", ROUNDS_H(total=bf16), "assumed"),
    (
        "blocks of K",
        ROUNDS_H(up_product=by_blocks, down_product=by_blocks, gate_up=bf16, weighted=bf16),
        "vLLM 0.33 vllm/model_executor/layers/fused_moe/fused_moe.py:548-601",
    ),
    ("dequantised to bf16", replace(IN_BF16, requant=True), "assumed"),
    (
        "sums of 14 bits",
        ROUNDS_H(up_product=HOPPER, down_product=HOPPER, gate_up=bf16, expert_out=bf16),
        "assumed: DeepGEMM on Hopper",
    ),
    ("first product split in 4", ROUNDS_H(up_product=partial(in_parts, count=4)), GROUPED),
    ("fp32 elsewhere", ROUNDS_H(), GROUPED),
)


def planned(name: str, boundary: str, plan: Plan, activations: str) -> Mistake:
    return Mistake(name, lambda o, right: layer(o, plan).to(right.dtype), boundary, activations)


RIGHT: tuple[Mistake, ...] = tuple(
    planned(f"{boundary}{kind}: {name} ({source})", boundary, plan, activations)
    for boundary in ("core", "with_quant", "with_routing")
    for kind, activations, plans in (("", "bf16", BF16), (", FP8", "fp8", FP8))
    for name, plan, source in plans
)
"""Right calls in the form of mistakes, so that the check judges them in the same way."""
