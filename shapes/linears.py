"""The linear layers of a model on one rank, and how often a step of the model calls each."""

from __future__ import annotations

from dataclasses import dataclass

from shapes.attention import Parallel
from shapes.case import Size
from shapes.models import BF16, FP8, ModelConfig

BATCHED = "bf16 batched"


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
    kind: str  # BATCHED, or a format of weights: FP8, BF16 or another that its checkpoint names
    decode_calls: int  # calls in a step of the whole model that only decodes
    prefill_calls: int  # calls in a step of the whole model that only prefills
    batch: int = 1  # the number of products side by side, one for each head; more than 1 only if BATCHED


def linears(model: ModelConfig, parallel: Parallel) -> list[Linear]:
    """All linears of a rank in the order of a layer, without those of the experts (see fused_moe) and of MTP
    layers. A model whose queries have no latent has q and kv_a instead of qkv_a and q_b. A sparse indexer's
    wq_b is whole on each rank; its smaller linears (wk, weights_proj) are one in bf16.

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

    def in_all_steps(name: str, n: int, k: int, calls: int) -> Linear:
        return Linear(name, n, k, model.weight_format(name), calls, calls)

    if model.q_lora_rank:
        first = [
            in_all_steps("qkv_a", model.q_lora_rank + latent + rope, hidden, layers),
            in_all_steps("q_b", heads * (nope + rope), model.q_lora_rank, layers),
        ]
    else:
        first = [
            in_all_steps("q", heads * (nope + rope), hidden, layers),
            in_all_steps("kv_a", latent + rope, hidden, layers),
        ]
    if model.index_topk:
        width, indexers = model.index_n_heads * model.index_head_dim, model.indexers
        first.append(in_all_steps("indexer wq_b", width, model.q_lora_rank, indexers))
        small_width = model.index_head_dim + model.index_n_heads  # of wk, and of weights_proj
        first.append(Linear("indexer wk", small_width, hidden, BF16, indexers, indexers))
    all_linears = [
        *first,
        Linear("w_uk", latent, nope, BATCHED, layers, 0, batch=heads),
        Linear("w_uv", value, latent, BATCHED, layers, 0, batch=heads),
        Linear("kv_b", heads * (nope + value), latent, model.weight_format("kv_b"), 0, layers),
        in_all_steps("o_proj", hidden, heads * value, layers),
        in_all_steps("dense gate_up", 2 * dense, hidden, dense_layers),
        in_all_steps("dense down", hidden, dense, dense_layers),
        in_all_steps("shared gate_up", 2 * shared, hidden, moe_layers),
        in_all_steps("shared down", hidden, shared, moe_layers),
        Linear("router", model.n_routed_experts, hidden, BF16, moe_layers, moe_layers),
        Linear("lm_head", vocabulary, hidden, BF16, 1, 1),
    ]
    # The width of shared experts is 0 in a model that has none.
    return [linear for linear in all_linears if linear.n and linear.k]


def fp8_calls(
    model: ModelConfig, parallel: Parallel, tokens: int, prompt: int = 0
) -> list[tuple[Linear, dict[str, Size], int]]:
    """The FP8 linears that a rank calls in a step of `tokens` tokens, `prompt` of which are prompt tokens,
    each with its sizes of `block_scale_gemm` and the number of its calls. A linear that steps without prompt
    tokens do not call gets only the prompt tokens."""
    found: list[tuple[Linear, dict[str, Size], int]] = []
    for linear in linears(model, parallel):
        calls = linear.prefill_calls if prompt else linear.decode_calls
        if linear.kind == FP8 and calls:
            m = tokens if linear.decode_calls else prompt
            found.append((linear, {"m": m, "n": linear.n, "k": linear.k}, calls))
    return found
