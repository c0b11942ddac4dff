"""The structure of a step of DeepSeek-R1: the calls of one rank, and where the time of each call comes from.

The counts are those of the layers (shapes/): 61 attentions, 58 MoE and 3 dense MLPs, and 122 all-reduces
under tensor parallelism. SGLang computes the shared expert as a further expert of the fused MoE under tensor
parallelism (257 experts, top 9), and as linears of its own under expert parallelism.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.errors import UsageError
from harness.files import JsonObject
from harness.serving.link.kernel_times import AssumedTables, MeasuredTimes, MissingTable, Tables, peak_mla_us
from harness.serving.names import data_sheet, engine_name, hardware_name
from shapes.attention import Parallel
from shapes.linears import BATCHED, Linear, linears
from shapes.models import BF16, FP8, ModelConfig, model

# Small kernels between the timed ones, which no table has: norms of the latents, rotary embedding, cache
# write, choice of experts, concatenations. A trace of SGLang 0.5.9 on 8xH200 has 1717 kernels a step in one
# stream, as InferenceX's issue 863 sums it up (by a language model). Their times are assumed.
GLUE_CALLS = 7  # in a layer
GLUE_US = 2.0  # of each call, in a graph, at few tokens
GLUE_BYTES = 200e3  # of a token in a layer: 2 residual norms (115 KB), the rest q, k, v and latents
GLUE_GBPS = 4000.0  # of the 4800 of HBM3e
BALANCED = "balanced"  # the tables' name of a distribution of tokens over experts
Origin = Literal["measured", "table", "regression", "assumed"]
SLOWEST_OF_8 = 1.42  # the largest of 8 normal variables exceeds their mean by so many deviations
# Some experts are chosen more often. The experts of the busiest rank take so many times what an even choice
# takes: median of the tables at moe_ep_size 8 and 3072 to 16384 tokens, power law over balanced.
BUSIEST = 1.2
BLOCK_ROWS = 64  # rows of a tile of the grouped products


@dataclass(frozen=True)
class StepLoad:
    """The load of one step.

    tokens:       rows of the linears
    batch:        sequences
    context:      cached tokens of each sequence in decode; tokens of its prompt in prefill
    query_tokens: of each sequence in decode: 1 + drafts if it verifies drafts
    """

    tokens: float
    batch: float
    context: float
    query_tokens: int = 1


@dataclass(frozen=True)
class Term:
    """Calls of one kind in a step.

    op:     a name of harness/catalogue/op_classes.json
    time:   us of a call
    part:   which of the op's products or kernels it is; empty if the op has one
    origin: where its time comes from
    """

    op: str
    calls: int
    time: Callable[[StepLoad], float]
    part: str = ""
    origin: Origin = "table"

    @property
    def name(self) -> str:
        return f"{self.op}:{self.part}" if self.part else self.op


@dataclass(frozen=True, eq=False)
class Structure:
    """The terms of both phases.

    weights_gb: weights of a rank
    kv_bytes:   bytes of a token in the cache of a rank
    where:      the tables
    assumed:    ops whose times come from data sheets
    drafts:     draft tokens of a sequence that a decode step makes and verifies
    """

    parallel: Parallel
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]
    weights_gb: float
    kv_bytes: int
    where: str
    assumed: tuple[str, ...] = ()
    drafts: int = 0


def structure(
    tables: Tables,
    parallel: Parallel,
    *,
    kv: str = "bfloat16",
    measured_times: MeasuredTimes | None = None,
    assumed: Tables | None = None,
    drafts: int = 0,
) -> Structure:
    """The structure of DeepSeek-R1 over tables. Raises MissingTable (a UsageError) that names all times which
    the tables lack, and UsageError for a parallelism that is not modelled.

    assumed:        times that are used if the tables have none
    kv:             bfloat16 or fp8, the cache's type in the words of the tables
    measured_times: these are used first, if their sizes are near
    drafts:         tokens of a sequence that the model's MTP layer drafts
    """
    if parallel.ep not in (1, parallel.tp):
        raise UsageError(
            f"ep{parallel.ep} is not modelled with tp{parallel.tp}; give ep{parallel.tp}, or none"
        )
    config = model("deepseek-r1")
    try:
        products = linears(config, parallel)
    except ValueError as error:
        raise UsageError(str(error)) from None
    layers, heads = config.num_hidden_layers, parallel.heads(config)
    # TensorRT-LLM and vLLM compute the shared expert as linears of its own.
    shared_is_fused = parallel.ep == 1 and engine_name(tables.engine) not in ("trtllm", "vllm")
    decode: list[Term] = []
    prefill: list[Term] = []
    for linear in products:
        if shared_is_fused and linear.name.startswith("shared"):
            continue
        for calls, terms in ((linear.decode_calls, decode), (linear.prefill_calls, prefill)):
            if calls:
                product = _product(tables, linear, calls)
                terms.append(_measured_first(measured_times, product, (linear.n, linear.k), _rows))
    both_phases = _both_phases(tables, config, parallel, shared_is_fused, measured_times)
    decode += [*both_phases, _decode_attention(tables, layers, heads, kv, 1 + drafts, measured_times)]
    origin: Origin = "regression" if tables.prefill_is_absorbed else "table"
    attention = Term(
        "mha_prefill", layers, lambda load: plain_prefill(tables, config, load, heads, kv), origin=origin
    )
    prefill += [*both_phases, _measured_first(measured_times, attention, (heads, 0), _sequences)]
    lacking = dict.fromkeys(term.op for term in (*decode, *prefill) if _is_missing(term))
    if assumed is not None and lacking:
        other = structure(assumed, parallel, kv=kv)
        decode, prefill = _filled(decode, other.decode), _filled(prefill, other.prefill)
    _require_all(tables, parallel, [*decode, *prefill])
    if drafts:
        head = next(linear for linear in products if linear.name == "lm_head")
        decode = [*_with_drafts(decode, layers, drafts, 2 * config.hidden_size / head.n)]
    cached_layers = layers + 1 if drafts else layers  # the MTP layer has a cache, too
    latent = config.kv_lora_rank + config.qk_rope_head_dim  # values of a token in a layer's cache
    return Structure(
        parallel=parallel,
        decode=tuple(decode),
        prefill=tuple(prefill),
        weights_gb=_weights_gb(config, parallel, has_mtp=bool(drafts)),
        kv_bytes=cached_layers * latent * (2 if kv == "bfloat16" else 1),
        where=f"{tables.device}, {tables.engine} {tables.version}".rstrip() + f" ({tables.where})",
        assumed=tuple(lacking),
        drafts=drafts,
    )


def _rows(load: StepLoad) -> tuple[float]:
    return (load.tokens,)


def _sequences(load: StepLoad) -> tuple[float, float]:
    return (load.batch, load.context)


def _both_phases(
    tables: Tables, config: ModelConfig, parallel: Parallel, shared_is_fused: bool, runs: MeasuredTimes | None
) -> list[Term]:
    """The terms beside products and attention: experts, all-reduce, small kernels, time between kernels."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    tp, ep = (1, parallel.ep) if parallel.ep > 1 else (parallel.tp, 1)  # of the experts

    def shared_factor(load: StepLoad) -> float:
        return shared_expert_factor(config, load.tokens) if shared_is_fused else 1.0

    def experts_us(load: StepLoad) -> float:
        return routed(tables, config, load.tokens, tp, ep) * shared_factor(load)

    experts = Term("fused_moe", layers - config.first_k_dense_replace, experts_us)
    inter = config.moe_intermediate_size // tp
    sizes = (config.n_routed_experts, config.num_experts_per_tok, hidden, inter, ep)
    with_shared = (*sizes, config.n_shared_experts if shared_is_fused else 0)
    if runs is not None and (experts.op, with_shared) in runs.surfaces:
        terms = [_measured_first(runs, experts, with_shared, _rows)]
    else:  # Own runs may have timed the routed experts without the shared one.
        terms = [_measured_first(runs, experts, (*sizes, 0), _rows, shared_factor)]
    if parallel.tp > 1:
        terms.append(
            Term("all_reduce", 2 * layers, lambda load: tables.all_reduce(load.tokens * hidden, parallel.tp))
        )
    terms.append(Term("elementwise", layers, glue_us, "glue", "assumed"))
    step_us, token_us = tables.between_us
    if step_us or token_us:
        terms.append(
            Term("host", 1, lambda load: step_us + token_us * load.tokens, "between_kernels", "assumed")
        )
    return terms


