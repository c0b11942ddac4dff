"""AITER's FP8 products: CK, CK Tile, assembly and Triton, and the tuned table that picks among them.

Read in AITER e404860 (August 2026) and its tags v0.1.4 to v0.1.20.post1: aiter/ops/gemm_op_a8w8.py,
aiter/ops/shuffle.py, csrc/ck_gemm_a8w8_blockscale*/, csrc/py_itfs_cu/asm_a8w8_blockscale_bpreshuffle.cu,
aiter/ops/triton/gemm/basic/gemm_a8w8_blockscale.py. Which engine runs which: aiter_w8a8_block_fp8_linear in
srt/layers/quantization/fp8_utils.py of SGLang 0.5.23; AiterFp8BlockScaledMMKernel in
model_executor/kernels/linear/scaled_mm/aiter.py of vLLM 0.33. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import vendor
from kernels.binding import BindingError, Function, Symbol
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

TILE_N = 16  # rows of b in a tile of shuffle_weight(x, layout=(16, 16))
MOST_SPLITS = 28  # of K in the Triton kernels' tuned configurations


def of_ops(name: str, needs: str) -> Function:
    """A function of gemm_op_a8w8.py."""
    return Function(f"aiter.ops.gemm_op_a8w8.{name}", f"aiter.{name}", needs=needs)


INTO = "XQ WQ x_scale w_scale Out"
TABLED = "XQ WQ x_scale w_scale dtype"

DISPATCH = of_ops("gemm_a8w8_blockscale", TABLED)
DISPATCH_PRESHUFFLED = of_ops("gemm_a8w8_blockscale_bpreshuffle", TABLED)
CK = of_ops("gemm_a8w8_blockscale_ck", INTO)
CKTILE = of_ops("gemm_a8w8_blockscale_cktile", INTO)
CK_PRESHUFFLED = of_ops("gemm_a8w8_blockscale_bpreshuffle_ck", INTO)
CKTILE_PRESHUFFLED = of_ops("gemm_a8w8_blockscale_bpreshuffle_cktile", INTO)
ASM = of_ops("gemm_a8w8_blockscale_bpreshuffle_asm", "A B A_scale B_scale out")
TRITON = Function(
    "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale",
    "aiter.ops.triton.gemm_a8w8_blockscale.gemm_a8w8_blockscale",  # to 0.1.9
    needs="x w x_scale w_scale y",
)
TRITON_PRESHUFFLED = Function(
    "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale_preshuffle",
    needs="x w x_scale w_scale y",
    wishes="is_x_scale_tranposed",
)
SHUFFLE = Function("aiter.ops.shuffle.shuffle_weight", needs="x layout")

# For the record alone: no row depends on them.
LOOK_UP = Function("aiter.ops.gemm_op_a8w8.get_CKGEMM_config", needs="M N K tuned_file")
TABLES = Symbol("aiter.ops.gemm_op_a8w8.AITER_CONFIGS")  # from 0.1.7.post3


class AiterGemm(vendor.Aiter):
    """multiply: its arguments are a, b, the scales of a, the scales of b, and its output (where it allocates
              that, the dtype), in this order
    flags:    further arguments, where it knows them
    table:    the tuned table that it looks its kernel up in, an attribute of AITER_CONFIGS
    """

    multiply: ClassVar[Function]
    flags: ClassVar[Mapping[str, object]] = {}
    step_n: ClassVar[int] = TILE_N
    table: ClassVar[str] = ""

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.n % self.step_n == 0, f"needs n to be a multiple of {self.step_n}"),
            need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}"),
        )

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.m * sizes.k_blocks

    def weights(self, b_q: torch.Tensor) -> torch.Tensor:
        """[N, K] as it takes them."""
        return b_q

    def scales(self, a_scale: torch.Tensor) -> torch.Tensor:
        """[M, blocks] as it takes them."""
        return a_scale

    def canonical(self, scales: torch.Tensor) -> torch.Tensor:
        """What `scales` made, by row and block: a view."""
        return scales

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return _Gemm(self, operands, out)


class AiterGemmPreshuffled(AiterGemm):
    """It takes b in tiles and the scales of a column by column."""

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.n * sizes.k

    def weights(self, b_q: torch.Tensor) -> torch.Tensor:
        return in_tiles(b_q)

    def scales(self, a_scale: torch.Tensor) -> torch.Tensor:
        return by_columns(a_scale)

    def canonical(self, scales: torch.Tensor) -> torch.Tensor:
        return in_rows(scales)


class _Gemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self, implementation: AiterGemm, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> None:
        import torch

        super().__init__(operands, out)
        self.implementation = implementation
        scales = implementation.scales(operands.a_scale)
        self.a_scale = implementation.canonical(scales)
        given = (
            operands.a_q,
            implementation.weights(operands.b_q),
            scales,
            operands.b_scale,
            torch.bfloat16 if implementation.allocates else out,
        )
        multiply = implementation.multiply
        self.multiply = multiply.bind(**dict(zip(multiply.needs, given, strict=True)), **implementation.flags)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}

    def call(self) -> None:
        try:
            result = self.multiply()
        except RuntimeError as error:
            # Which sizes a kernel of CK's takes is known to its instance alone.
            if "not supported" in str(error):
                name = self.implementation.multiply.places[0].rpartition(".")[2]
                raise Unsupported(f"{name}: {' '.join(str(error).split())}") from error
            raise
        if self.implementation.allocates:
            self.out = result

    def picked(self) -> str:
        if not self.implementation.table:
            return ""
        (m, k), n = self.operands.a_q.shape, self.operands.b_q.shape[0]
        return tuned_row(self.implementation.table, m, k, n)


class DispatchGemm(AiterGemm):
    """The kernel and split that the tuned table has for these sizes, else CK's default. vLLM's product with
    VLLM_ROCM_USE_AITER=1, but for what `aiter.triton` says; SGLang's only with
    SGLANG_AITER_GFX942_BLOCKSCALE_USE_CK=1, or on gfx950 before ROCm 7.2."""

    name = "aiter.dispatch"
    requires = "AITER 0.1.4 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.4"
    allocates = True
    multiply = DISPATCH
    symbols = (DISPATCH,)
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE"


class DispatchPreshuffled(AiterGemmPreshuffled):
    """Likewise among the kernels that take b in tiles: CK, CK Tile, assembly and others. SGLang's product on
    gfx950 from ROCm 7.2 on, but for what `aiter.triton` says. No table of e404860 has a row for a gfx942 of
    304 units (MI300X, MI325X), where it is CK's default."""

    name = "aiter.dispatch_preshuffled"
    requires = "AITER 0.1.5.post3 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.5.post3"
    allocates = True
    multiply = DISPATCH_PRESHUFFLED
    symbols = (DISPATCH_PRESHUFFLED, SHUFFLE)
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE"


