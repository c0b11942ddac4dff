"""Right fused MoE layers in the arithmetic of libraries, written in plain torch, in order of their error, the
largest first.

A kernel's source is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from dataclasses import replace
from functools import partial

import torch

from kernels.fused_moe.mistakes import Plan, by_blocks, layer
from kernels.mistakes import Compute, Mistake, bf16
from tests.support.library_roundings import fourteen_bits, truncated


def in_parts(x: torch.Tensor, w: torch.Tensor, count: int) -> torch.Tensor:
    """The product of a K that is split into so many parts."""
    parts = zip(x.tensor_split(count, 1), w.tensor_split(count, 1), strict=True)
    return torch.stack([a @ b.T for a, b in parts]).sum(0)


GROUPED = "kernels/fused_moe/triton/grouped.py"
HOPPER = partial(by_blocks, sums=fourteen_bits)
IN_BF16 = Plan(x=bf16, weight=bf16, both=bf16, h=bf16, given=bf16, weighted=bf16)
BF16: tuple[tuple[str, Plan, str], ...] = (
    ("bf16 everywhere", IN_BF16, "torch 2.13, bf16 matmul"),
    ("bf16 products", Plan(x=bf16, weight=bf16, h=bf16), "assumed: vLLM's CPU kernels"),
    ("bf16 between the products", Plan(both=bf16, h=bf16), "assumed"),
    ("the sum in bf16 after each expert", Plan(given=bf16, total=bf16), "assumed"),
    ("bf16 results of experts", Plan(given=bf16, weighted=bf16), "assumed"),
    ("fp32", Plan(), "kernels/fused_moe/providers/torch_eager.py"),
)
FP8: tuple[tuple[str, Plan, str], ...] = (
    ("the sum truncated after each expert", Plan(total=truncated), "assumed: AITER's atomics in bf16"),
    ("the sum in bf16 after each expert", Plan(total=bf16), "assumed"),
    (
        "blocks of K",
        Plan(product=by_blocks, down=by_blocks, both=bf16, weighted=bf16),
        "vLLM 0.33 vllm/model_executor/layers/fused_moe/fused_moe.py:548-601",
    ),
    ("dequantised to bf16", IN_BF16, "assumed"),
    (
        "sums of 14 bits",
        Plan(product=HOPPER, down=HOPPER, both=bf16, given=bf16),
        "assumed: DeepGEMM on Hopper",
    ),
    ("first product split in 4", Plan(product=partial(in_parts, count=4)), GROUPED),
    ("fp32 elsewhere", Plan(), GROUPED),
)


def as_planned(plan: Plan) -> Compute:
    return lambda o, right: layer(o, plan).to(right.dtype)


def right(boundary: str) -> list[Mistake]:
    bf16_calls = [
        Mistake(f"{boundary}: {name} ({source})", as_planned(plan), boundary) for name, plan, source in BF16
    ]
    return bf16_calls + [
        Mistake(
            f"{boundary}, FP8: {name} ({source})", as_planned(replace(plan, requant=True)), boundary, "fp8"
        )
        for name, plan, source in FP8
    ]


RIGHT: tuple[Mistake, ...] = tuple(
    kernel for boundary in ("core", "with_quant", "with_routing") for kernel in right(boundary)
)
"""In the form of mistakes, although they are right."""
