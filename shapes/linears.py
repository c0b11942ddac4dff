"""The linear layers of DeepSeek-R1 and V3 on one rank, and how often a step of the model calls each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapes.attention import Parallel
from shapes.case import Size

if TYPE_CHECKING:
    from shapes.models import ModelConfig

FP8, BF16, BATCHED = "fp8 block-scale", "bf16", "bf16 batched"


@dataclass(frozen=True)
class Linear:
    """y [m, n] = x [m, k] W^T, W [n, k], for the m tokens of the rank's step.

    kind:          FP8, BF16, or BATCHED: `batch` such products side by side, one for each head
    decode_calls:  calls in a step of the whole model that only decodes
    prefill_calls: calls in a step of the whole model that only prefills

    A step that does both calls each linear once a layer for all tokens, except those with calls in one of
    the two alone: kv_b sees the new prompt tokens, the absorbed products see the decoding ones.
    lm_head sees one token of each request.
    """

    name: str
    n: int
    k: int
    kind: str
    decode_calls: int
    prefill_calls: int
    batch: int = 1


def linears(model: ModelConfig, parallel: Parallel) -> list[Linear]:
    """All linears of a rank in the order of a layer, the experts' (see fused_moe) left out.

    Under tensor parallelism, rows (n) of the first and columns (k) of the second linear of each pair are
    split; what makes latents or routes is whole. kv_b also projects the cached prefix of a chunked prompt
    anew, in calls that are not counted here.
    """
    heads = parallel.heads(model)
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    hidden, latent, layers = model.hidden_size, model.kv_lora_rank, model.num_hidden_layers
    dense_layers = model.first_k_dense_replace
    moe_layers = layers - dense_layers

    def split(width: int, what: str) -> int:
        part, left = divmod(width, parallel.tp)
        if left:
            raise ValueError(f"tp={parallel.tp} must divide the {width} {what} of {model.name}")
        return part

    dense = split(model.intermediate_size, "dense MLP columns")
    shared = split(model.moe_intermediate_size * model.n_shared_experts, "shared expert columns")
    vocabulary = split(model.vocab_size, "vocabulary rows")

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
    """Sizes of `block_scale_gemm` for m tokens of a rank."""
    if linear.kind != FP8:
        raise ValueError(f"linear {linear.name!r} is {linear.kind}, not {FP8}")
    return {"m": m, "n": linear.n, "k": linear.k}