class CkGemm(AiterGemm):
    """CK's default kernel, unsplit; up to 0.1.14 the one that AITER's C++ picks for these sizes. Engines run
    it through `aiter.dispatch` alone."""

    name = "aiter.ck"
    requires = "AITER 0.1.4 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.4"
    multiply = CK
    symbols = (CK,)


class CkTile(AiterGemm):
    """CK Tile's default kernel, unsplit; up to 0.1.14 the one that AITER's C++ picks for these sizes. Engines
    run it through `aiter.dispatch` alone."""

    name = "aiter.cktile"
    requires = "AITER 0.1.10 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.10"
    multiply = CKTILE
    symbols = (CKTILE,)


class CkPreshuffled(AiterGemmPreshuffled):
    """As `aiter.ck`, b in tiles; engines run it through `aiter.dispatch_preshuffled` alone."""

    name = "aiter.ck_preshuffled"
    requires = "AITER 0.1.5.post3 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.5.post3"
    multiply = CK_PRESHUFFLED
    symbols = (CK_PRESHUFFLED, SHUFFLE)


class CkTilePreshuffled(AiterGemmPreshuffled):
    """As `aiter.cktile`, b in tiles; engines run it through `aiter.dispatch_preshuffled` alone. Depending on
    the kernel the call transposes the scales of a back."""

    name = "aiter.cktile_preshuffled"
    requires = "AITER 0.1.11 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.11"
    multiply = CKTILE_PRESHUFFLED
    symbols = (CKTILE_PRESHUFFLED, SHUFFLE)