def _decode_attention(
    tables: Tables, layers: int, heads: int, kv: str, query_tokens: int, runs: MeasuredTimes | None
) -> Term:
    """MLA decode. Own runs with as many query tokens are used first, or else those with one."""
    sheet = data_sheet(hardware_name(tables.device)) or data_sheet("h200")
    cache = "bf16" if kv == "bfloat16" else kv  # the name of the dtype in own runs
    has_own = runs is not None and ("mla_decode", (heads, cache, query_tokens)) in runs.surfaces
    timed = query_tokens if has_own else 1

    def table_us(load: StepLoad) -> float:
        us = tables.mla_decode(load.batch, load.context, heads, kv)
        return us * query_token_factor(sheet, load, heads, kv)

    def run_factor(load: StepLoad) -> float:
        return query_token_factor(sheet, load, heads, kv, timed)

    sizes = (heads, cache, timed)
    return _measured_first(runs, Term("mla_decode", layers, table_us), sizes, _sequences, run_factor)


def _with_drafts(terms: Sequence[Term], layers: int, drafts: int, joining: float) -> Iterator[Term]:
    """The terms, with the calls of the MTP layer's passes; times are the mean over all calls.

    A step of SGLang (eagle_worker_v2.py) and of vLLM (llm_base_proposer.py) verifies 1 + drafts tokens. It
    passes as many through the MTP layer for the first draft, then one token for each further draft.

    joining: weights of the layer's product that joins hidden state and embedding, over those of lm_head
    """

    def passes_us(term: Term, load: StepLoad, first_of_all: bool) -> float:
        """All passes. first_of_all: whether the first pass computes all tokens; otherwise it computes one"""
        one_token = replace(load, tokens=load.batch, query_tokens=1)
        return term.time(load if first_of_all else one_token) + (drafts - 1) * term.time(one_token)

    def mean_us(term: Term, calls: int, load: StepLoad) -> float:
        us = term.calls * term.time(load) + calls * passes_us(term, load, term.part != "lm_head")
        return us / (term.calls + calls * drafts)

    def joining_us(head: Term, load: StepLoad) -> float:
        return joining * passes_us(head, load, True) / drafts

    for term in terms:
        is_head = term.part == "lm_head"  # which computes one token in each pass
        calls = 1 if is_head else round(term.calls / layers)  # in one pass
        mean = functools.partial(mean_us, term, calls) if calls else term.time
        yield replace(term, calls=term.calls + calls * drafts, time=mean)
        if is_head:  # No table has the joining product. Its time is that of lm_head, scaled by the weights.
            yield replace(term, part="eh_proj", calls=drafts, time=functools.partial(joining_us, term))


