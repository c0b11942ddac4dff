"""MLA decode, absorbed: one new token per sequence attends to a paged latent KV cache.

    out[b, h] = softmax_j(scale * q[b, h] . kv[j]) . kv[j, :512]     j over the sequence's tokens

All heads of a rank share one cached row of 576 = 512 latent + 64 rope per token; the value is the
latent part. scale = 1/sqrt(192), of the 128 + 64 wide query-key product before absorption
(DeepSeek-V3 technical report, section 2.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.formats import fp8_format, native
from kernels.mla_decode.rounding import format_of, fp8_variance
from kernels.op import Op, Reference, Tolerance, Work
from kernels.operands import Operands, Seeds
from shapes.case import Case, Size
from shapes.lengths import parse_span, spread

if TYPE_CHECKING:
    import torch

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
SCALE = 192**-0.5

KV_BYTES = {"bf16": 2, "fp8": 1}
SPARE_PAGES = 3

KV_SCALE = {"e4m3fn": 2.0**-5, "e4m3fnuz": 2.0**-4}
"""Of an FP8 cache: either format ends near 15 then, three standard deviations above the widest channel."""


@dataclass(frozen=True)
class Sizes:
    """batch: sequences; ctx: tokens cached per sequence, one length or low..high, spread evenly;
    heads: query heads of the rank; page: tokens per KV page; kv: bf16, or fp8 with one scale;
    fp8: its format, which only a case with kv=fp8 says."""

    batch: int
    ctx: str
    heads: int = 16
    page: int = 64
    kv: str = "bf16"
    fp8: str = "e4m3fn"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of mla_decode must be at least 1")
        parse_span(self.ctx)
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


@dataclass
class MlaDecodeOperands(Operands):
    """q          bf16 [batch, heads, 576]
    kv         bf16, e4m3fn or e4m3fnuz [pages, page, 576]; slots that hold no token are NaN
    page_table int32 [batch, max_pages + 1], padded with the number of a page full of NaN
    lengths    int32 [batch] on the device, and `host_lengths` as a list
    kv_scale   a cached value means kv * kv_scale (1.0 for bf16)
    """

    q: torch.Tensor
    kv: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    host_lengths: list[int]
    kv_scale: float
    sizes: Sizes
    scale: float = SCALE
    boundary: str = "core"

    live: ClassVar = ("q", "kv")
    streamed: ClassVar = ("kv",)

    @property
    def page(self) -> int:
        return self.kv.shape[1]

    def token_slots(self, sequence: int) -> torch.Tensor:
        """Rows of kv.view(-1, 576) that hold the sequence's tokens, int64 [length]."""
        import torch

        length, page = self.host_lengths[sequence], self.page
        pages = self.page_table[sequence, : -(-length // page)].long()
        return (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()[:length]

    def split_pages(self, page: int) -> torch.Tensor:
        """The page table of the same cache seen as smaller pages, int32 [batch, max_pages * parts]:
        a kernel whose page divides the case's takes `kv.view(-1, page, 576)` with this table."""
        import torch

        parts = self.page // page
        part = torch.arange(parts, dtype=torch.int32, device=self.page_table.device)
        return (self.page_table[:, :, None] * parts + part).flatten(1).contiguous()


class MlaDecode(Op):
    name = "mla_decode"
    Sizes = Sizes
    baseline: ClassVar = {"cpu": "torch.sdpa", "cuda": "torch.sdpa", "rocm": "torch.sdpa"}
    engine_like = "triton.split_kv"

    def case(self, given: Mapping[str, Size], **place: Any) -> Case:
        """A case with a bf16 cache says nothing of FP8: its key is the same on all architectures."""
        case = super().case(given, **place)
        if case.sizes["kv"] == "fp8":
            return case
        return case.with_sizes({name: value for name, value in case.sizes.items() if name != "fp8"})

    def defaults(self, arch: str) -> Mapping[str, Size]:
        return {"fp8": native(arch)}

    def work(self, sizes: Sizes, boundary: str = "core") -> Work:
        """2 * tokens * heads * (576 + 512) flops; each cached row, q and out moved once. On an FP8 cache a
        kernel may round q and the softmax weights to FP8 too and multiply in that: FP8 products bound it."""
        flops = 2.0 * sizes.tokens * sizes.heads * (WIDTH + LATENT)
        rows = sizes.batch * sizes.heads
        moved = sizes.tokens * WIDTH * KV_BYTES[sizes.kv] + rows * (WIDTH + LATENT) * 2.0
        return Work(flops, moved, sizes.kv)

    def operand_bytes(self, sizes: Sizes) -> int:
        slots = (sizes.used_pages + SPARE_PAGES) * sizes.page
        return slots * WIDTH * KV_BYTES[sizes.kv] + sizes.batch * sizes.heads * WIDTH * 2

    def output_bytes(self, sizes: Sizes) -> int:
        return sizes.batch * sizes.heads * LATENT * 2

    def streamed_bytes(self, sizes: Sizes, turns: int = 1) -> int:
        return turns * sizes.tokens * WIDTH * KV_BYTES[sizes.kv]

    def empty_output(self, sizes: Sizes, device: str) -> torch.Tensor:
        import torch

        return torch.empty(sizes.batch, sizes.heads, LATENT, dtype=torch.bfloat16, device=device)

    def operands(self, sizes: Sizes, seeds: Seeds, device: str, boundary: str = "core") -> MlaDecodeOperands:
        from kernels.mla_decode.generate import generate

        return generate(sizes, seeds, device)

    def empty_operands(self, sizes: Sizes, device: str) -> MlaDecodeOperands:
        import torch

        lengths = sizes.lengths()
        counts = [-(-n // sizes.page) for n in lengths]
        fp8 = sizes.kv == "fp8"
        kv = fp8_format(sizes.fp8).dtype if fp8 else torch.bfloat16
        return MlaDecodeOperands(
            q=torch.empty(sizes.batch, sizes.heads, WIDTH, dtype=torch.bfloat16, device=device),
            kv=torch.empty(sum(counts) + SPARE_PAGES, sizes.page, WIDTH, dtype=kv, device=device),
            page_table=torch.empty(sizes.batch, max(counts) + 1, dtype=torch.int32, device=device),
            lengths=torch.empty(sizes.batch, dtype=torch.int32, device=device),
            host_lengths=lengths,
            kv_scale=KV_SCALE[sizes.fp8] if fp8 else 1.0,
            sizes=sizes,
        )

    def reference(self, operands: MlaDecodeOperands, max_flops: float = float("inf")) -> Reference:
        """fp64, one sequence at a time. Above `max_flops` it takes the shortest, the longest, the first
        and the last sequence and then others at even distance, as many as fit.

        sigma: a right kernel reads exact bf16 products, sums in fp32, and rounds twice to bf16 (relative
        2^-8 at most, about 2^-9 in root mean square): the softmax weights before the second product, each
        by itself, and the output. The first adds up to 2^-9 * sqrt(sum_j p_j^2 (v_j - out)^2) per element
        (the common part of the errors cancels in the normalisation, or is covered by the second), the
        second to 2^-9 * |out|; the fp32 error of a score of size |s| acts like one of its weight.

        sigma_fp8, where the cache is FP8: rounding.fp8_variance is added.
        """
        import torch

        rows = _sampled_rows(operands, max_flops)
        chosen = range(len(operands.host_lengths)) if rows is None else rows
        heads = operands.q.shape[1]
        shape = (len(chosen), heads, LATENT)
        value = torch.empty(shape, dtype=torch.float64, device=operands.q.device)
        sigma = torch.empty_like(value)
        fmt = None if operands.kv.element_size() > 1 else format_of(operands.kv)
        sigma_fp8 = torch.empty_like(value) if fmt else None
        flat = operands.kv.view(-1, WIDTH)
        unit = 2.0**-9
        for i, sequence in enumerate(chosen):
            kv = flat[operands.token_slots(sequence)].double() * operands.kv_scale
            v = kv[:, :LATENT]
            scores = operands.q[sequence].double() @ kv.T * operands.scale
            p = scores.softmax(-1)
            value[i] = p @ v
            # fp32 sums of 576 products of the scores' size err by about sqrt(576) 2^-24 |s|.
            relative = unit + 24 * 2.0**-24 * scores.abs()
            weight = (p * relative) ** 2
            spread_about_mean = (
                weight @ v**2 - 2 * value[i] * (weight @ v) + value[i] ** 2 * weight.sum(-1, keepdim=True)
            )
            variance = spread_about_mean.clamp(min=0) + (unit * value[i]) ** 2
            sigma[i] = variance.sqrt()
            if fmt:
                q = operands.q[sequence].float() * operands.scale
                sigma_fp8[i] = (variance + fp8_variance(q, kv, p, value[i], fmt)).sqrt()
        return Reference(value, sigma, rows, sigma_fp8)

    def tolerance(self, sizes: Sizes) -> Tolerance:
        """A kernel with exactly the two roundings of `reference` has a row error of 1 sigma or less. The
        worst rows of 200 random cases: 1.2 for fp32 weights, 1.45 for bf16 ones, 1.6 with bf16 partial
        results too, 1.75 where weights are rounded after they were normalised
        (tests/test_check_mla_decode.py). 2 passes those and nothing coarser: weights in fp8 reach 5 times
        the limit, scores in bf16 exceed it where softmax is peaked. Single elements of millions reach 4
        to 5 times their row's error.

        Against sigma_fp8 right calls reach 1.3; a last page that is lost 4 times the limit, a scale of q five
        times too small 9 times, a scale of the cache twice too large 60 times."""
        return Tolerance(row=2.0, element=10.0)


def _sampled_rows(operands: MlaDecodeOperands, max_flops: float) -> list[int] | None:
    lengths = operands.host_lengths
    # On an FP8 cache the covariances of `fp8_variance` are by far the most.
    covariance = WIDTH * LATENT if operands.kv.element_size() == 1 else 0
    per_token = 2 * operands.q.shape[1] * (WIDTH + LATENT + covariance)
    if sum(lengths) * per_token <= max_flops:
        return None
    count = len(lengths)
    first = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0, count - 1]
    order = dict.fromkeys(first + [i * 37 % count for i in range(count)])
    rows, flops = [], 0.0
    for row in order:
        flops += lengths[row] * per_token
        if rows and flops > max_flops:
            break
        rows.append(row)
    return sorted(rows)