class AsmGemm(AiterGemmPreshuffled):
    """The assembly kernel and split of K that its own heuristic picks; splits add up in the bf16 output.
    Engines run it through `aiter.dispatch_preshuffled` alone, with the kernel and split of the table. From
    0.1.12 to 0.1.14 a call fills a bias with zeros first."""

    name = "aiter.asm"
    requires = "AITER 0.1.7.post3 or later (read to 0.1.20), gfx942 or gfx950"
    since = "0.1.7.post3"
    multiply = ASM
    symbols = (ASM, SHUFFLE)
    step_n = BLOCK


class AiterTritonGemm(AiterGemm):
    """AITER's Triton kernel, with the configuration that it keeps for these sizes. SGLang's product on
    gfx942, and on gfx950 for a list of n and k that has most of DeepSeek-R1's; vLLM's on gfx950 for the n and
    k that AITER keeps a configuration of."""

    name = "aiter.triton"
    requires = "AITER 0.1.4 or later (read to 0.1.20) with Triton, gfx942 or gfx950"
    since = "0.1.4"
    multiply = TRITON
    symbols = (TRITON,)
    also = vendor.TRITON

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return super().workspace(sizes) + 4 * MOST_SPLITS * sizes.m * sizes.n


class AiterTritonPreshuffled(AiterGemmPreshuffled):
    """AITER's Triton kernel on b in tiles, with the configuration that it keeps for these sizes. Engines run
    it on gfx950 where the table of `aiter.dispatch_preshuffled` says so."""

    name = "aiter.triton_preshuffled"
    requires = "AITER 0.1.10 or later (read to 0.1.20) with Triton, gfx942 or gfx950"
    since = "0.1.10"
    multiply = TRITON_PRESHUFFLED
    flags: ClassVar = {"is_x_scale_tranposed": True}  # spelled so
    symbols = (TRITON_PRESHUFFLED, SHUFFLE)
    also = vendor.TRITON

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return super().workspace(sizes) + 4 * MOST_SPLITS * sizes.m * sizes.n

    def weights(self, b_q: torch.Tensor) -> torch.Tensor:
        """A row for every 16 of N."""
        n, k = b_q.shape
        return in_tiles(b_q).reshape(n // TILE_N, TILE_N * k)


def in_tiles(b_q: torch.Tensor) -> torch.Tensor:
    """[N, K] in the order of AITER's matrix instructions, tiles of 16x32."""
    shuffled: torch.Tensor = SHUFFLE.bind(x=b_q, layout=(TILE_N, 16))()
    return shuffled


def by_columns(a_scale: torch.Tensor) -> torch.Tensor:
    """[M, blocks], contiguous to look at, but holding the scales of all rows block by block."""
    return a_scale.t().contiguous().view(a_scale.shape)


def in_rows(by_columns: torch.Tensor) -> torch.Tensor:
    """The scales that such a tensor holds, by row and block: a view with strides (1, M)."""
    m, blocks = by_columns.shape
    return by_columns.view(blocks, m).t()


def tuned_row(table: str, m: int, k: int, n: int) -> str:
    """What a tuned table says about these sizes; empty where this version does not tell."""
    try:
        row: Any = LOOK_UP.bind(M=m, N=n, K=k, tuned_file=getattr(TABLES.find(), table, None))()
    except (BindingError, Unsupported):
        return ""
    if row is None:
        return "default: the tuned table has no row for these sizes"
    words = [str(row.get(name, "")) for name in ("libtype", "kernelName")]
    return " ".join(["tuned:", *filter(None, words), f"splitK={row.get('splitK', 0)}"])
