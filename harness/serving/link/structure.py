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
from harness.serving.link.kernel_times import AssumedTables, MissingTable, Surfaces, Tables, peak_mla_us
from harness.serving.names import data_sheet, engine_name, hardware_name
from shapes.attention import Parallel
from shapes.linears import BATCHED, Linear, linears
from shapes.models import BF16, FP8, model

R1 = model("deepseek-r1")
# Small kernels between the timed ones, which no table has: norms of the latents, rotary embedding, cache
# write, choice of experts, concatenations. A trace of SGLang 0.5.9 on 8xH200 has 1717 kernels a step in one
# stream, as InferenceX's issue 863 sums it up (by a language model). Their times are assumed.
GLUE_CALLS = 7  # in a layer
GLUE_US = 2.0  # of each call, in a graph, at few tokens
GLUE_BYTES = 200e3  # of a token in a layer: 2 residual norms (115 KB), the rest q, k, v and latents
GLUE_GBPS = 4000.0  # of the 4800 of HBM3e
BALANCED = "balanced"  # the tables' name of a distribution of tokens over experts
Origin = Literal["measured", "table", "regression", "assumed"]
"""Where a time comes from. `regression`: from a table of another form of the kernel, scaled by the work."""
SLOWEST_OF_8 = 1.42  # the largest of 8 normal variables exceeds their mean by so many deviations
# Some experts are chosen more often, so that the busiest rank of expert parallelism takes longer by a factor:
# the median of the tables' `power_law` over `balanced` times, at moe_ep_size 8 and 3072 to 16384 tokens.
BUSIEST = 1.2
BLOCK_ROWS = 64  # rows of a tile of the grouped products


@dataclass(frozen=True)
class StepLoad:
    """The load of one step."""

    tokens: float  # rows of the linears
    batch: float  # sequences
    context: float  # cached tokens of each sequence in decode; tokens of its prompt in prefill
    query_tokens: int = 1  # of each sequence in decode: 1 + drafts if it verifies drafts


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
    """The terms of both phases."""

    parallel: Parallel
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]
    weights_gb: float  # of a rank
    kv_bytes: int  # of a token in the cache of a rank
    source: str  # the tables, as messages name them
    assumed: tuple[str, ...] = ()  # ops whose times come from data sheets
    drafts: int = 0  # draft tokens of a sequence that a decode step makes and verifies


def structure(
    tables: Tables,
    parallel: Parallel,
    *,
    kv: str = "bfloat16",
    own: Surfaces | None = None,
    assumed: Tables | None = None,
    drafts: int = 0,
) -> Structure:
    """The structure of DeepSeek-R1 over tables. Raises MissingTable (a UsageError) that names all times which
    the tables lack, UsageError for a parallelism that is not modelled, ValueError if it does not divide R1.

    assumed: times that are used if the tables have none
    kv:      bfloat16 or fp8, the cache's type in the words of the tables
    own:     times of the user's runs, which are used first if their sizes are near
    drafts:  tokens of a sequence that the model's MTP layer drafts
    """
    if parallel.ep not in (1, parallel.tp):
        raise UsageError(
            f"ep{parallel.ep} is not modelled with tp{parallel.tp}; give ep{parallel.tp}, or none"
        )
    decode, prefill = _terms(tables, parallel, kv, 1 + drafts, own or {})
    lacking = dict.fromkeys(term.op for term in (*decode, *prefill) if _is_missing(term))
    if assumed is not None and lacking:
        assumed_decode, assumed_prefill = _terms(assumed, parallel, kv, 1 + drafts, own={})
        _require_all(assumed, parallel, [*assumed_decode, *assumed_prefill])
        decode, prefill = _filled(decode, assumed_decode), _filled(prefill, assumed_prefill)
    _require_all(tables, parallel, [*decode, *prefill])
    if drafts:
        decode = [*_with_drafts(decode, parallel, drafts)]
    layers = R1.num_hidden_layers + (1 if drafts else 0)  # the MTP layer has a cache, too
    latent = R1.kv_lora_rank + R1.qk_rope_head_dim  # values of a token in a layer's cache
    return Structure(
        parallel=parallel,
        decode=tuple(decode),
        prefill=tuple(prefill),
        weights_gb=_weights_gb(parallel, has_mtp=bool(drafts)),
        kv_bytes=layers * latent * (2 if kv == "bfloat16" else 1),
        source=f"{tables.device}, {tables.engine} {tables.version}".rstrip() + f" ({tables.source})",
        assumed=tuple(lacking),
        drafts=drafts,
    )


