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
from harness.serving.link.kernel_times import (
    AssumedTables,
    MeasuredTimes,
    MissingTable,
    Tables,
    data_sheet_us,
)
from harness.serving.names import data_sheet, engine_name, hardware_name
from shapes.attention import Parallel
from shapes.linears import BATCHED, Linear, linears
from shapes.models import BF16, FP8, ModelConfig, model

# Small kernels between the timed ones, which no table has: norms of the latents, rotary embedding, cache
# write, choice of experts, concatenations. A trace of SGLang 0.5.9 on 8xH200 has 1717 kernels a step in one
# stream, as InferenceX's issue 863 sums it up (by a language model). Their times are assumed.
GLUE_CALLS = 7  # in a layer
GLUE_US = 2.0  # of each, in a graph, at few tokens
GLUE_BYTES = 200e3  # of a token in a layer: 2 residual norms (115 KB), the rest q, k, v and latents
GLUE_GBPS = 4000.0  # of the 4800 of HBM3e
BALANCED = "balanced"
Origin = Literal["measured", "table", "regression", "assumed"]
SLOWEST_OF_8 = 1.42  # how many deviations the largest of 8 normal variables exceeds their mean
# Some experts are chosen more often. The experts of the busiest rank take so many times what an even choice
# takes: median of the tables at moe_ep_size 8 and 3072 to 16384 tokens, power law over balanced.
BUSIEST = 1.2
BLOCK_ROWS = 64  # rows of a tile of the grouped products


@dataclass(frozen=True)
class StepLoad:
    """The load of one step.

    tokens:  rows of the linears
    batch:   sequences
    context: cached tokens of each sequence in decode; tokens of its prompt in prefill
    q:       query tokens of each sequence in decode: 1 + drafts if it verifies drafts
    """

    tokens: float
    batch: float
    context: float
    q: int = 1


