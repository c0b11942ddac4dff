"""Structure of a step of DeepSeek-R1: what one rank calls, and where each call's time comes from.

Counts are those of the layers (shapes/): 61 attentions, 58 MoE and 3 dense MLPs, 122 all-reduces under tensor
parallelism. SGLang computes the shared expert as one expert more of the fused MoE under tensor parallelism
(257 experts, top 9), and as linears of its own under expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.errors import UsageError
from harness.serving.ledger.prediction import Origin
from harness.serving.link.experts import routed, shared_expert_factor
from harness.serving.link.times.assumed_times import DEVIATION, SOURCE, AssumedTables
from harness.serving.link.times.interpolation import TimeEstimate
from harness.serving.link.times.measured_times import NEAR, MeasuredTimes
from harness.serving.link.times.tables import MissingTable, Tables
from harness.serving.names import engine_name
from shapes.attention import Parallel
from shapes.linears import BATCHED, BF16, FP8, linears
from shapes.models import ModelConfig, model

# What no table has: small kernels between the timed ones (norms of the latents, rotary embedding, cache
# write, choice of experts, concatenations), counted in a trace of SGLang 0.5.9 on 8xH200 as InferenceX's
# issue 863 sums it up (by an LLM): 1717 kernels a step, one stream. Their times are assumed.
GLUE_CALLS = 7  # a layer
GLUE_US = 2.0  # each, in a graph, at few tokens
GLUE_BYTES = 200e3  # a token and layer: 2 residual norms (115 KB), the rest q, k, v and latents
GLUE_GBPS = 4000.0  # of HBM3e's 4800
ATTENTION_GLUE = 4, 85e3  # calls and bytes of these that are attention's, and in the time of its module
BETWEEN = "host:between_kernels"


@dataclass(frozen=True)
class StepLoad:
    """What one step works on.

    tokens:  rows of the linears
    batch:   sequences
    context: of decode: cached tokens of each sequence; of prefill: its prompt's tokens
    """

    tokens: float
    batch: float
    context: float


@dataclass(frozen=True)
class Term:
    """Calls of one kind in a step.

    op:     of harness/serving/op_classes.py
    source: what its uncertainty is called: terms of one source and part err together
    """

    op: str
    part: str
    calls: int
    origin: Origin
    source: str
    time: Callable[[StepLoad], TimeEstimate]

    @property
    def name(self) -> str:
        return f"{self.op}:{self.part}" if self.part else self.op


@dataclass(frozen=True, eq=False)
class Structure:
    """The terms of both phases.

    weights_gb: of a rank, and kv_bytes of a token on a rank
    where:      the tables, and the version of the engine that they are of
    """

    config: ModelConfig
    parallel: Parallel
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]
    weights_gb: float
    kv_bytes: int
    where: str
    version: str = ""


def structure(
    tables: Tables,
    parallel: Parallel,
    *,
    kv: str = "bfloat16",
    measured_times: MeasuredTimes | None = None,
    assumed: Tables | None = None,
) -> Structure:
    """The structure of DeepSeek-R1 over tables; raises MissingTable (a UsageError) for all that they lack and
    UsageError for a parallelism that is not modelled.

    assumed: times that stand where the tables have none
    kv:      bfloat16 or fp8, the cache's type in the tables' words
    measured_times: come first where they are near
    """
    if parallel.dp > 1:
        raise UsageError(
            "DP attention is not modelled: no table here has its all-gather and reduce-scatter, nor "
            "all-to-all; leave --dp-attention out"
        )
    if parallel.ep not in (1, parallel.tp):
        raise UsageError(
            f"--ep {parallel.ep} is not modelled with --tp {parallel.tp}; give 1 or {parallel.tp}"
        )
    config = model("deepseek-r1")
    try:
        products = linears(config, parallel)
    except ValueError as error:
        raise UsageError(str(error)) from None
    decode: list[Term] = []
    prefill: list[Term] = []
    own_attention = measured_times is not None and "mla_decode" in measured_times.ops()
    held_bmms = () if own_attention else tables.held("decode")
    # TensorRT-LLM and vLLM compute the shared expert as linears of its own.
    fused_shared = parallel.ep == 1 and engine_name(tables.engine) not in ("trtllm", "vllm")
    for linear in products:
        if fused_shared and linear.name.startswith("shared"):
            continue
        part = linear.name.replace(" ", "_")
        if linear.kind == BATCHED:
            bmm = _bmm(tables, part, linear.decode_calls, linear.batch)
            if not (part in held_bmms and _is_missing(bmm)):
                decode.append(bmm)
            continue
        kind = {FP8: "fp8_block", BF16: "bfloat16"}[linear.kind]
        op = {FP8: "block_scale_gemm", BF16: "bf16_gemm"}[linear.kind]
        last = part == "lm_head"  # sees one token of each sequence
        for calls, terms in ((linear.decode_calls, decode), (linear.prefill_calls, prefill)):
            if calls:
                time = _gemm(tables, kind, linear.n, linear.k, last)
                key = (linear.n, linear.k)
                term = Term(op, part, calls, "table", "GEMM table", time)
                terms.append(_measured_first(term, measured_times, key, lambda load: (load.tokens,)))
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    heads = parallel.heads(config)
    tp, ep = (1, parallel.ep) if parallel.ep > 1 else (parallel.tp, 1)

    def moe(load: StepLoad) -> TimeEstimate:
        estimate = routed(tables, config, load.tokens, tp, ep)
        return estimate.times(shared_expert_factor(config, load.tokens)) if fused_shared else estimate

    def reduced(load: StepLoad) -> TimeEstimate:
        return tables.all_reduce(load.tokens * config.hidden_size, parallel.tp)

    shapes = {linear.name.replace(" ", "_"): linear for linear in products}

    def beside(phase: str, load: StepLoad) -> float:
        """us of what attention's times hold beside it, where that has a time of its own."""
        us = 0.0
        for part, kind in tables.held(phase).items():
            if part == "glue":
                us += glue_us(load.tokens, *ATTENTION_GLUE)
            elif kind:
                us += tables.gemm(kind, load.tokens, shapes[part].n, shapes[part].k).us
            elif not _is_missing(bmm := _bmm(tables, part, 1, heads)):
                us += bmm.time(load).us
        return us

    def attention(load: StepLoad) -> TimeEstimate:
        estimate = tables.mla_decode(load.batch, load.context, heads, kv)
        return without(estimate, beside("decode", load))

    def prefill_attention(load: StepLoad) -> TimeEstimate:
        tokens = replace(load, tokens=load.batch * load.context)
        return without(plain_prefill(tables, config, load, heads, kv), beside("prefill", tokens))

    inter = config.moe_intermediate_size // tp
    experts = (config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, inter, ep)
    with_shared = (*experts, config.n_shared_experts if fused_shared else 0)
    alone = measured_times is not None and ("fused_moe", with_shared) not in measured_times.surfaces
    moe_sizes = (*experts, 0) if alone else with_shared

    def with_the_shared_one(load: StepLoad) -> float:
        return shared_expert_factor(config, load.tokens) if alone and fused_shared else 1.0

    def between(load: StepLoad) -> TimeEstimate:
        step, token = tables.between_us
        return TimeEstimate(step + token * load.tokens, DEVIATION)

    def rows(load: StepLoad) -> tuple[float]:
        return (load.tokens,)

    for terms in (decode, prefill):
        experts_term = Term("fused_moe", "", layers - dense, "table", "MoE table", moe)
        terms.append(_measured_first(experts_term, measured_times, moe_sizes, rows, with_the_shared_one))
        if parallel.tp > 1:
            terms.append(Term("all_reduce", "", 2 * layers, "table", "all-reduce table", reduced))
        terms.append(Term("elementwise", "glue", layers, "assumed", "glue", glue))
        if any(tables.between_us):
            terms.append(Term("host", "between_kernels", 1, "assumed", SOURCE, between))
    cache = {"bfloat16": "bf16"}.get(kv, kv)

    def sequences(load: StepLoad) -> tuple[float, float]:
        return (load.batch, load.context)

    decode_term = Term("mla_decode", "", layers, "table", "attention table", attention)
    decode.append(_measured_first(decode_term, measured_times, (heads, cache), sequences))
    scaled: Origin = "regression" if tables.prefill_is_absorbed else "table"
    prefill_term = Term("mha_prefill", "", layers, scaled, "prefill attention", prefill_attention)
    prefill.append(_measured_first(prefill_term, measured_times, (heads, 0), sequences))
    if assumed is not None and any(map(_is_missing, [*decode, *prefill])):
        other = structure(assumed, parallel, kv=kv)
        decode, prefill = _filled(decode, other.decode), _filled(prefill, other.prefill)
    _nothing_missing(tables, parallel, [*decode, *prefill])
    weights, cache_bytes = _weights_gb(config, parallel), _kv_bytes(config, kv)
    where = f"{tables.device}, {tables.engine} {tables.version} ({tables.where})"
    return Structure(
        config, parallel, tuple(decode), tuple(prefill), weights, cache_bytes, where, tables.version
    )


