"""Random weights under which a model behaves: activations keep their size, tokens go to different experts.

An engine's own dummy weights are so small that all tokens pick the same experts: a batch then touches fewer
weights than it would in service. Here embeddings have unit variance and each product keeps the variance of
what it is given, so that the residual stream stays one token's own, and routers tell tokens apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from harness.serving.live.checkpoint.shape import BLOCK, ModelShape

# Of a block of 16384 normal values, the largest is about this many standard deviations: FP8's range is used.
LARGEST_SIGMAS = 4.5
E4M3_LARGEST = 448.0


def shards(shape: ModelShape) -> list[str]:
    """The parts that a checkpoint is written in."""
    return [f"layer-{layer:03d}" for layer in range(shape.layers)] + ["rest"]


def tensors(shape: ModelShape, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one part, the same for the same shape on any machine."""
    if shard == "rest":
        yield from _rest(shape)
        return
    layer = int(shard.removeprefix("layer-"))
    for name, outputs, inputs in shape.linears(layer):
        yield from _block_scaled(shape, name, outputs, inputs)
    prefix = f"model.layers.{layer}"
    for name, width in (
        ("input_layernorm", shape.hidden),
        ("post_attention_layernorm", shape.hidden),
        ("self_attn.q_a_layernorm", shape.q_lora),
        ("self_attn.kv_a_layernorm", shape.kv_lora),
    ):
        yield f"{prefix}.{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    if layer >= shape.dense_layers:
        gate = f"{prefix}.mlp.gate"
        router = _normal(shape, f"{gate}.weight", shape.experts, shape.hidden) / shape.hidden**0.5
        yield f"{gate}.weight", router.bfloat16()
        bias = _normal(shape, f"{gate}.e_score_correction_bias", shape.experts)
        yield f"{gate}.e_score_correction_bias", bias * shape.routing_skew


def _rest(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    size = (shape.vocabulary, shape.hidden)
    yield "model.embed_tokens.weight", _normal(shape, "model.embed_tokens.weight", *size).bfloat16()
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
    head = _normal(shape, "lm_head.weight", *size) / shape.hidden**0.5
    yield "lm_head.weight", head.bfloat16()


def _block_scaled(
    shape: ModelShape, name: str, outputs: int, inputs: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight e4m3fn[outputs, inputs] of variance 1 / inputs, and its scales
    f32[outputs / 128, inputs / 128], which differ between blocks as those of trained weights do."""
    values = _normal(shape, name, outputs, inputs).mul_(E4M3_LARGEST / LARGEST_SIGMAS)
    yield f"{name}.weight", values.clamp_(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    spread = _normal(shape, f"{name}.weight_scale_inv", *blocks).mul_(0.1).exp_()
    yield f"{name}.weight_scale_inv", spread * (LARGEST_SIGMAS / E4M3_LARGEST / inputs**0.5)


def _normal(shape: ModelShape, name: str, *size: int) -> torch.Tensor:
    seed = hashlib.sha256(f"{shape.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    return torch.randn(*size, generator=generator)
