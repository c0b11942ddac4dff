"""Cases of mha_prefill. A model with sparse attention has only those whose prompts attend to all keys."""

from __future__ import annotations

from shapes.attention import Parallel, is_dense, mha_prefill_sizes
from shapes.bins import prefill_bins
from shapes.case import Case, Size
from shapes.cases import CHUNK, DP_PROMPTS, ISL, PROMPTS
from shapes.models import ModelConfig
from shapes.workloads import Documented

SIZES = ("batch", "new", "prefix")  # the names of the sizes of the ragged cases


def _case(
    model: ModelConfig, parallel: Parallel, batch: int, new: str, prefix: str = "0", weight: float = 1.0
) -> Case:
    sizes = mha_prefill_sizes(model, parallel, batch, new, prefix)
    return Case("mha_prefill", sizes, place=f"{model.name} {parallel.text} prefill", weight=weight)


def smoke() -> list[Case]:
    """Uneven batches with and without a cached prefix, one token, ends of tiles; one of them in FP8 too."""
    all_sizes = [
        (3, "1..90", "0", 4), (1, "130", "0", 2), (2, "20..70", "0..60", 2), (4, "1..40", "30..100", 2),
        (1, "65", "64", 4),
    ]  # fmt: skip
    names = (*SIZES, "heads")
    cases: list[dict[str, Size]] = [dict(zip(names, sizes, strict=True)) for sizes in all_sizes]
    cases.append(cases[2] | {"dtype": "fp8"})
    return [Case("mha_prefill", sizes, place="smoke") for sizes in cases]


def ragged() -> list[Case]:
    """Three batches: ten sequences, one of which has no cached tokens; four without cached tokens, of 64, 86,
    107 and 129 new ones, where 129 is a tile and one token; four that all have cached tokens."""
    all_sizes = [(10, "1..100", "0..90"), (4, "64..129", "0"), (4, "1..40", "30..100")]
    return [Case("mha_prefill", dict(zip(SIZES, sizes, strict=True))) for sizes in all_sizes]


def sweep(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    """Batches of whole prompts, and one prompt in two chunks."""
    prompts = [(count, str(isl), "0") for count, isl in PROMPTS]
    prompts += [(1, str(CHUNK), "0"), (1, str(ISL - CHUNK), str(CHUNK))]
    return [
        _case(model, parallel, batch, new, prefix)
        for batch, new, prefix in prompts
        if is_dense(model, new, prefix)
    ]


def production(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    return [_case(model, parallel, count, str(isl)) for count, isl in DP_PROMPTS if is_dense(model, str(isl))]


def served(model: ModelConfig, run: Documented) -> list[Case]:
    """There is no case for a rank whose prompts are prefilled elsewhere."""
    return [
        _case(model, run.parallel, bin_.batch, bin_.new, bin_.prefix, bin_.weight)
        for bin_ in prefill_bins(run.on_rank)
        if is_dense(model, bin_.new, bin_.prefix)
    ]
