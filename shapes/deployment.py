"""Every call of the four ops that one rank of a served model makes, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapes.attention import Parallel, mha_prefill_sizes, mla_decode_sizes
from shapes.case import Size
from shapes.cases import BATCHES, DP_BATCHES, DP_PROMPTS, ISL, PROMPTS
from shapes.cases.mla_decode import SEEN
from shapes.experts import fused_moe_sizes, rows
from shapes.linears import FP8, block_scale_gemm_sizes, linears

if TYPE_CHECKING:
    from shapes.models import ModelConfig
    from shapes.scheduler import Workload

PARTS = {
    "dense gate_up": "dense",
    "dense down": "dense",
    "shared gate_up": "shared",
    "shared down": "shared",
}
"""The part of the model that a linear belongs to, by its name; the others are attention's. Each part may be
split over other ranks."""


@dataclass(frozen=True)
class Deployment:
    """How a model is split over the ranks of a server.

    tp:         how many ranks share the heads of an attention: a group
    dp:         how many groups there are, each with requests of its own (DP attention)
    ep:         how many ranks share the experts; 1: each expert's columns are split over all ranks
    dense_tp:   how many ranks share the MLP of a dense layer
    shared_tp:  how many ranks share the shared expert
    shared:     1 where the shared expert is computed as one more of the routed ones, else 0
    dispatched: whether an all-to-all brings a rank only the tokens that chose its experts; else it gets all
    kv:         format of the KV cache
    """

    model: ModelConfig
    tp: int
    dp: int = 1
    ep: int = 1
    dense_tp: int = 1
    shared_tp: int = 1
    shared: int = 0
    dispatched: bool = False
    kv: str = "bf16"

    @property
    def attention(self) -> Parallel:
        return Parallel(tp=self.tp, dp=self.dp, ep=self.ep)

    def together(self, tokens: int, ranks: int) -> int:
        """Tokens of a call that `ranks` share, where each DP group has `tokens`. Where fewer ranks than a
        group share it, each of them takes its part of the group's tokens."""
        return -(-tokens * ranks // self.tp)


@dataclass(frozen=True)
class Call:
    """Calls of an op that are alike.

    step:  the step that they are in; empty where the steps of a workload are mixed
    times: how often a step makes the call, or a workload's mean step
    place: the part of the model that makes it: `o_proj`
    rows:  how many tokens picked an expert of the rank, in a call of the experts; else 0
    """

    op: str
    sizes: dict[str, Size]
    step: str
    times: float
    place: str
    rows: int = 0


def sweep(deployment: Deployment) -> list[Call]:
    """The calls of each step in AMD's and dstack's runs, which have 3200 tokens in and 800 out; with DP
    attention those of a rank, and of DeepSeek's own steps (see shapes.cases)."""
    spread = deployment.dp > 1
    prompts = DP_PROMPTS if spread else [(count, ISL) for count in PROMPTS]
    calls: list[Call] = []
    for batch in DP_BATCHES if spread else BATCHES:
        step = f"decode, {batch} requests"
        sizes = mla_decode_sizes(deployment.model, deployment.attention, batch, SEEN, kv=deployment.kv)
        calls += _of_tokens(deployment, step, batch)
        calls.append(Call("mla_decode", sizes, step, deployment.model.num_hidden_layers, "MLA decode"))
    for count, tokens in prompts:
        step = f"prefill, {count} x {tokens} tokens"
        sizes = mha_prefill_sizes(deployment.model, deployment.attention, count, str(tokens))
        calls += _of_tokens(deployment, step, count * tokens, count * tokens)
        calls.append(Call("mha_prefill", sizes, step, deployment.model.num_hidden_layers, "MHA prefill"))
    return calls


def served(deployment: Deployment, workload: Workload) -> list[Call]:
    """The calls of a mean step of a whole server's workload, which is simulated (see shapes.scheduler)."""
    from shapes.bins import decode_bins, prefill_bins, token_bins
    from shapes.scheduler import simulate

    layers, model, parallel = deployment.model.num_hidden_layers, deployment.model, deployment.attention
    on_rank = workload.on_rank(deployment.dp)
    phases = list(simulate(on_rank))
    steps = sum(phase.steps for phase in phases)
    decoding = sum(phase.steps for phase in phases if phase.lengths) / steps
    prefilling = sum(phase.steps for phase in phases if phase.chunks) / steps
    calls = [
        replace(call, times=call.times * bin_.weight)
        for bin_ in token_bins(on_rank)
        for call in _of_tokens(deployment, "", bin_.tokens, bin_.prompt)
    ]
    for decode in decode_bins(on_rank):
        sizes = mla_decode_sizes(model, parallel, decode.batch, decode.ctx, kv=deployment.kv)
        calls.append(Call("mla_decode", sizes, "", decode.weight * decoding * layers, "MLA decode"))
    for prefill in prefill_bins(on_rank):
        sizes = mha_prefill_sizes(model, parallel, prefill.batch, prefill.new, prefill.prefix)
        calls.append(Call("mha_prefill", sizes, "", prefill.weight * prefilling * layers, "MHA prefill"))
    return calls


def _of_tokens(deployment: Deployment, step: str, tokens: int, prompt: int = 0) -> Iterator[Call]:
    """The FP8 linears and the experts of a step in which each DP group has `tokens`, of which `prompt` are of
    prompts."""
    ranks = {"attention": deployment.tp, "dense": deployment.dense_tp}
    if not deployment.shared:
        ranks["shared"] = deployment.shared_tp
    for part, tp in ranks.items():
        for linear in linears(deployment.model, Parallel(tp=tp)):
            calls = linear.prefill_calls if prompt else linear.decode_calls
            if linear.kind != FP8 or not calls or PARTS.get(linear.name, "attention") != part:
                continue
            seen = deployment.together(tokens if linear.decode_calls else prompt, tp)
            yield Call("block_scale_gemm", block_scale_gemm_sizes(linear, seen), step, calls, linear.name)
    model, everyone = deployment.model, deployment.tp * deployment.dp
    reached = rows(model, deployment.attention, tokens)
    here = reached if deployment.dispatched else deployment.together(tokens, everyone)
    sizes = fused_moe_sizes(model, Parallel(tp=everyone, ep=deployment.ep), here, deployment.shared)
    moe_layers = model.num_hidden_layers - model.first_k_dense_replace
    reached = reached if deployment.ep > 1 else here
    yield Call("fused_moe", sizes, step, moe_layers, "experts", reached)
