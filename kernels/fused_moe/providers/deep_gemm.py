"""DeepGEMM's grouped FP8 products, twice, with the suite's own kernels around them, as engines have theirs.

Contiguous: the experts' rows follow each other, each expert's a multiple of the alignment. Masked: each
expert has as many rows as there are tokens, and a count of those that hold something. Sources, 2.1.0 to 2.6.1
and sgl-deep-gemm 0.2.5: csrc/apis/{gemm,layout}.hpp, csrc/utils/layout.hpp, csrc/jit_kernels; deep_gemm/
__init__.py and utils/layout.py of the latter. Ran on an H100 (0.1.4.post1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import platform as machine
from kernels import vendor
from kernels.binding import Function, first_of
from kernels.formats import BLOCK, fp8_format, native_scales
from kernels.fused_moe.between_products import WORD, BetweenProducts
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.align import chunk_for, tiles_for
from kernels.op import Prepared
from kernels.triton_runtime import require_interpreter

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]

ALIGNMENTS = range(32, 225, 32)
"""Rows that an expert's may have to be a multiple of, for the memory plan; prepare asks the library."""


def places(name: str) -> tuple[str, str]:
    return f"deep_gemm.{name}", f"deep_gemm.utils.layout.{name}"


# By position: their first arguments kept their order from version to version, not their names.
CONTIGUOUS = Function("deep_gemm.m_grouped_fp8_gemm_nt_contiguous", positions=4)
MASKED = Function(
    "deep_gemm.m_grouped_fp8_gemm_nt_masked", "deep_gemm.fp8_m_grouped_gemm_nt_masked", positions=5
)
TRANSFORM = Function(
    "deep_gemm.transform_sf_into_required_layout",
    needs="sf mn k recipe num_groups is_sfa",
    when="sm_100 and sm_103",
)
ALIGNMENT = Function(*places("get_mk_alignment_for_contiguous_layout"))
# From 2026-04 on it advises an alignment, and is told it.
ADVICE = Function(*places("get_theoretical_mk_alignment_for_contiguous_layout"), positions=1)
TELL = Function(*places("set_mk_alignment_for_contiguous_layout"), positions=1)


def packs(arch: str) -> bool:
    """Whether scales are the exponents of powers of two, four in a word, as Blackwell's products want."""
    return native_scales(arch) == "ue8m0"