def _measured_first(
    term: Term,
    measured_times: MeasuredTimes | None,
    key: tuple[object, ...],
    sizes: Callable[[StepLoad], tuple[float, ...]],
    scale: Callable[[StepLoad], float] = lambda load: 1.0,
) -> Term:
    """A term of a table, over measured times, scaled, where they are near or no table has any."""
    if measured_times is None or (term.op, key) not in measured_times.surfaces:
        return term

    def time(load: StepLoad) -> TimeEstimate:
        estimate = measured_times.at(term.op, key, *sizes(load)).times(scale(load))
        if estimate.distance <= NEAR:
            return estimate
        try:
            return term.time(load)
        except MissingTable:
            return estimate

    return replace(term, origin="measured", source="own runs", time=time)


def _is_missing(term: Term) -> bool:
    try:
        term.time(StepLoad(8, 8, 1024))
    except MissingTable:
        return True
    return False


def _filled(terms: Sequence[Term], assumed: Sequence[Term]) -> list[Term]:
    """Terms without a time take that of their namesakes."""
    by_name = {term.name: term for term in assumed}
    own = [
        replace(term, origin="assumed", source=SOURCE, time=by_name[term.name].time)
        if _is_missing(term)
        else term
        for term in terms
    ]
    return [*own, *(term for name, term in by_name.items() if name == BETWEEN)]


