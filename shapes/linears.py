"""The linear layers of DeepSeek-R1 and V3 on one rank, and how often a step of the model calls each."""

from __future__ import annotations

from dataclasses import dataclass

from shapes.attention import Parallel
from shapes.case import Size
from shapes.models import ModelConfig

FP8, BF16, BATCHED = "fp8 block-scale", "bf16", "bf16 batched"


@dataclass(frozen=True)
class Linear:
    """y [m, n] = x [m, k] W^T, W [n, k], for the m tokens of the rank's step.

    A step that decodes and prefills calls each linear once in each layer, for all tokens. There are three
    exceptions: kv_b gets the new prompt tokens, the absorbed products (w_uk, w_uv) get the decoding tokens,
    and lm_head gets one token of each request.
    """

    name: str
    n: int
    k: int
    kind: str
    """FP8, BF16 or BATCHED."""
    decode_calls: int
    """Calls in a step of the whole model that only decodes."""
    prefill_calls: int
    """Calls in a step of the whole model that only prefills."""
    batch: int = 1
    """The number of products side by side, one for each head; more than 1 only if BATCHED."""


def linears(model: ModelConfig, parallel: Parallel) -> list[Linear]:
    """All linears of a rank in the order of a layer, without those of the experts (see fused_moe).

    Tensor parallelism splits the rows (n) of the first and the columns (k) of the second linear of each pair;
    linears that make latents or route are whole. kv_b also projects the cached prefix of a chunked prompt
    again, in calls that are not counted here.
    """
    heads = parallel.heads(model)
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    hidden, latent, layers = model.hidden_size, model.kv_lora_rank, model.num_hidden_layers
    dense_layers = model.first_k_dense_replace
    moe_layers = layers - dense_layers
    dense = parallel.split(model.intermediate_size, "dense MLP columns", model)
    shared_width = model.moe_intermediate_size * model.n_shared_experts
    shared = parallel.split(shared_width, "shared expert columns", model)
    vocabulary = parallel.split(model.vocab_size, "vocabulary rows", model)

    def fp8(name: str, n: int, k: int, calls: int) -> Linear:
        return Linear(name, n, k, FP8, calls, calls)

    return [
        fp8("qkv_a", model.q_lora_rank + latent + rope, hidden, layers),
        fp8("q_b", heads * (nope + rope), model.q_lora_rank, layers),
        Linear("w_uk", latent, nope, BATCHED, layers, 0, batch=heads),
        Linear("w_uv", value, latent, BATCHED, layers, 0, batch=heads),
        Linear("kv_b", heads * (nope + value), latent, FP8, 0, layers),
        fp8("o_proj", hidden, heads * value, layers),
        fp8("dense gate_up", 2 * dense, hidden, dense_layers),
        fp8("dense down", hidden, dense, dense_layers),
        fp8("shared gate_up", 2 * shared, hidden, moe_layers),
        fp8("shared down", hidden, shared, moe_layers),
        Linear("router", model.n_routed_experts, hidden, BF16, moe_layers, moe_layers),
        Linear("lm_head", vocabulary, hidden, BF16, 1, 1),
    ]


def block_scale_gemm_sizes(linear: Linear, m: int) -> dict[str, Size]:
    """The sizes of `block_scale_gemm` for m tokens of a rank. Raises ValueError unless the linear is FP8."""
    if linear.kind != FP8:
        raise ValueError(f"linear {linear.name!r} is {linear.kind}, not {FP8}")
    return {"m": m, "n": linear.n, "k": linear.k}
