"""AITER's FP8 products: CK, CK Tile, assembly and Triton, and the tuned table that picks among them.

Read in AITER e404860 (August 2026) and its tags v0.1.4 to v0.1.20: aiter/ops/gemm_op_a8w8.py,
aiter/ops/shuffle.py, csrc/ck_gemm_a8w8_blockscale*/, csrc/py_itfs_cu/asm_a8w8_blockscale_bpreshuffle.cu,
aiter/ops/triton/gemm/basic/gemm_a8w8_blockscale.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import vendor
from kernels.binding import VendorFunction, find, keywords
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

TILE_N = 16  # rows of b in a tile of shuffle_weight(x, layout=(16, 16))
MOST_SPLITS = 28  # of K in the Triton kernel's tuned configurations


class AiterGemm(vendor.Aiter):
    """function: its name in aiter/ops/gemm_op_a8w8.py
    names:    what it calls a, b, the scales of a, the scales of b, and its output (None: it allocates that)
    shuffles: it takes b in tiles and the scales of a column by column
    table:    the tuned table that it looks its kernel up in, an attribute of AITER_CONFIGS
    """

    function: ClassVar[str]
    names: ClassVar[tuple[str, str, str, str, str]] = ("XQ", "WQ", "x_scale", "w_scale", "Out")
    shuffles: ClassVar[bool] = False
    step_n: ClassVar[int] = TILE_N
    table: ClassVar[str] = ""

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.n % self.step_n == 0, f"needs n to be a multiple of {self.step_n}"),
            need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}"),
        )

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.n * sizes.k if self.shuffles else 0

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.quantised_bytes + 4 * sizes.m * sizes.k_blocks

    def places(self) -> tuple[str, ...]:
        return f"aiter.ops.gemm_op_a8w8.{self.function}", f"aiter.{self.function}"

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        import torch

        function = find(*self.places())
        a_scale = by_columns(operands.a_scale) if self.shuffles else operands.a_scale
        b_q = in_tiles(operands.b_q) if self.shuffles else operands.b_q
        *names, output = self.names
        given: dict[str, object] = dict(
            zip(names, (operands.a_q, b_q, a_scale, operands.b_scale), strict=True)
        )
        given[output] = torch.bfloat16 if self.allocates else out
        return _Gemm(self, operands, out, function, keywords(function, given), a_scale)


class _Gemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self,
        implementation: AiterGemm,
        operands: BlockScaleGemmOperands,
        out: torch.Tensor | None,
        function: VendorFunction,
        arguments: Mapping[str, Any],
        a_scale: torch.Tensor,
    ) -> None:
        super().__init__(operands, out)
        self.implementation = implementation
        self.function, self.arguments = function, arguments
        self.a_scale = in_rows(a_scale) if implementation.shuffles else a_scale

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}

    def call(self) -> None:
        try:
            result = self.function(**self.arguments)
        except RuntimeError as error:
            # Which sizes a kernel of CK's takes is known to its instance alone.
            if "not supported" in str(error):
                raise Unsupported(
                    f"{self.implementation.function}: {' '.join(str(error).split())}"
                ) from error
            raise
        if self.implementation.allocates:
            self.out = result

    def picked(self) -> str:
        if not self.implementation.table:
            return ""
        (m, k), n = self.operands.a_q.shape, self.operands.b_q.shape[0]
        return tuned_row(self.implementation.table, m, k, n)


class DispatchGemm(AiterGemm):
    """What vLLM calls: the kernel and split that the tuned table has for these sizes, else CK's default."""

    name = "aiter.dispatch"
    requires = "AITER 0.1.4 to 0.1.20, gfx942 or gfx950"
    allocates = True
    function = "gemm_a8w8_blockscale"
    names = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE"


class DispatchPreshuffled(AiterGemm):
    """Likewise among the kernels that take b in tiles: CK, CK Tile, assembly and others."""

    name = "aiter.dispatch_preshuffled"
    requires = "AITER 0.1.5.post4 to 0.1.20, gfx942 or gfx950"
    allocates = True
    function = "gemm_a8w8_blockscale_bpreshuffle"
    names = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
    shuffles = True
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE"


class CkGemm(AiterGemm):
    """CK's default kernel, unsplit; up to 0.1.14 the one that AITER's C++ picks for these sizes."""

    name = "aiter.ck"
    requires = "AITER 0.1.4 to 0.1.20, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale_ck"


class CkTile(AiterGemm):
    """CK Tile's default kernel, unsplit; up to 0.1.14 the one that AITER's C++ picks for these sizes."""

    name = "aiter.cktile"
    requires = "AITER 0.1.10 to 0.1.20, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale_cktile"


class CkPreshuffled(AiterGemm):
    """As `aiter.ck`, b in tiles."""

    name = "aiter.ck_preshuffled"
    requires = "AITER 0.1.5.post4 to 0.1.20, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale_bpreshuffle_ck"
    shuffles = True


class CkTilePreshuffled(AiterGemm):
    """As `aiter.cktile`, b in tiles. Depending on the kernel the call transposes the scales of a back."""

    name = "aiter.cktile_preshuffled"
    requires = "AITER 0.1.11 to 0.1.20, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale_bpreshuffle_cktile"
    shuffles = True


class AsmGemm(AiterGemm):
    """The assembly kernel and split of K that its own heuristic picks; splits add up in the bf16 output."""

    name = "aiter.asm"
    requires = "AITER 0.1.8 to 0.1.20, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale_bpreshuffle_asm"
    names = ("A", "B", "A_scale", "B_scale", "out")
    shuffles = True
    step_n = BLOCK


class AiterTritonGemm(AiterGemm):
    """AITER's Triton kernel, with the configuration that it keeps for these sizes."""

    name = "aiter.triton"
    requires = "AITER 0.1.4 to 0.1.20 with Triton, gfx942 or gfx950"
    function = "gemm_a8w8_blockscale"
    names = ("x", "w", "x_scale", "w_scale", "y")
    also = vendor.TRITON

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return super().workspace(sizes) + 4 * MOST_SPLITS * sizes.m * sizes.n

    def places(self) -> tuple[str, ...]:
        module = "gemm_a8w8_blockscale"
        return tuple(f"aiter.ops.triton.{at}{module}.{self.function}" for at in ("gemm.basic.", ""))


def in_tiles(b_q: torch.Tensor) -> torch.Tensor:
    """[N, K] in the order of AITER's matrix instructions, tiles of 16x32."""
    shuffle = find("aiter.ops.shuffle.shuffle_weight")
    return shuffle(**keywords(shuffle, {"x": b_q, "layout": (TILE_N, 16)}))


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
        look_up = find("aiter.ops.gemm_op_a8w8.get_CKGEMM_config")
        files = find("aiter.ops.gemm_op_a8w8.AITER_CONFIGS")
        given = keywords(look_up, {"M": m, "N": n, "K": k, "tuned_file": getattr(files, table, None)})
    except Unsupported:
        return ""
    row = look_up(**given)
    if row is None:
        return "default: the tuned table has no row for these sizes"
    words = [str(row.get(name, "")) for name in ("libtype", "kernelName")]
    return " ".join(["tuned:", *filter(None, words), f"splitK={row.get('splitK', 0)}"])