def _terms(
    tables: Tables, parallel: Parallel, kv: str, query_tokens: int, own: Surfaces
) -> tuple[list[Term], list[Term]]:
    """The terms of decode and of prefill. Raises ValueError if the parallelism does not divide the sizes."""
    layers, heads = R1.num_hidden_layers, parallel.heads(R1)
    # TensorRT-LLM and vLLM compute the shared expert as linears of its own.
    shared_is_fused = parallel.ep == 1 and engine_name(tables.engine) not in ("trtllm", "vllm")
    decode: list[Term] = []
    prefill: list[Term] = []
    for linear in linears(R1, parallel):
        if shared_is_fused and linear.name.startswith("shared"):
            continue
        for calls, terms in ((linear.decode_calls, decode), (linear.prefill_calls, prefill)):
            if calls:
                product = _product(tables, linear, calls)
                terms.append(_own_first(own, product, (linear.n, linear.k)))
    both_phases = _both_phases(tables, parallel, shared_is_fused, own)
    origin: Origin = "regression" if tables.prefill_is_absorbed else "table"
    attention = Term(
        "mha_prefill", layers, lambda load: plain_prefill(tables, load, heads, kv), origin=origin
    )
    decode += [*both_phases, _decode_attention(tables, heads, kv, query_tokens, own)]
    prefill += [*both_phases, _own_first(own, attention, (heads, 0))]
    return decode, prefill


