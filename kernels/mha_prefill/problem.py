"""MHA prefill, not absorbed: the new tokens of a batch of sequences attend to all tokens before them.

    out[t, h] = softmax_j(scale * q[t, h] . k[j, h]) . v[j, h]     j over keys 0 .. prefix + i

for the i-th new token of a sequence, which may find `prefix` tokens of it cached. Every query head has a key
and a value head of its own, as kv_b projects them from the latent: q and k are 192 = 128 + 64 (rope) wide, v
is 128. scale = 1/sqrt(192) (DeepSeek-V3 technical report, arXiv:2412.19437, section 2.1.1).

With dtype=fp8, q, k and v are FP8, each with one descale for the whole tensor: what is stored times that is
what is meant. The output is bf16 in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kernels.formats import fp8_format, native
from kernels.op import Op, Reference, Support, Tolerance, Work, need
from kernels.operands import Operands, Seeds
from shapes.case import Case, Size
from shapes.lengths import parse_span, spread

if TYPE_CHECKING:
    import torch

NOPE = 128
ROPE = 64
WIDTH = NOPE + ROPE
VALUE = 128
SCALE = WIDTH**-0.5

BYTES = {"bf16": 2, "fp8": 1}
GUARD = 256  # tokens of NaN before and behind q, k and v: at least what a kernel's tile reads at once


@dataclass(frozen=True)
class Sizes:
    """batch: sequences; new: query tokens per sequence, one number or low..high, spread evenly; prefix:
    tokens cached before them, likewise, from 0; heads: of the rank; dtype: of q, k and v, bf16 or fp8;
    fp8: its format, which a bf16 case does not name."""

    batch: int
    new: str
    prefix: str = "0"
    heads: int = 16
    dtype: str = "bf16"
    fp8: str = "e4m3fn"

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


class Sequence(NamedTuple):
    """Where a sequence lies: its rows of q and out, its rows of k and v, and how many of those are cached."""

    queries: slice
    keys: slice
    prefix: int

    @property
    def new(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def length(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass
class MhaPrefillOperands(Operands):
    """q         bf16 or FP8 [T, heads, 192], T new tokens of all sequences
    k         likewise [S, heads, 192], S tokens; those of a sequence stand together, cached ones first
    v         likewise [S, heads, 128]
    cu_q      int32 [batch + 1]: sequence b has rows cu_q[b] .. cu_q[b + 1] of q; cu_k likewise of k and v
    sequences the same for the host
    q_descale fp32 [1], by which a stored q is to be multiplied; None for bf16; k_descale and v_descale
              likewise. Stationary: calibrated once, as engines hold the scales of an FP8 cache

    Nothing is streamed: q, k and v are activations, all just written by the q_b and kv_b products of the same
    layer (the cached tokens' too: only their latents are kept), with nothing large read in between. What the
    last-level cache holds of them here, from the call before, it holds in serving; the rest comes from memory
    in both.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    sequences: list[Sequence]
    sizes: Sizes
    scale: float = SCALE
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    boundary: str = "core"

    live: ClassVar = ("q", "k", "v")
    streamed: ClassVar = ()

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a sequence."""
        return max(s.new for s in self.sequences), max(s.length for s in self.sequences)

    @property
    def score_scale(self) -> float:
        """Turns the product of a stored q and a stored k into a score."""
        return self.scale * _number(self.q_descale) * _number(self.k_descale)

    @property
    def value_scale(self) -> float:
        """Turns a stored v into the value that is meant."""
        return _number(self.v_descale)

    def copy(self, names: Iterable[str] | None = None) -> MhaPrefillOperands:
        """As any operands' copy, with guards of its own."""
        copied = super().copy(names)
        for name in self.live:
            if (tensor := getattr(copied, name)) is not getattr(self, name):
                fresh = guarded(*tensor.shape, tensor.device, tensor.dtype)
                setattr(copied, name, fresh.copy_(tensor))
        return copied


def _number(descale: torch.Tensor | None) -> float:
    return 1.0 if descale is None else float(descale)


def guarded(
    tokens: int, heads: int, width: int, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Room for [tokens, heads, width] of dtype, by default bf16, between tokens of NaN, so that a read past
    an end is seen."""
    import torch

    shape = (GUARD + tokens + GUARD, heads, width)
    storage = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
    nan = torch.tensor(torch.nan, device=device)
    storage[:GUARD].copy_(nan)
    storage[GUARD + tokens :].copy_(nan)
    return storage[GUARD : GUARD + tokens]


def takes(sizes: Sizes, *dtypes: str) -> Support:
    """Whether a kernel that takes these dtypes takes these sizes."""
    return need(sizes.dtype in dtypes, f"takes dtype={' or '.join(dtypes)}, not {sizes.dtype}")


class MhaPrefill(Op):
    name = "mha_prefill"
    Sizes = Sizes
    baseline: ClassVar = {"cpu": "torch.sdpa", "cuda": "torch.sdpa", "rocm": "torch.sdpa"}

    def defaults(self, arch: str) -> Mapping[str, Size]:
        return {"fp8": native(arch)}

    def case(self, given: Mapping[str, Size], **place: Any) -> Case:
        """A bf16 case names no FP8 format: it is the same on every architecture."""
        case = super().case(given, **place)
        if case.sizes["dtype"] == "fp8":
            return case
        return case.with_sizes({name: size for name, size in case.sizes.items() if name != "fp8"})

    def work(self, sizes: Sizes, boundary: str = "core") -> Work:
        """2 * heads * (192 + 128) flops for each pair of a query and a key that it attends to; q, k, v and
        out moved once. An FP8 kernel may round the softmax weights to FP8 too: FP8 products bound it."""
        flops = 2.0 * sizes.heads * (WIDTH + VALUE) * sizes.pairs
        moved = self._bytes(sizes, sizes.queries, sizes.keys) + self.output_bytes(sizes)
        return Work(flops, float(moved), sizes.dtype)

    def _bytes(self, sizes: Sizes, queries: int, keys: int) -> int:
        return sizes.heads * (queries * WIDTH + keys * (WIDTH + VALUE)) * BYTES[sizes.dtype]

    def operand_bytes(self, sizes: Sizes) -> int:
        return self._bytes(sizes, sizes.queries + 2 * GUARD, sizes.keys + 2 * GUARD)

    def output_bytes(self, sizes: Sizes) -> int:
        return sizes.queries * sizes.heads * VALUE * 2

    def streamed_bytes(self, sizes: Sizes, turns: int = 1) -> int:
        return 0

    def turn_bytes(self, sizes: Sizes) -> int:
        """Of the `cold` mode: in `serving` there is one set."""
        return self.operand_bytes(sizes)

    def empty_output(self, sizes: Sizes, device: str) -> torch.Tensor:
        import torch

        return torch.empty(sizes.queries, sizes.heads, VALUE, dtype=torch.bfloat16, device=device)

    def operands(self, sizes: Sizes, seeds: Seeds, device: str, boundary: str = "core") -> MhaPrefillOperands:
        from kernels.mha_prefill.generate import generate

        return generate(sizes, seeds, device)

    def empty_operands(self, sizes: Sizes, device: str) -> MhaPrefillOperands:
        import torch

        starts = torch.empty(sizes.batch + 1, dtype=torch.int32, device=device)
        fp8 = sizes.dtype == "fp8"
        dtype = fp8_format(sizes.fp8).dtype if fp8 else torch.bfloat16
        descale = torch.empty(1, device=device) if fp8 else None
        return MhaPrefillOperands(
            q=guarded(sizes.queries, sizes.heads, WIDTH, device, dtype),
            k=guarded(sizes.keys, sizes.heads, WIDTH, device, dtype),
            v=guarded(sizes.keys, sizes.heads, VALUE, device, dtype),
            cu_q=starts,
            cu_k=starts,
            sequences=sequences_of(sizes.lengths()),
            sizes=sizes,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
        )

    def reference(self, operands: MhaPrefillOperands, max_flops: float = float("inf")) -> Reference:
        from kernels.mha_prefill.reference import reference

        return reference(operands, max_flops)

    def tolerance(self, sizes: Sizes) -> Tolerance:
        """The worst rows of random cases, in sigma: 1.3 for a kernel with exactly the two roundings of
        `reference`, 1.9 where weights are rounded after they were normalised, 2.0 where cached and new keys'
        results are rounded to bf16 and then merged (tests/test_check_mha_prefill.py). 2.5 passes those; a row
        of zeros counted as a key reaches 4 times that, weights in fp8 6 times.

        FP8 operands: 1.2 for operands made bf16, in sigma; 1.2 for weights in FP8, scaled up or not, summed
        before or after rounding, in sigma_fp8. That is about 15 times as large: a wrong descale reaches 8
        times the limit, one key lost or let in 5 times, the scale of the 128 alone 3 times; a row of zeros
        counted as a key, or a scale 5 percent off, does not reach it (tests/test_mha_prefill_fp8.py)."""
        return Tolerance(row=2.5, element=10.0)


def sequences_of(lengths: list[tuple[int, int]]) -> list[Sequence]:
    """Where sequences of (prefix, new) tokens lie, one behind the other."""
    queries = [0, *itertools.accumulate(new for _, new in lengths)]
    keys = [0, *itertools.accumulate(prefix + new for prefix, new in lengths)]
    return [
        Sequence(slice(*q), slice(*k), prefix)
        for q, k, (prefix, _) in zip(
            itertools.pairwise(queries), itertools.pairwise(keys), lengths, strict=True
        )
    ]