@dataclass(frozen=True)
class Term:
    """Calls of one kind in a step.

    op:     a name of harness/catalogue/op_classes.json
    origin: where its time comes from
    time:   us of a call
    """

    op: str
    part: str
    calls: int
    origin: Origin
    time: Callable[[StepLoad], float]

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
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    heads, hidden, cache = parallel.heads(config), config.hidden_size, {"bfloat16": "bf16"}.get(kv, kv)
    tp, ep = (1, parallel.ep) if parallel.ep > 1 else (parallel.tp, 1)
    # TensorRT-LLM and vLLM compute the shared expert as linears of its own.
    fused_shared = parallel.ep == 1 and engine_name(tables.engine) not in ("trtllm", "vllm")
    shared = config.n_shared_experts if fused_shared else 0
    inter = config.moe_intermediate_size // tp
    experts = (config.n_routed_experts, config.num_experts_per_tok, hidden, inter, ep)
    # Own runs may have timed the routed experts without the shared one.
    alone = not measured_times or ("fused_moe", (*experts, shared)) not in measured_times.surfaces
    own = functools.partial(_measured_first, measured_times)
    step_us, token_us = tables.between_us

    def rows(load: StepLoad) -> tuple[float]:
        return (load.tokens,)

    def sequences(load: StepLoad) -> tuple[float, float]:
        return (load.batch, load.context)

    def with_shared(load: StepLoad) -> float:
        return shared_expert_factor(config, load.tokens) if fused_shared else 1.0

    moe = Term("fused_moe", "", layers - dense, "table",
               lambda load: routed(tables, config, load.tokens, tp, ep) * with_shared(load))  # fmt: skip
    common = [own(moe, (*experts, 0), rows, with_shared) if alone else own(moe, (*experts, shared), rows)]
    if parallel.tp > 1:
        common.append(Term("all_reduce", "", 2 * layers, "table",
                           lambda load: tables.all_reduce(load.tokens * hidden, parallel.tp)))  # fmt: skip
    common.append(Term("elementwise", "glue", layers, "assumed", glue))
    if step_us or token_us:
        between = Term("host", "between_kernels", 1, "assumed", lambda load: step_us + token_us * load.tokens)
        common.append(between)
    decode_attention = Term("mla_decode", "", layers, "table",
                            lambda load: tables.mla_decode(load.batch, load.context, heads, kv)
                            * verifying(sheet, load, heads, kv))  # fmt: skip
    sheet = data_sheet(hardware_name(tables.device)) or data_sheet("h200")
    q = 1 + drafts
    timed = q if measured_times and ("mla_decode", (heads, cache, q)) in measured_times.surfaces else 1
    prefill_attention = Term("mha_prefill", "", layers,
                             "regression" if tables.prefill_is_absorbed else "table",
                             lambda load: plain_prefill(tables, config, load, heads, kv))  # fmt: skip
    decode: list[Term] = []
    prefill: list[Term] = []
    for linear in products:
        if fused_shared and linear.name.startswith("shared"):
            continue
        for calls, terms in ((linear.decode_calls, decode), (linear.prefill_calls, prefill)):
            if calls:
                terms.append(own(_product(tables, linear, calls), (linear.n, linear.k), rows))
    decode += [*common, own(decode_attention, (heads, cache, timed), sequences,
                            lambda load: verifying(sheet, load, heads, kv, timed))]  # fmt: skip
    prefill += [*common, own(prefill_attention, (heads, 0), sequences)]
    lacking = dict.fromkeys(term.op for term in (*decode, *prefill) if _is_missing(term))
    if assumed is not None and lacking:
        other = structure(assumed, parallel, kv=kv)
        decode, prefill = _filled(decode, other.decode), _filled(prefill, other.prefill)
    _require_all(tables, parallel, [*decode, *prefill])
    where = f"{tables.device}, {tables.engine} {tables.version}".rstrip() + f" ({tables.where})"
    latent = (layers + bool(drafts)) * (config.kv_lora_rank + config.qk_rope_head_dim)  # of a token of a rank
    kv_bytes = latent * (2 if kv == "bfloat16" else 1)
    weights_gb = _weights_gb(config, parallel, bool(drafts))
    if drafts:
        head = next(linear for linear in products if linear.name == "lm_head")
        decode = [*_with_drafts(decode, layers, 2 * hidden / head.n, drafts)]
    phases = tuple(decode), tuple(prefill)
    return Structure(parallel, *phases, weights_gb, kv_bytes, where, tuple(lacking), drafts)


def _with_drafts(terms: Sequence[Term], layers: int, share: float, drafts: int) -> Iterator[Term]:
    """The terms, with the calls of the MTP layer's passes; times are the mean over all calls.

    A step of SGLang (eagle_worker_v2.py) and of vLLM (llm_base_proposer.py) verifies 1 + drafts tokens. It
    passes as many through the MTP layer for the first draft, then one token for each further draft.

    share: weights of the layer's product that joins hidden state and embedding, over those of lm_head
    """

    def passes(term: Term, load: StepLoad, whole: bool) -> float:
        one = replace(load, tokens=load.batch, q=1)
        return term.time(load if whole else one) + (drafts - 1) * term.time(one)

    def both(term: Term, calls: int, load: StepLoad) -> float:
        us = term.calls * term.time(load) + calls * passes(term, load, term.part != "lm_head")
        return us / (term.calls + calls * drafts)

    for term in terms:
        is_head = term.part == "lm_head"  # of one token in each pass
        calls = 1 if is_head else round(term.calls / layers)
        time = functools.partial(both, term, calls) if calls else term.time
        yield replace(term, calls=term.calls + calls * drafts, time=time)
        if is_head:  # The product that joins hidden state and embedding is in no table; its weights tell.
            yield replace(term, part="eh_proj", calls=drafts, time=functools.partial(
                lambda term, load: share * passes(term, load, True) / drafts, term))  # fmt: skip


