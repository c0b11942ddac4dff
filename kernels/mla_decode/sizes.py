"""Sizes of an MLA decode."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import fp8_format
from kernels.support import Support, need
from shapes.lengths import parse_span, spread

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
SCALE = 192**-0.5
KV_BYTES = {"bf16": 2, "fp8": 1}

MODEL_LEN = 163_840
"""The default context length of a server of DeepSeek-V3 or R1: their max_position_embeddings."""


@dataclass(frozen=True)
class MlaDecodeSizes:
    batch: int  # sequences
    ctx: str  # tokens cached for each sequence: one length or low..high, spread evenly
    heads: int = 16  # query heads of the rank
    page: int = 64  # tokens of a page of the cache
    kv: str = "bf16"  # bf16, or fp8 with one scale
    fp8: str = "e4m3fn"  # the format, which only a case with kv=fp8 says
    # The server's context length, for which engines record the call into a graph (vLLM's --max-model-len,
    # SGLang's --context-length): rows that follow an engine split sequences by it. Without graphs vLLM splits
    # by the longest sequence: set model_len to that.
    model_len: int = MODEL_LEN

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of mla_decode must be at least 1")
        _, longest = parse_span(self.ctx)
        if longest > self.model_len:
            raise ValueError(
                f"size ctx={self.ctx} of mla_decode exceeds the server's context length of "
                f"{self.model_len} tokens; give model_len={longest} or more"
            )
        if self.kv not in KV_BYTES:
            raise ValueError(f"size kv={self.kv!r} of mla_decode must be {' or '.join(KV_BYTES)}")
        fp8_format(self.fp8)

    def lengths(self, seed: int = 0) -> list[int]:
        return spread(parse_span(self.ctx), self.batch, seed)

    @property
    def tokens(self) -> int:
        return sum(self.lengths())

    @property
    def used_pages(self) -> int:
        return sum(-(-n // self.page) for n in self.lengths())


def takes_bf16(sizes: MlaDecodeSizes) -> Support:
    """Whether a row without kernels for an FP8 cache takes these sizes."""
    return need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}")