def _nothing_missing(tables: Tables, parallel: Parallel, terms: list[Term]) -> None:
    """All that is missing is said at once, before anything is computed."""
    missing = [term for term in terms if _is_missing(term)]
    if missing:
        of_part = {term.op for term in terms if term not in missing}
        names = ", ".join(dict.fromkeys(t.name if t.op in of_part else t.op for t in missing))
        why = f"no times of {names} in {tables.where}"
        if isinstance(tables, AssumedTables):
            why = f"data sheets scale the H200's times, which are of tp8 alone: at {parallel.text} none of {names}"
        raise MissingTable(
            f"{why}; give --times DIR with tables that have them (AIConfigurator's), or runs of this suite on "
            f"{tables.device}, which hold block_scale_gemm, fused_moe, mla_decode and mha_prefill"
        )


def plain_prefill(
    tables: Tables, config: ModelConfig, load: StepLoad, heads: int, kv: str = "bfloat16"
) -> TimeEstimate:
    """Prefill attention as engines run it (192 wide, values 128). From an absorbed time (576, 512): what is
    above the time of one token goes down with the work."""
    timed = tables.mla_prefill(load.batch, load.context, heads, kv)
    if not tables.prefill_is_absorbed:
        return timed
    least = tables.mla_prefill(1, 1, heads, kv).us
    rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
    work = (config.qk_nope_head_dim + rope + config.v_head_dim) / (latent + rope + latent)
    return TimeEstimate(least + max(timed.us - least, 0.0) * work, timed.noise, timed.distance)


def without(estimate: TimeEstimate, us: float) -> TimeEstimate:
    """What is left of a time that holds `us` of something else; a tenth of it is, whatever the tables say.
    Its uncertainty in us stays."""
    left = max(estimate.us - us, 0.1 * estimate.us)
    more = estimate.us / left
    return TimeEstimate(left, estimate.noise * more, estimate.distance * more)


def glue(load: StepLoad) -> TimeEstimate:
    """Of one layer."""
    return TimeEstimate(glue_us(load.tokens, GLUE_CALLS, GLUE_BYTES))


def glue_us(tokens: float, calls: int, moved: float) -> float:
    return calls * GLUE_US + tokens * moved / GLUE_GBPS / 1e3


def _gemm(tables: Tables, kind: str, n: int, k: int, last: bool) -> Callable[[StepLoad], TimeEstimate]:
    return lambda load: tables.gemm(kind, load.batch if last else load.tokens, n, k)


def _bmm(tables: Tables, part: str, calls: int, heads: int) -> Term:
    which = "mla_gen_pre" if part == "w_uk" else "mla_gen_post"

    def time(load: StepLoad) -> TimeEstimate:
        return tables.absorbed_bmm(which, load.tokens, heads)

    return Term("absorbed_bmm", part, calls, "table", "BMM table", time)


def _weights_gb(config: ModelConfig, parallel: Parallel) -> float:
    """Of a rank, in FP8, router and vocabulary in bf16."""
    total = 0.0
    for linear in linears(config, parallel):
        size = 1 if linear.kind == FP8 else 2
        total += linear.n * linear.k * linear.batch * max(linear.decode_calls, linear.prefill_calls) * size
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    total += moe_layers * config.n_routed_experts * expert / max(parallel.tp, parallel.ep)
    total += 2 * config.vocab_size * config.hidden_size / parallel.tp  # embedding
    return total / 1e9


def _kv_bytes(config: ModelConfig, kv: str) -> int:
    """Of a token on a rank: the latent is on each."""
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_hidden_layers * latent * (2 if kv == "bfloat16" else 1)
