"""How a model is split over ranks, and the sizes of attention on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shapes.case import Size
from shapes.lengths import parse_span
from shapes.models import ModelConfig

R1_MODEL_LEN = 163_840
"""R1's max_position_embeddings. It holds for a case of mla_decode that has no size `model_len`."""


@dataclass(frozen=True)
class Parallel:
    """How a model is split over ranks. vLLM's `--tensor-parallel-size` and `--data-parallel-size` are tp and
    dp; SGLang's `--tp 8 --enable-dp-attention` (with `--dp 8`) is tp=1 dp=8 here."""

    tp: int = 1  # the number of ranks that share the heads of one attention: a group
    dp: int = 1  # the number of groups; each has requests of its own (DP attention)
    ep: int = 1  # the number of ranks that share the routed experts of a layer

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def text(self) -> str:
        """The degrees above 1: `tp8`, `dp8 ep8`; `tp1` where there is none."""
        degrees = {"tp": self.tp, "dp": self.dp, "ep": self.ep}
        return " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "tp1"

    def split(self, width: int, what: str, model: ModelConfig) -> int:
        """A rank's part of a width. Raises ValueError, which calls it `what`, if tp does not divide it."""
        if width % self.tp:
            raise ValueError(f"tp={self.tp} must divide the {width} {what} of {model.name}")
        return width // self.tp

    def heads(self, model: ModelConfig) -> int:
        """The query heads of a rank. Raises ValueError if tp does not divide them."""
        return self.split(model.num_attention_heads, "heads", model)


def mla_decode_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, ctx: str, page: int = 64, kv: str = "bf16", q: int = 1
) -> dict[str, Size]:
    """The sizes of `mla_decode` on one rank. batch: the rank's requests; ctx: the span (see shapes.lengths)
    of each request's tokens, its q query tokens included; page: tokens of a page; kv: dtype of the cache."""
    heads = parallel.heads(model)
    sizes: dict[str, Size] = {"batch": batch, "ctx": ctx, "heads": heads, "page": page, "kv": kv}
    if model.max_position_embeddings not in (0, R1_MODEL_LEN):
        sizes["model_len"] = model.max_position_embeddings
    if q > 1:
        sizes["q"] = q
    return sizes


def mha_prefill_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, new: str, prefix: str = "0"
) -> dict[str, Size]:
    """The sizes of `mha_prefill` on one rank. batch: its sequences; new: the tokens of a sequence in this
    step; prefix: its tokens that were cached before. The last two are spans (see shapes.lengths)."""
    return {"batch": batch, "new": new, "prefix": prefix, "heads": parallel.heads(model)}


def is_dense(model: ModelConfig, new: str, prefix: str = "0") -> bool:
    """Whether prompts of these spans (see `mha_prefill_sizes`) attend to all keys. They always do in a model
    without sparse attention. In a model with it they do up to index_topk tokens, as both engines have it
    (SGLang 0.5.23: environ.py; vLLM 0.33: sparse_mla_attention.py)."""
    _, longest_new = parse_span(new)
    _, longest_prefix = parse_span(prefix, least=0)
    return not model.index_topk or longest_new + longest_prefix <= model.index_topk