def query_token_factor(sheet: JsonObject, load: StepLoad, heads: int, kv: str, timed: int = 1) -> float:
    """The time of MLA decode with load.query_tokens over that with `timed` ones, by a data sheet. The cache
    is read once, and products have rows of (token, head), at least 64, as FlashMLA pads them."""
    cached = load.batch * load.context
    us = peak_mla_us(sheet, max(load.query_tokens * heads, BLOCK_ROWS), cached, kv)
    return us / peak_mla_us(sheet, max(timed * heads, BLOCK_ROWS), cached, kv)


def _product(tables: Tables, linear: Linear, calls: int) -> Term:
    part = linear.name.replace(" ", "_")
    if linear.kind == BATCHED:
        which = "mla_gen_pre" if part == "w_uk" else "mla_gen_post"
        return Term(
            "absorbed_bmm", calls, lambda load: tables.absorbed_bmm(which, load.tokens, linear.batch), part
        )
    op, dtype = {FP8: ("block_scale_gemm", "fp8_block"), BF16: ("bf16_gemm", "bfloat16")}[linear.kind]

    def gemm_us(load: StepLoad) -> float:
        # lm_head computes one token of each sequence, or all that are verified.
        tokens = load.batch * load.query_tokens if part == "lm_head" else load.tokens
        return tables.gemm(dtype, tokens, linear.n, linear.k)

    return Term(op, calls, gemm_us, part)


def _measured_first(
    runs: MeasuredTimes | None,
    term: Term,
    key: tuple[object, ...],
    sizes: Callable[[StepLoad], tuple[float, ...]],
    scale: Callable[[StepLoad], float] = lambda load: 1.0,
) -> Term:
    """The term with scaled times from own runs, if their sizes are near or the tables have none."""
    if runs is None or (term.op, key) not in runs.surfaces:
        return term
    surface = runs.surfaces[term.op, key]

    def time(load: StepLoad) -> float:
        us = surface.us_at(*sizes(load)) * scale(load)
        if surface.covers(*sizes(load)):
            return us
        try:
            return term.time(load)
        except MissingTable:
            return us

    return replace(term, origin="measured", time=time)


def _is_missing(term: Term) -> bool:
    try:
        term.time(StepLoad(8, 8, 1024))
    except MissingTable:
        return True
    return False