def verifying(sheet: JsonObject, load: StepLoad, heads: int, kv: str, timed: int = 1) -> float:
    """The time of MLA decode with load.q query tokens over that with `timed`, by a data sheet. The cache is
    read once, and products have rows of (token, head), at least 64, as FlashMLA pads them."""
    tokens, size = load.batch * load.context, 2 if kv == "bfloat16" else 1
    of_row, moved = 2 * tokens * (576 + 512), tokens * 576 * size
    rows = (max(q * heads, BLOCK_ROWS) for q in (load.q, timed))
    us, of_timed = (data_sheet_us(sheet, count * of_row, moved, "bf16") for count in rows)
    return us / of_timed


def _product(tables: Tables, linear: Linear, calls: int) -> Term:
    part = linear.name.replace(" ", "_")
    if linear.kind == BATCHED:
        which = "mla_gen_pre" if part == "w_uk" else "mla_gen_post"
        return Term("absorbed_bmm", part, calls, "table",
                    lambda load: tables.absorbed_bmm(which, load.tokens, linear.batch))  # fmt: skip
    op, kind = {FP8: ("block_scale_gemm", "fp8_block"), BF16: ("bf16_gemm", "bfloat16")}[linear.kind]
    if part == "lm_head":  # It computes one token of each sequence, or all that are verified.
        return Term(op, part, calls, "table",
                    lambda load: tables.gemm(kind, load.batch * load.q, linear.n, linear.k))  # fmt: skip
    return Term(op, part, calls, "table", lambda load: tables.gemm(kind, load.tokens, linear.n, linear.k))


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
        us = surface.at(*sizes(load)) * scale(load)
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
    """The terms; one without a time takes that of the assumed term of its name."""
    by_name = {term.name: term for term in assumed}
    own = [
        replace(term, origin="assumed", time=by_name[term.name].time) if _is_missing(term) else term
        for term in terms
    ]
    return [*own, *(term for term in assumed if term.op == "host")]


def _require_all(tables: Tables, parallel: Parallel, terms: list[Term]) -> None:
    """Raises MissingTable, which names all missing times, before anything is computed."""
    missing = [term for term in terms if _is_missing(term)]
    if missing:
        of_part = {term.op for term in terms if term not in missing}
        names = ", ".join(dict.fromkeys(t.name if t.op in of_part else t.op for t in missing))
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


def glue(load: StepLoad) -> float:
    """The time in us of one layer's small kernels."""
    return GLUE_CALLS * GLUE_US + load.tokens * GLUE_BYTES / GLUE_GBPS / 1e3


def routed(tables: Tables, config: ModelConfig, tokens: float, tp: int, ep: int) -> float:
    """The time of the routed experts of one rank; under expert parallelism, of the slowest rank.

    Tokens choose their experts independently. In the tables' `balanced` distribution tokens share no expert
    as long as they can. So a time at few tokens is the time of a number of experts' weights, and is read at
    the number of tokens that hits as many experts as independent tokens do.
    """
    if BALANCED not in (timed := tables.distributions()) and timed:
        return tables.moe(tokens, tp, ep, timed[0])
    topk = config.num_experts_per_tok
    all_hit = config.n_routed_experts / topk  # tokens that hit every expert if they share none
    share = experts_hit(config, tokens) / config.n_routed_experts
    if ep > 1:
        local = config.n_routed_experts / ep
        share = min(share + SLOWEST_OF_8 * math.sqrt(share * (1 - share) / local), 1.0)
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


def _weights_gb(config: ModelConfig, parallel: Parallel, mtp: bool) -> float:
    """Weights of a rank in FP8, router and vocabulary in bf16. mtp: whether the MTP layer's count"""
    total = 0.0
    for linear in linears(config, parallel):
        size = 1 if linear.kind == FP8 else 2
        total += linear.n * linear.k * linear.batch * max(linear.decode_calls, linear.prefill_calls) * size
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace + mtp
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    total += moe_layers * config.n_routed_experts * expert / max(parallel.tp, parallel.ep)
    total += 2 * config.vocab_size * config.hidden_size / parallel.tp  # embedding
    return total / 1e9
