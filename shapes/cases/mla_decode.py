"""Cases of mla_decode."""

from __future__ import annotations

from shapes.attention import Parallel, mla_decode_sizes
from shapes.case import Case, Size
from shapes.cases import BATCHES, DP_BATCHES, ISL, OSL
from shapes.lengths import span_text
from shapes.models import ModelConfig
from shapes.workloads import Documented

SEEN = span_text(ISL + 1, ISL + OSL - 1)
"""The span of tokens that a request attends to from its first to its last decode step (see
shapes.scheduler)."""


def _case(
    model: ModelConfig, parallel: Parallel, batch: int, ctx: str, weight: float = 1.0, kv: str = "bf16"
) -> Case:
    sizes = mla_decode_sizes(model, parallel, batch, ctx, kv=kv)
    return Case("mla_decode", sizes, place=f"{model.name} {parallel.text} decode", weight=weight)


def smoke() -> list[Case]:
    """Fewer than 0.2 million KV values each: ends of pages, one token, one request, a page of one token."""
    all_sizes = [(4, "1..120", 1), (2, "40..150", 16), (1, "130", 64), (4, "17..65", 64), (2, "64..128", 16)]
    cases = []
    for batch, ctx, page in all_sizes:
        sizes: dict[str, Size] = {"batch": batch, "ctx": ctx, "heads": 16, "page": page, "kv": "bf16"}
        cases.append(Case("mla_decode", sizes, place="smoke"))
    return cases


def ragged() -> list[Case]:
    """Eleven sequences of one token and more, and sequences that end where their pages end."""
    return [
        Case("mla_decode", {"batch": batch, "ctx": ctx}) for batch, ctx in ((11, "1..190"), (4, "64..256"))
    ]


def sweep(model: ModelConfig, parallel: Parallel) -> list[Case]:
    """Full batches; the requests of a batch are at all stages of their answers."""
    return [_case(model, parallel, batch, SEEN) for batch in BATCHES]


def production(model: ModelConfig, parallel: Parallel) -> list[Case]:
    """4989 is the mean number of cached tokens for each output token in a day of DeepSeek's service, whose
    spread is not published (open-infra-index, day 6). 128 requests a GPU with prompts of 4K is its decode
    profile, which is said to match the service closely (profile-data)."""
    service = [_case(model, parallel, 128, ctx) for ctx in ("4989", "4096")]
    return service + [_case(model, parallel, batch, SEEN) for batch in DP_BATCHES]


def served(model: ModelConfig, run: Documented) -> list[Case]:
    from shapes.bins import decode_bins

    return [
        _case(model, run.parallel, bin_.batch, bin_.ctx, bin_.weight, run.kv)
        for bin_ in decode_bins(run.on_rank)
    ]