def scale_columns(k: int, packed: bool) -> int:
    """Columns of the scales of K values."""
    return -(-k // (BLOCK * WORD if packed else BLOCK))


def packed_scale_bytes(sizes: FusedMoeSizes) -> int:
    """Of weights: an upper bound, as on sm_90 scales are taken as they are."""
    w13 = 2 * sizes.inter * scale_columns(sizes.hidden, packed=True)
    return sizes.local_experts * 4 * (w13 + sizes.hidden * scale_columns(sizes.inter, packed=True))


def alignment(expected: int) -> int:
    """Rows of a tile where an expert has so many on average, of which its rows are a multiple: 128, or on
    sm_100 what the library advises and vLLM takes."""
    return int(ADVICE.bind(expected)() if first_of(ADVICE, ALIGNMENT) is ADVICE else ALIGNMENT.bind()())


def setter(aligned: int) -> Callable[[], object]:
    """What tells the library the alignment. It stays set, for all: every product is told anew."""
    return TELL.bind(aligned) if first_of(TELL, ALIGNMENT) is TELL else lambda: None


def mn_major(groups: int, rows: int, k: int, packed: bool, device: torch.device) -> torch.Tensor:
    """Scales of activations [groups, rows, columns] as TMA reads them: rows side by side. `rows` is a
    multiple of 4, so that columns begin at multiples of 16 bytes. fp32, or packed int32."""
    import torch

    dtype = torch.int32 if packed else torch.float32
    shape = (groups, scale_columns(k, packed), rows)
    return torch.empty(shape, dtype=dtype, device=device).transpose(1, 2)


def weight_scale(scale: torch.Tensor, rows: int, k: int, packed: bool) -> torch.Tensor:
    """Scales of weights: fp32 [local, rows/128, k/128] as they are, or for every row, MN-major and packed."""
    if not packed:
        return scale
    return TRANSFORM.bind(
        sf=scale, mn=rows, k=k, recipe=(1, BLOCK, BLOCK), num_groups=len(scale), is_sfa=False
    )()


class DeepGemmMoe(vendor.DeepGemm):
    """What both layouts share. `Bound` is what prepare gives."""

    requires = (
        "DeepGEMM 2.1.0 or later (read to 2.6.1) or sgl-deep-gemm (read to 0.2.5), with Triton and nvcc; "
        "sm_90, sm_100 or sm_103"
    )
    activations = "fp8"
    also = vendor.TRITON
    Bound: ClassVar[type[_DeepGemmBoundMoe]]

    def layout(self, sizes: FusedMoeSizes) -> int:
        return packed_scale_bytes(sizes)

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Per row x, gate and up, h, what the expert gives, and scales; per pair its row."""
        rows = max(math.prod(self.Bound.groups(sizes, aligned)) for aligned in ALIGNMENTS)
        of_row = sizes.hidden * 3 + sizes.inter * 5 + (sizes.hidden + sizes.inter) // BLOCK * 4 + 4
        return rows * of_row + sizes.tokens * sizes.picks * 4 + sizes.local_experts * 4

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _DeepGemmBoundMoe | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        require_interpreter(out.device)
        return self.Bound(operands, out, packs(machine.of(out.device).arch), first)


class _DeepGemmBoundMoe(BetweenProducts):
    """Rows of experts, the scales in the library's layout, and the launches around the two products."""

    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, packed: bool, first: _DeepGemmBoundMoe | None
    ) -> None:
        import torch
        import triton

        from kernels.fused_moe.triton import align_jit, rows_jit

        super().__init__(operands, out)
        sizes, device = operands.sizes, out.device
        fmt = fp8_format(sizes.fp8)
        hidden, inter = sizes.hidden, sizes.inter
        same = first if first is not None and first.operands.w13 is operands.w13 else None
        self.w13_scale = (
            same.w13_scale if same else weight_scale(operands.w13_scale, 2 * inter, hidden, packed)
        )
        self.w2_scale = same.w2_scale if same else weight_scale(operands.w2_scale, hidden, inter, packed)

        self.expected = max(1, -(-sizes.routed.pairs // max(1, sizes.routed.hit)))
        self.aligned = alignment(self.expected)
        self.align = setter(self.aligned)
        groups, rows = self.groups(sizes, self.aligned)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.pairs = sizes.tokens * sizes.picks
        self.counts, self.row_of = empty(sizes.local_experts), empty(self.pairs)
        self.a = empty(groups, rows, hidden, dtype=fmt.dtype)
        self.a_scale = mn_major(groups, rows, hidden, packed, device)
        self.gate_up = empty(groups, rows, 2 * inter, dtype=torch.bfloat16)
        self.h_q = empty(groups, rows, inter, dtype=fmt.dtype)
        self.h_scale = mn_major(groups, rows, inter, packed, device)
        self.given = empty(groups, rows, hidden, dtype=torch.bfloat16)

        self.chunk = chunk_for(self.pairs, device)
        self.count = align_jit.count_kernel[(sizes.local_experts,)]
        self.gather = rows_jit.gather_kernel[(self.pairs,)]
        self.gathering = {
            "CAPACITY": rows,
            "PACKED": packed,
            "BLOCK": BLOCK,
            "PICKS": sizes.picks,
            "HIDDEN": hidden,
            "BLOCK_D": triton.next_power_of_2(hidden),
            "WORDS": triton.next_power_of_2(scale_columns(hidden, packed=True)),
        }
        self.bind(rows, packed)
        self.bind_products(rows)

    @staticmethod
    def groups(sizes: FusedMoeSizes, aligned: int) -> tuple[int, int]:
        """Groups of rows, each of which has scales of its own, and the rows of each."""
        raise NotImplementedError

    def place(self) -> None:
        """Give every pair a row, and tell the products whose rows are whose."""
        raise NotImplementedError

    def bind_products(self, rows: int) -> None:
        """Of so many rows of each group."""
        o = self.operands
        self.up = self.product((self.a, self.a_scale), (o.w13, self.w13_scale), self.gate_up)
        self.down = self.product((self.h_q, self.h_scale), (o.w2, self.w2_scale), self.given)

    def product(self, a: Pair, b: Pair, d: torch.Tensor) -> Callable[[], Any]:
        """Of quantised rows and weights, each with its scales."""
        raise NotImplementedError

    def call(self) -> None:
        import torch

        o = self.operands
        self.place()
        x_q, a = o.x_q.view(torch.uint8), self.a.view(torch.uint8)
        self.gather(x_q, o.x_scale, o.topk_ids, self.row_of, a, self.a_scale, **self.gathering)
        self.align()
        self.up()
        self.activate()
        self.align()
        self.down()
        self.add_up()


class _Contiguous(_DeepGemmBoundMoe):
    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, packed: bool, first: _DeepGemmBoundMoe | None
    ) -> None:
        import triton

        from kernels.fused_moe.triton import rows_jit

        super().__init__(operands, out, packed, first)
        local_experts, rows = operands.sizes.local_experts, self.a.shape[1]
        self.contiguous = rows_jit.contiguous_kernel[(local_experts + 1,)]
        self.placing = {
            "pairs": self.pairs,
            "experts": local_experts,
            "rows": rows,
            "ALIGNED": self.aligned,
            "CHUNK": self.chunk,
            "EXPERTS": triton.next_power_of_2(local_experts),
        }

    @staticmethod
    def groups(sizes: FusedMoeSizes, aligned: int) -> tuple[int, int]:
        return 1, tiles_for(aligned, sizes) * aligned

    def place(self) -> None:
        ids = self.operands.topk_ids
        self.count(ids, self.counts, self.pairs, self.pairs, CHUNK=self.chunk)
        self.contiguous(ids, self.counts, self.row_of, self.owners, **self.placing)

    def bind_products(self, rows: int) -> None:
        import torch

        self.owners = torch.empty(rows, dtype=torch.int32, device=self.out.device)
        super().bind_products(rows)

    def product(self, a: Pair, b: Pair, d: torch.Tensor) -> Callable[[], Any]:
        return CONTIGUOUS.bind((a[0][0], a[1][0]), b, d[0], self.owners)


class _Masked(_DeepGemmBoundMoe):
    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, packed: bool, first: _DeepGemmBoundMoe | None
    ) -> None:
        from kernels.fused_moe.triton import rows_jit

        super().__init__(operands, out, packed, first)
        self.masked = rows_jit.masked_kernel[(operands.sizes.local_experts,)]
        self.placing = {"pairs": self.pairs, "CAPACITY": self.a.shape[1], "CHUNK": self.chunk}

    @staticmethod
    def groups(sizes: FusedMoeSizes, aligned: int) -> tuple[int, int]:
        return sizes.local_experts, -(-sizes.tokens // aligned) * aligned

    def place(self) -> None:
        self.masked(self.operands.topk_ids, self.counts, self.row_of, **self.placing)

    def product(self, a: Pair, b: Pair, d: torch.Tensor) -> Callable[[], Any]:
        return MASKED.bind(a, b, d, self.counts, self.expected)


class Contiguous(DeepGemmMoe):
    """`m_grouped_fp8_gemm_nt_contiguous`, what engines take for prefill. Sized for any picks, as vLLM has
    it; rows beyond the last expert's are skipped on sm_90, and multiplied all the same on sm_100."""

    name = "deepgemm.contiguous"
    symbols = (CONTIGUOUS, TRANSFORM, (ADVICE, ALIGNMENT), (TELL, ALIGNMENT))
    Bound = _Contiguous


class Masked(DeepGemmMoe):
    """`m_grouped_fp8_gemm_nt_masked`, what engines take for decode: no counting before placing, and rows of
    no use in memory only."""

    name = "deepgemm.masked"
    symbols = (MASKED, TRANSFORM, (ADVICE, ALIGNMENT), (TELL, ALIGNMENT))
    Bound = _Masked
