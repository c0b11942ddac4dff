"""What one rank's attention is asked to do under tensor, data and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapes.case import Size

if TYPE_CHECKING:
    from shapes.models import ModelConfig


@dataclass(frozen=True)
class Parallel:
    """How a model is split over ranks.

    tp: ranks that share the heads of one attention
    dp: groups of such ranks, each with requests of its own (DP attention)
    ep: ranks that share the routed experts of a layer

    vLLM's `--tensor-parallel-size` and `--data-parallel-size` are tp and dp; SGLang's
    `--tp 8 --enable-dp-attention` (with `--dp 8`) is tp=1 dp=8 here.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def text(self) -> str:
        """`tp8`, `dp8 ep8`."""
        degrees = [(name, getattr(self, name)) for name in ("tp", "dp", "ep")]
        return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "tp1"

    def heads(self, model: ModelConfig) -> int:
        """Query heads of a rank."""
        heads, left = divmod(model.num_attention_heads, self.tp)
        if left:
            raise ValueError(
                f"tp={self.tp} must divide the {model.num_attention_heads} heads of {model.name}"
            )
        return heads

    def share(self, requests: int) -> int:
        """Requests of the fullest rank when `requests` are dealt evenly to the DP groups."""
        return -(-requests // self.dp)


def mla_decode_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, ctx: str, page: int = 64, kv: str = "bf16"
) -> dict[str, Size]:
    """Sizes of `mla_decode` on one rank; batch is the rank's, ctx in tokens, as `shapes.lengths` reads it."""
    return {"batch": batch, "ctx": ctx, "heads": parallel.heads(model), "page": page, "kv": kv}


def mha_prefill_sizes(
    model: ModelConfig, parallel: Parallel, batch: int, new: str, prefix: str = "0"
) -> dict[str, Size]:
    """Sizes of `mha_prefill` on one rank: new and prefix are tokens of a sequence in this step and cached
    before it, as `shapes.lengths` reads them."""
    return {"batch": batch, "new": new, "prefix": prefix, "heads": parallel.heads(model)}
