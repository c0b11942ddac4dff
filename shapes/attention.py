"""How a model is split over ranks, and the sizes of attention on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shapes.case import Size
from shapes.lengths import parse_span
from shapes.models import ModelConfig

CONTEXT = 163_840
"""R1's max_position_embeddings, which a case of mla_decode has where it says none."""


@dataclass(frozen=True)
class Parallel:
    """How a model is split over ranks.

    vLLM's `--tensor-parallel-size` and `--data-parallel-size` are tp and dp; SGLang's
    `--tp 8 --enable-dp-attention` (with `--dp 8`) is tp=1 dp=8 here.
    """

    tp: int = 1
    """The number of ranks that share the heads of one attention: a group."""
    dp: int = 1
    """The number of groups; each has requests of its own (DP attention)."""
    ep: int = 1
    """The number of ranks that share the routed experts of a layer."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def text(self) -> str:
        """The degrees above 1: `tp8`, `dp8 ep8`."""
        degrees = [(name, getattr(self, name)) for name in ("tp", "dp", "ep")]
        return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "tp1"

    def split(self, width: int, what: str, model: ModelConfig) -> int:
        """A rank's part of a width that tp splits. Raises ValueError if tp does not divide it."""
        part, left = divmod(width, self.tp)
        if left:
            raise ValueError(f"tp={self.tp} must divide the {width} {what} of {model.name}")
        return part

    def heads(self, model: ModelConfig) -> int:
        """The query heads of a rank. Raises ValueError if tp does not divide them."""
        return self.split(model.num_attention_heads, "heads", model)


def mla_decode_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, ctx: str, page: int = 64, kv: str = "bf16", q: int = 1
) -> dict[str, Size]:
    """The sizes of `mla_decode` on one rank. batch: the rank's requests; ctx: tokens of each request, its q
    query tokens included, a span (see shapes.lengths)."""
    sizes: dict[str, Size] = {
        "batch": batch, "ctx": ctx, "heads": parallel.heads(model), "page": page, "kv": kv
    }  # fmt: skip
    if (longest := model.max_position_embeddings) not in (0, CONTEXT):
        sizes["model_len"] = longest
    return sizes | {"q": q} if q > 1 else sizes


def mha_prefill_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, new: str, prefix: str = "0"
) -> dict[str, Size]:
    """The sizes of `mha_prefill` on one rank. new: tokens of a sequence in this step; prefix: its tokens that
    were cached before; both are spans (see shapes.lengths)."""
    return {"batch": batch, "new": new, "prefix": prefix, "heads": parallel.heads(model)}


def is_dense(model: ModelConfig, new: str, prefix: str = "0") -> bool:
    """Whether prompts of these spans (see `mha_prefill_sizes`) attend to all keys. With sparse attention both
    engines compute them so up to index_topk tokens (SGLang 0.5.23: environ.py; vLLM 0.33:
    sparse_mla_attention.py)."""
    longest = parse_span(new)[1] + parse_span(prefix, least=0)[1]
    return not model.index_topk or longest <= model.index_topk
