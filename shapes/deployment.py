"""The calls of the four ops that one rank of a served model makes, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shapes.attention import Parallel, is_dense, mha_prefill_sizes, mla_decode_sizes
from shapes.bins import DecodeBin, PrefillBin, TokenBin, decode_bins, prefill_bins, token_bins
from shapes.case import Size
from shapes.cases import BATCHES, DP_BATCHES, DP_PROMPTS, PROMPTS
from shapes.cases.mla_decode import sweep_ctx
from shapes.experts import fused_moe_sizes, place_of_experts, rows_on_rank
from shapes.linears import Linear, fp8_calls
from shapes.models import ModelConfig
from shapes.scheduler import Workload, simulate


@dataclass(frozen=True)
class Deployment:
    """How a model is split over the ranks of a server."""

    model: ModelConfig
    parallel: Parallel
    """The split of attention and routed experts. With ep=1 all ranks share the columns of each expert."""
    dense_tp: int = 1  # the number of ranks that share the MLP of a dense layer
    shared_tp: int = 1  # the number of ranks that share the linears of the shared experts
    shared: int = 0  # 1 if the shared expert is computed as one more of the routed experts, else 0
    dispatched: bool = False
    """Whether an all-to-all brings a rank only the tokens that chose its experts; else it gets all tokens."""
    kv: str = "bf16"  # the dtype of the KV cache: `bf16` or `fp8`
    drafts: int = 0  # the draft tokens of each request that a decode step verifies

    @property
    def text(self) -> str:
        """The model, the degrees above 1, and an FP8 cache: `deepseek-r1 dp8 ep8 kv=fp8`."""
        cache = "" if self.kv == "bf16" else f" kv={self.kv}"
        return f"{self.model.name} {self.parallel.text}{cache}"


@dataclass(frozen=True)
class Call:
    """Equal calls of an op."""

    op: str
    sizes: dict[str, Size]
    step: str  # the step that makes them; empty for the mean step of a workload
    times: float  # how many there are in the step
    place: str  # the part of the model that makes them: `o_proj`
    rows: int = 0  # in a call of the experts the number of tokens that picked an expert of the rank, else 0
    prefill: bool = False  # whether the step has prompt tokens


def sweep(deployment: Deployment) -> list[Call]:
    """The calls of each step of AMD's and dstack's runs, which have 3200 tokens in and 800 out. With DP
    attention they are those of a rank, together with DeepSeek's own steps (see shapes.cases). Ops that do not
    hold for the model (ModelConfig.inapplicable) have none."""
    dp_attention = deployment.parallel.dp > 1
    q = 1 + deployment.drafts
    calls: list[Call] = []
    for batch in DP_BATCHES if dp_attention else BATCHES:
        decode = DecodeBin(1, batch, sweep_ctx(deployment.drafts))
        of_step = mean_step(deployment, [TokenBin(1, batch * q, 0)], [(decode, q)], [])
        calls += [replace(call, step=f"decode, {batch} requests") for call in of_step]
    for count, isl in DP_PROMPTS if dp_attention else PROMPTS:
        prefill = PrefillBin(1, count, str(isl), "0")
        of_step = mean_step(deployment, [TokenBin(1, count * isl, count * isl)], [], [prefill])
        calls += [replace(call, step=f"prefill, {count} x {isl} tokens") for call in of_step]
    return calls


def served(deployment: Deployment, workload: Workload) -> list[Call]:
    """The calls of the mean step of a workload, which is simulated. Ops that do not hold for the model have
    none. Raises ValueError with drafts: how many are accepted would decide how many steps decode."""
    if deployment.drafts:
        raise ValueError(
            "a workload with drafts has steps that depend on how many are accepted: give one of both"
        )
    on_rank = workload.on_rank(deployment.parallel.dp)
    phases = list(simulate(on_rank))
    steps = sum(phase.steps for phase in phases)
    # Weights of these bins are shares of the steps that decode, or that prefill, and not of all steps.
    decoding = sum(phase.steps for phase in phases if phase.lengths) / steps
    prefilling = sum(phase.steps for phase in phases if phase.chunks) / steps
    decodes = [(bin_._replace(weight=bin_.weight * decoding), 1) for bin_ in decode_bins(on_rank)]
    prefills = [bin_._replace(weight=bin_.weight * prefilling) for bin_ in prefill_bins(on_rank)]
    return mean_step(deployment, token_bins(on_rank), decodes, prefills)


def mean_step(
    deployment: Deployment, tokens: Iterable[TokenBin], decodes: Iterable[tuple[DecodeBin, int]],
    prefills: Iterable[PrefillBin],
) -> list[Call]:  # fmt: skip
    """The calls of the mean of many steps. The weight of each bin is its share of all steps. A bin of
    `decodes` has the query tokens of each request beside it."""
    model, parallel, layers = deployment.model, deployment.parallel, deployment.model.num_hidden_layers
    calls = [
        replace(call, times=call.times * bin_.weight)
        for bin_ in tokens
        for call in _linears_and_experts(deployment, bin_.tokens, bin_.prompt)
    ]
    for decode, q in decodes:
        sizes = mla_decode_sizes(model, parallel, decode.batch, decode.ctx, kv=deployment.kv, q=q)
        calls.append(Call("mla_decode", sizes, "", decode.weight * layers, "MLA decode"))
    for prefill in prefills:
        sizes = mha_prefill_sizes(model, parallel, prefill.batch, prefill.new, prefill.prefix)
        if is_dense(model, prefill.new, prefill.prefix):
            times = prefill.weight * layers
            calls.append(Call("mha_prefill", sizes, "", times, "MHA prefill", prefill=True))
    return [call for call in calls if call.op not in model.inapplicable]


def _linears_and_experts(deployment: Deployment, tokens: int, prompt: int) -> Iterator[Call]:
    """The calls of the FP8 linears and the experts in a step in which each DP group has `tokens` tokens,
    `prompt` of which are prompt tokens."""
    model, parallel = deployment.model, deployment.parallel
    tp_of_part = {"attention": parallel.tp, "dense": deployment.dense_tp}
    if not deployment.shared:
        tp_of_part["shared"] = deployment.shared_tp
    for part, tp in tp_of_part.items():
        # All DP groups that share a linear bring their tokens. If fewer ranks than a group share it, they get
        # only a part of the group's tokens.
        in_call, prompt_in_call = (math.ceil(count * tp / parallel.tp) for count in (tokens, prompt))
        for linear, sizes, calls in fp8_calls(model, Parallel(tp=tp), in_call, prompt_in_call):
            if _part(linear) == part:
                yield Call("block_scale_gemm", sizes, "", calls, linear.name, prefill=prompt > 0)
    picked = rows_on_rank(model, parallel, tokens)
    in_kernel = picked if deployment.dispatched else tokens * parallel.dp
    sizes = fused_moe_sizes(model, parallel, in_kernel, deployment.shared)
    moe_layers = model.num_hidden_layers - model.first_k_dense_replace
    place = place_of_experts(model, parallel)
    yield Call("fused_moe", sizes, "", moe_layers, place, picked, prefill=prompt > 0)


def _part(linear: Linear) -> str:
    """The part of a model that a linear belongs to: `dense`, `shared` or `attention`, each split apart."""
    first_word = linear.name.partition(" ")[0]
    return first_word if first_word in ("dense", "shared") else "attention"