def _both_phases(tables: Tables, parallel: Parallel, shared_is_fused: bool, own: Surfaces) -> list[Term]:
    """The terms beside products and attention: experts, all-reduce, small kernels, time between kernels."""
    layers, hidden = R1.num_hidden_layers, R1.hidden_size
    tp, ep = (1, parallel.ep) if parallel.ep > 1 else (parallel.tp, 1)  # of the experts

    def shared_factor(load: StepLoad) -> float:
        return shared_expert_factor(load.tokens) if shared_is_fused else 1.0

    def experts_us(load: StepLoad) -> float:
        return routed_us(tables, load.tokens, tp, ep) * shared_factor(load)

    experts = Term("fused_moe", layers - R1.first_k_dense_replace, experts_us)
    sizes = (R1.n_routed_experts, R1.num_experts_per_tok, hidden, R1.moe_intermediate_size // tp, ep)
    as_called = (*sizes, R1.n_shared_experts if shared_is_fused else 0)
    if (experts.op, as_called) in own:
        terms = [_own_first(own, experts, as_called)]
    else:  # Own runs may have timed the routed experts alone, without the shared one that is fused here.
        terms = [_own_first(own, experts, (*sizes, 0), shared_factor)]
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


def _decode_attention(tables: Tables, heads: int, kv: str, query_tokens: int, own: Surfaces) -> Term:
    """MLA decode. Own runs with as many query tokens are used first, or else those with one."""
    # Only ratios of times are taken from the sheet. Without one those of the H200 are near enough.
    sheet = data_sheet(hardware_name(tables.device)) or data_sheet("h200")
    cache = "bf16" if kv == "bfloat16" else kv  # the name of the dtype in own runs
    own_query_tokens = query_tokens if ("mla_decode", (heads, cache, query_tokens)) in own else 1

    def table_us(load: StepLoad) -> float:
        us = tables.mla_decode(load.batch, load.context, heads, kv)
        return us * query_token_factor(sheet, load, heads, kv)

    def own_factor(load: StepLoad) -> float:
        return query_token_factor(sheet, load, heads, kv, own_query_tokens)

    term = Term("mla_decode", R1.num_hidden_layers, table_us)
    return _own_first(own, term, (heads, cache, own_query_tokens), own_factor)


def _with_drafts(terms: Sequence[Term], parallel: Parallel, drafts: int) -> Iterator[Term]:
    """The terms of a decode step with the calls of the MTP layer. A term's time is the mean over its calls.

    A step of SGLang (eagle_worker_v2.py) and of vLLM (llm_base_proposer.py) verifies 1 + drafts tokens of a
    sequence. Then each draft takes a pass through the MTP layer: the first pass has all of these tokens, each
    further one has one token of a sequence. lm_head computes one token of a sequence in every pass.
    """
    lm_head = next(linear for linear in linears(R1, parallel) if linear.name == "lm_head")
    # The layer's product that joins hidden state and embedding is in no table. It takes the time of lm_head,
    # scaled by the weights: [hidden, 2 hidden] over [n, hidden].
    joining = 2 * R1.hidden_size / lm_head.n

    def of_one_token(load: StepLoad) -> StepLoad:
        return replace(load, tokens=load.batch, query_tokens=1)

    def all_passes_us(term: Term, first: StepLoad) -> float:
        """The time of one call in each pass. first: the load of the first pass"""
        return term.time(first) + (drafts - 1) * term.time(of_one_token(first))

    def mean_us(term: Term, calls_of_pass: int, load: StepLoad) -> float:
        first = of_one_token(load) if term.part == "lm_head" else load
        total_us = term.calls * term.time(load) + calls_of_pass * all_passes_us(term, first)
        return total_us / (term.calls + calls_of_pass * drafts)

    def joining_us(lm_head: Term, load: StepLoad) -> float:
        return joining * all_passes_us(lm_head, load) / drafts

    for term in terms:
        is_head = term.part == "lm_head"
        # The calls of one layer. Terms of the dense layers and of the host are not in the MTP layer.
        calls_of_pass = 1 if is_head else round(term.calls / R1.num_hidden_layers)
        mean = functools.partial(mean_us, term, calls_of_pass) if calls_of_pass else term.time
        yield replace(term, calls=term.calls + calls_of_pass * drafts, time=mean)
        if is_head:
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


def _own_first(
    own: Surfaces,
    term: Term,
    fixed: tuple[object, ...],
    scale: Callable[[StepLoad], float] = lambda load: 1.0,
) -> Term:
    """The term with the time of own runs, if they have timed it. At sizes far from theirs it keeps its own
    time, if it has one there.

    fixed: the sizes that must be equal, as in AXES
    scale: factor of the time of own runs
    """
    if (term.op, fixed) not in own:
        return term
    surface = own[term.op, fixed]

    def time(load: StepLoad) -> float:
        is_attention = term.op in ("mla_decode", "mha_prefill")
        sizes = (load.batch, load.context) if is_attention else (load.tokens,)
        us = surface.us_at(*sizes) * scale(load)
        if surface.covers(*sizes):
            return us
        try:
            return term.time(load)
        except MissingTable:
            return us

    return replace(term, origin="measured", time=time)


def _is_missing(term: Term) -> bool:
    try:
        term.time(StepLoad(8, 8, 1024))  # tables that have a time have it at any load
    except MissingTable:
        return True
    return False


def _filled(terms: Sequence[Term], assumed: Sequence[Term]) -> list[Term]:
    """The terms; one without a time has that of the assumed term of its name. An assumed `host` is added."""
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
        # Parts are named only of an op that has times of other parts.
        partly_timed = {term.op for term in terms if term not in missing}
        kernels = (term.name if term.op in partly_timed else term.op for term in missing)
        names = ", ".join(dict.fromkeys(kernels))
        why = f"no times of {names} in {tables.source}"
        if isinstance(tables, AssumedTables):
            why = f"data sheets scale times of tp8 alone: at {parallel.text} there are none of {names}"
        raise MissingTable(
            f"{why}; give --times DIR with AIConfigurator's tables that have them, or runs of this suite "
            f"on {tables.device}, which hold block_scale_gemm, fused_moe, mla_decode and mha_prefill"
        )


def plain_prefill(tables: Tables, load: StepLoad, heads: int, kv: str = "bfloat16") -> float:
    """The time of prefill attention as engines run it, with heads 192 wide and values 128. A time of absorbed
    attention (576 and 512 wide) is scaled with the work, except for the time of one token, a fixed cost."""
    timed = tables.mla_prefill(load.batch, load.context, heads, kv)
    if not tables.prefill_is_absorbed:
        return timed
    fixed_us = tables.mla_prefill(1, 1, heads, kv)
    rope, latent = R1.qk_rope_head_dim, R1.kv_lora_rank
    work = (R1.qk_nope_head_dim + rope + R1.v_head_dim) / (latent + rope + latent)
    return fixed_us + max(timed - fixed_us, 0.0) * work


def glue_us(load: StepLoad) -> float:
    """The time in us of one layer's small kernels."""
    return GLUE_CALLS * GLUE_US + load.tokens * GLUE_BYTES / GLUE_GBPS / 1e3


def routed_us(tables: Tables, tokens: float, tp: int, ep: int) -> float:
    """The time of the routed experts of one rank; under expert parallelism, of the slowest rank.

    Few tokens take the time in which the weights of the experts that they hit are read. In the tables'
    `balanced` distribution no two of few tokens hit the same expert, but real tokens choose independently and
    hit fewer. So the table is read at the number of balanced tokens that hit as many experts.
    """
    distributions = tables.values("moe_perf", "distribution")  # the least skewed first
    if distributions and BALANCED not in distributions:
        return tables.moe(tokens, tp, ep, distributions[0])
    all_hit = R1.n_routed_experts / R1.num_experts_per_tok  # balanced tokens that hit every expert
    share_hit = experts_hit(tokens) / R1.n_routed_experts
    if ep > 1:
        deviation = math.sqrt(share_hit * (1 - share_hit) / (R1.n_routed_experts / ep))  # over the ranks
        share_hit = min(share_hit + SLOWEST_OF_8 * deviation, 1.0)
    balanced_tokens = share_hit * all_hit
    us = tables.moe(balanced_tokens, tp, ep, BALANCED) * (BUSIEST if ep > 1 else 1.0)
    if tokens <= all_hit:
        return us
    return us * tables.moe(tokens, tp, ep, BALANCED) / tables.moe(all_hit, tp, ep, BALANCED)


def experts_hit(tokens: float) -> float:
    """The expected number of experts that are hit by tokens which choose independently."""
    experts = R1.n_routed_experts
    return experts * (1 - (1 - R1.num_experts_per_tok / experts) ** tokens)


def shared_expert_factor(tokens: float) -> float:
    """The time of 257 experts, top 9, over that of 256, top 8, by the number of tiles of the products. Each
    expert that is hit has at least one tile, whose weights are read."""
    tiles = max(experts_hit(tokens), tokens * R1.num_experts_per_tok / BLOCK_ROWS)
    return 1 + math.ceil(tokens / BLOCK_ROWS) / tiles


def _weights_gb(parallel: Parallel, *, has_mtp: bool) -> float:
    """Weights of a rank in FP8, router and vocabulary in bf16. has_mtp: whether the MTP layer's count"""
    total = 0.0
    for linear in linears(R1, parallel):
        element_bytes = 1 if linear.kind == FP8 else 2
        calls = max(linear.decode_calls, linear.prefill_calls)
        total += linear.n * linear.k * linear.batch * calls * element_bytes
    moe_layers = R1.num_hidden_layers - R1.first_k_dense_replace + (1 if has_mtp else 0)
    expert = 3 * R1.hidden_size * R1.moe_intermediate_size
    total += moe_layers * R1.n_routed_experts * expert / max(parallel.tp, parallel.ep)
    total += 2 * R1.vocab_size * R1.hidden_size / parallel.tp  # embedding
    return total / 1e9
