"""Sizes of an MHA prefill."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import fp8_format
from kernels.support import Support, need
from shapes.lengths import parse_span, spread

NOPE = 128
ROPE = 64
WIDTH = NOPE + ROPE
VALUE = 128
SCALE = WIDTH**-0.5
BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class MhaPrefillSizes:
    batch: int  # sequences
    new: str  # query tokens of each sequence: one number or low..high, spread evenly
    prefix: str = "0"  # tokens cached before them, in the same way, from 0
    heads: int = 16  # of the rank
    dtype: str = "bf16"  # of q, k and v: bf16 or fp8
    fp8: str = "e4m3fn"  # the format, which a bf16 case does not name

    def __post_init__(self) -> None:
        for name in ("batch", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of mha_prefill must be at least 1")
        parse_span(self.new)
        parse_span(self.prefix, least=0)
        if self.dtype not in BYTES:
            raise ValueError(f"size dtype={self.dtype!r} of mha_prefill must be {' or '.join(BYTES)}")
        fp8_format(self.fp8)

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """(prefix, new) of each sequence. Every seed gives the same pairs, in another order."""
        prefixes = spread(parse_span(self.prefix, least=0), self.batch, seed + self.batch // 2)
        return list(zip(prefixes, spread(parse_span(self.new), self.batch, seed), strict=True))

    @property
    def queries(self) -> int:
        return sum(new for _, new in self.lengths())

    @property
    def keys(self) -> int:
        return sum(prefix + new for prefix, new in self.lengths())

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, per head."""
        return sum(new * prefix + new * (new + 1) // 2 for prefix, new in self.lengths())


def takes(sizes: MhaPrefillSizes, *dtypes: str) -> Support:
    """Whether a kernel that takes these dtypes takes these sizes."""
    return need(sizes.dtype in dtypes, f"takes dtype={' or '.join(dtypes)}, not {sizes.dtype}")


def takes_bf16(sizes: MhaPrefillSizes) -> Support:
    return takes(sizes, "bf16")


def takes_fp8(sizes: MhaPrefillSizes) -> Support:
    return takes(sizes, "fp8")


def takes_both(sizes: MhaPrefillSizes) -> Support:
    return takes(sizes, "bf16", "fp8")
