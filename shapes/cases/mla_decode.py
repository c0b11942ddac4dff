"""Cases of mla_decode."""

from __future__ import annotations

from shapes.attention import Parallel, mla_decode_sizes
from shapes.bins import decode_bins
from shapes.case import Case, Size
from shapes.cases import BATCHES, DP_BATCHES, ISL, OSL, decode_text
from shapes.lengths import span_text
from shapes.models import ModelConfig
from shapes.workloads import Documented


def sweep_ctx(drafts: int = 0) -> str:
    """The span of `ctx`, with drafts, over a sweep request's decode steps (see shapes.scheduler)."""
    return span_text(ISL + 1 + drafts, ISL + OSL - 1 + drafts)


def _case(
    model: ModelConfig, parallel: Parallel, batch: int, ctx: str, drafts: int = 0, weight: float = 1.0,
    kv: str = "bf16",
) -> Case:  # fmt: skip
    sizes = mla_decode_sizes(model, parallel, batch, ctx, kv=kv, q=1 + drafts)
    place = f"{model.name} {parallel.text} {decode_text(drafts)}"
    return Case("mla_decode", sizes, place=place, weight=weight)


def smoke() -> list[Case]:
    """Fewer than 0.2 million KV values each: ends of pages, one token, one request, several query tokens."""
    all_sizes = [(4, "1..120", 1), (2, "40..150", 16), (1, "130", 64), (4, "17..65", 64), (2, "64..128", 16)]
    cases: list[dict[str, Size]] = [
        {"batch": batch, "ctx": ctx, "heads": 16, "page": page, "kv": "bf16"}
        for batch, ctx, page in all_sizes
    ]
    cases.append({"batch": 2, "ctx": "3..65", "heads": 16, "page": 16, "kv": "bf16", "q": 3})
    return [Case("mla_decode", sizes, place="smoke") for sizes in cases]


def ragged(q: int = 1) -> list[Case]:
    """Two batches: eleven sequences of q tokens (only the query tokens) to 190, and four of 64, 128, 193 and
    257 tokens. 64 and 128 end where a page, block or split of a kernel ends. 193 and 257 end one token
    behind such an end, so that query tokens lie on both sides of it."""
    all_sizes = ((11, f"{q}..190"), (4, "64..257"))
    return [Case("mla_decode", {"batch": batch, "ctx": ctx}) for batch, ctx in all_sizes]


def sweep(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    """Full batches; the requests of a batch are at all stages of their answers."""
    return [_case(model, parallel, batch, sweep_ctx(drafts), drafts) for batch in BATCHES]


def production(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    """4989 is the mean number of cached tokens for each output token in a day of DeepSeek's service, whose
    spread is not published (open-infra-index, day 6). 128 requests a GPU with prompts of 4K is its decode
    profile, which is said to match the service closely (profile-data)."""
    service = [_case(model, parallel, 128, ctx, drafts) for ctx in ("4989", "4096")]
    return service + [_case(model, parallel, batch, sweep_ctx(drafts), drafts) for batch in DP_BATCHES]


def served(model: ModelConfig, run: Documented) -> list[Case]:
    return [
        _case(model, run.parallel, bin_.batch, bin_.ctx, weight=bin_.weight, kv=run.kv)
        for bin_ in decode_bins(run.on_rank)
    ]
