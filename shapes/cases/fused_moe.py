"""Cases of fused_moe: the routed experts of a rank. The place names a routing that is not uniform."""

from __future__ import annotations

from shapes.attention import Parallel
from shapes.bins import token_bins
from shapes.case import Case
from shapes.cases import BATCHES, DP_BATCHES, DP_PROMPTS, ISL, PROMPTS, step_text
from shapes.experts import PADDED, expert_columns, fused_moe_sizes, place_of_experts, routing_of, rows_on_rank
from shapes.models import ModelConfig
from shapes.workloads import Documented

OTHER_ROUTINGS = ("balanced", "zipf:0.4", "zipf:0.8")
SIZES = ("tokens", "experts", "topk", "hidden", "inter", "ep", "shared", "routing")
"""The names of the sizes of the smoke and ragged cases."""


def _case(
    model: ModelConfig, parallel: Parallel, tokens: int, prompt: int = 0, weight: float = 1.0,
    shared: int = 0, routing: str = "uniform", drafts: int = 0,
) -> Case:  # fmt: skip
    """The experts in a step of `tokens` tokens on each attention rank, of which `prompt` are of prompts."""
    on_rank = rows_on_rank(model, parallel, tokens, routing)
    place = [f"{model.name} {parallel.text} {step_text(tokens, prompt, drafts)}"]
    if expert_columns(model, parallel) % PADDED:
        place.append(place_of_experts(model, parallel))
    if shared:
        place.append("shared expert fused")
    if routing != "uniform":
        place.append(routing)
    if routing.startswith("zipf"):
        skew = routing_of(model, parallel, on_rank, shared, routing).skew
        place.append(f"busiest expert {skew:.1f}x the mean")
    sizes = fused_moe_sizes(model, parallel, on_rank, shared, routing)
    return Case("fused_moe", sizes, place=", ".join(place), weight=weight)


def smoke() -> list[Case]:
    """One row, many rows, experts without rows, one rank of two, a fused shared expert, a skewed routing."""
    all_sizes = [
        (16, 16, 4, 256, 128, 1, 0, "uniform"),
        (1, 32, 8, 512, 128, 1, 0, "uniform"),
        (40, 16, 4, 256, 256, 2, 0, "balanced"),
        (8, 16, 4, 256, 128, 1, 1, "uniform"),
        (33, 32, 4, 256, 128, 1, 0, "zipf:0.8"),
    ]
    return [Case("fused_moe", dict(zip(SIZES, sizes, strict=True)), place="smoke") for sizes in all_sizes]


def ragged() -> list[Case]:
    """Odd numbers of tokens, experts without rows, experts of other ranks, a fused shared expert."""
    all_sizes = [
        (33, 256, 8, 512, 128, 8, 0, "uniform"),
        (9, 16, 4, 256, 256, 1, 1, "zipf:0.8"),
        (17, 64, 8, 512, 128, 4, 1, "uniform"),
        (1, 32, 8, 512, 128, 1, 0, "uniform"),
    ]
    return [Case("fused_moe", dict(zip(SIZES, sizes, strict=True))) for sizes in all_sizes]


def _decode(
    model: ModelConfig, parallel: Parallel, batch: int, drafts: int, shared: int = 0, routing: str = "uniform"
) -> Case:
    """The experts in a step in which each rank decodes `batch` requests."""
    return _case(model, parallel, batch * (1 + drafts), shared=shared, routing=routing, drafts=drafts)


def sweep(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    """The uniform routing for each step; other routings, and a fused shared expert, for a few. Draft tokens
    are routed like others, though those of a request choose fewer experts together."""
    decoding = [_decode(model, parallel, batch, drafts) for batch in BATCHES]
    prefills = [_case(model, parallel, count * isl, count * isl) for count, isl in PROMPTS]
    fused = [_decode(model, parallel, batch, drafts, shared=1) for batch in (64, 16, 1)]
    fused.append(_case(model, parallel, ISL, ISL, shared=1))
    others = [_decode(model, parallel, 64, drafts, routing=routing) for routing in OTHER_ROUTINGS]
    others += [_case(model, parallel, ISL, ISL, routing=routing) for routing in OTHER_ROUTINGS]
    return decoding + prefills + fused + others


def production(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    """The balanced routing is that of DeepSeek's profiles."""
    decoding = [_decode(model, parallel, batch, drafts) for batch in DP_BATCHES]
    prefills = [_case(model, parallel, count * isl, count * isl) for count, isl in DP_PROMPTS]
    fused = [_decode(model, parallel, DP_BATCHES[0], drafts, shared=1)]
    others = [_decode(model, parallel, DP_BATCHES[0], drafts, routing=routing) for routing in OTHER_ROUTINGS]
    return decoding + prefills + fused + others


def served(model: ModelConfig, run: Documented) -> list[Case]:
    return [
        _case(model, run.parallel, bin_.tokens, bin_.prompt, bin_.weight) for bin_ in token_bins(run.on_rank)
    ]