def _filled(terms: Sequence[Term], assumed: Sequence[Term]) -> list[Term]:
    """The terms; one without a time takes that of the assumed term of its name. The assumed time between
    kernels is added."""
    by_name = {term.name: term for term in assumed}
    filled = [
        replace(term, origin="assumed", time=by_name[term.name].time) if _is_missing(term) else term
        for term in terms
    ]
    return [*filled, *(term for term in assumed if term.op == "host")]


def _require_all(tables: Tables, parallel: Parallel, terms: list[Term]) -> None:
    """Raises MissingTable, which names all missing times, before anything is computed."""
    missing = [term for term in terms if _is_missing(term)]
    if missing:
        partly_timed = {term.op for term in terms if term not in missing}
        kernels = (term.name if term.op in partly_timed else term.op for term in missing)
        names = ", ".join(dict.fromkeys(kernels))
        why = f"no times of {names} in {tables.where}"
        if isinstance(tables, AssumedTables):
            why = f"data sheets scale times of tp8 alone: at {parallel.text} there are none of {names}"
        raise MissingTable(
            f"{why}; give --times DIR with AIConfigurator's tables that have them, or runs of this suite "
            f"on {tables.device}, which hold block_scale_gemm, fused_moe, mla_decode and mha_prefill"
        )


def plain_prefill(
    tables: Tables, config: ModelConfig, load: StepLoad, heads: int, kv: str = "bfloat16"
) -> float:
    """The time of prefill attention as engines run it (192 wide, values 128). Of an absorbed time (576, 512)
    what is above the time of one token is scaled with the work."""
    timed = tables.mla_prefill(load.batch, load.context, heads, kv)
    if not tables.prefill_is_absorbed:
        return timed
    least = tables.mla_prefill(1, 1, heads, kv)
    rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
    work = (config.qk_nope_head_dim + rope + config.v_head_dim) / (latent + rope + latent)
    return least + max(timed - least, 0.0) * work


def glue_us(load: StepLoad) -> float:
    """The time in us of one layer's small kernels."""
    return GLUE_CALLS * GLUE_US + load.tokens * GLUE_BYTES / GLUE_GBPS / 1e3


def routed(tables: Tables, config: ModelConfig, tokens: float, tp: int, ep: int) -> float:
    """The time of the routed experts of one rank; under expert parallelism, of the slowest rank.

    Tokens choose their experts independently. In the tables' `balanced` distribution tokens share no expert
    as long as they can. So a time at few tokens is the time of a number of experts' weights, and is read at
    the number of tokens that hits as many experts as independent tokens do.
    """
    distributions = tables.distributions()
    if distributions and BALANCED not in distributions:
        return tables.moe(tokens, tp, ep, distributions[0])
    topk = config.num_experts_per_tok
    all_hit = config.n_routed_experts / topk  # tokens that hit every expert if they share none
    share = experts_hit(config, tokens) / config.n_routed_experts
    if ep > 1:
        deviation = math.sqrt(share * (1 - share) / (config.n_routed_experts / ep))  # over the ranks
        share = min(share + SLOWEST_OF_8 * deviation, 1.0)
    us = tables.moe(share * all_hit, tp, ep, BALANCED) * (BUSIEST if ep > 1 else 1.0)
    if tokens <= all_hit:
        return us
    return us * tables.moe(tokens, tp, ep, BALANCED) / tables.moe(all_hit, tp, ep, BALANCED)


def experts_hit(config: ModelConfig, tokens: float) -> float:
    """The expected number of experts that are hit by tokens which choose independently."""
    experts = config.n_routed_experts
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** tokens)


def shared_expert_factor(config: ModelConfig, tokens: float) -> float:
    """The time of 257 experts, top 9, over that of 256, top 8, by the number of tiles of the products. Each
    expert that is hit has at least one tile, whose weights are read."""
    topk = config.num_experts_per_tok
    hit = experts_hit(config, tokens)
    return 1 + math.ceil(tokens / BLOCK_ROWS) / max(hit, tokens * topk / BLOCK_ROWS)


def _weights_gb(config: ModelConfig, parallel: Parallel, *, has_mtp: bool) -> float:
    """Weights of a rank in FP8, router and vocabulary in bf16. has_mtp: whether the MTP layer's count"""
    total = 0.0
    for linear in linears(config, parallel):
        element_bytes = 1 if linear.kind == FP8 else 2
        calls = max(linear.decode_calls, linear.prefill_calls)
        total += linear.n * linear.k * linear.batch * calls * element_bytes
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace + (1 if has_mtp else 0)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    total += moe_layers * config.n_routed_experts * expert / max(parallel.tp, parallel.ep)
    total += 2 * config.vocab_size * config.hidden_size / parallel.tp  # embedding
    return total / 1e9
