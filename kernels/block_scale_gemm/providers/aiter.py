"""AITER's FP8 products: CK, CK Tile, assembly and Triton, and the tuned table that chooses among them.

Read in AITER e404860 (August 2026) and its tags v0.1.4 to v0.1.20.post1: aiter/ops/gemm_op_a8w8.py,
aiter/ops/shuffle.py, csrc/ck_gemm_a8w8_blockscale*/, csrc/py_itfs_cu/asm_a8w8_blockscale_bpreshuffle.cu,
aiter/ops/triton/gemm/basic/gemm_a8w8_blockscale.py. For which engine runs which: aiter_w8a8_block_fp8_linear
in srt/layers/quantization/fp8_utils.py of SGLang 0.5.23; AiterFp8BlockScaledMMKernel in
model_executor/kernels/linear/scaled_mm/aiter.py of vLLM 0.33. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernels import vendor
from kernels.binding import BindingError, Function, Symbol
from kernels.block_scale_gemm.layouts import multiples
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Prepared, Unsupported
from kernels.support import Support

TILE_N = 16  # rows of b in a tile of shuffle_weight(x, layout=(16, 16))
MOST_SPLITS = 28  # the most splits of K in the Triton kernels' tuned configurations


def of_ops(name: str, needs: str) -> Function:
    """A function of gemm_op_a8w8.py."""
    return Function(f"aiter.ops.gemm_op_a8w8.{name}", f"aiter.{name}", needs=needs)


INTO = "XQ WQ x_scale w_scale Out"
TABLED = "XQ WQ x_scale w_scale dtype"

SHUFFLE = Function("aiter.ops.shuffle.shuffle_weight", needs="x layout")

# Asked only for the record: no row depends on them.
LOOK_UP = Function("aiter.ops.gemm_op_a8w8.get_CKGEMM_config", needs="M N K tuned_file")
TABLES = Symbol("aiter.ops.gemm_op_a8w8.AITER_CONFIGS")  # from 0.1.7.post3


class AiterGemm(vendor.Aiter):
    multiply: ClassVar[Function]
    """Its arguments are a, b, the scales of a, the scales of b, and the output, or the output's dtype where
    the call allocates the output; in this order."""

    flags: ClassVar[Mapping[str, object]] = {}
    """Further arguments, given where the installed version takes them."""

    table: ClassVar[str] = ""
    """The attribute of AITER_CONFIGS that names the tuned table from which the call takes its kernel."""

    splits: ClassVar[int] = 0
    """The most splits of K whose fp32 parts the call allocates."""

    step_n: ClassVar[int] = TILE_N
    preshuffled: ClassVar[bool] = False  # takes b in tiles, and the scales of a column by column
    rows_of_b: ClassVar[int] = 1  # rows of N that share a row of the tensor of tiles

    def __init_subclass__(cls) -> None:
        triton = " with Triton" if cls.also else ""
        cls.requires = f"AITER {cls.since} or later (read to 0.1.20){triton}, gfx942 or gfx950"
        cls.symbols = (cls.multiply, SHUFFLE) if cls.preshuffled else (cls.multiply,)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return multiples(sizes, self.step_n, BLOCK)

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.n * sizes.k if self.preshuffled else 0

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.m * (sizes.k_blocks + self.splits * sizes.n)

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        b_q, taken = operands.b_q, operands.a_scale
        a_scale = taken
        if self.preshuffled:
            b_q = in_tiles(b_q)
            if self.rows_of_b > 1:
                b_q = b_q.reshape(b_q.shape[0] // self.rows_of_b, -1)
            # The kernel gets a tensor that looks like [M, blocks] but holds the scales block after block.
            # What `inputs` gets is a view of it by row and block.
            taken = a_scale.t().contiguous().view(a_scale.shape)
            a_scale = taken.view(a_scale.shape[1], -1).t()
        last = torch.bfloat16 if self.allocates else out
        given = (operands.a_q, b_q, taken, operands.b_scale, last)
        names = dict(zip(self.multiply.needs, given, strict=True))
        multiply = self.multiply.bind(**names, **self.flags)

        def call() -> object:
            try:
                return multiply()
            except RuntimeError as error:
                # Only the instance of a CK kernel knows which sizes it takes.
                if "not supported" in str(error):
                    name = self.multiply.places[0].rpartition(".")[2]
                    raise Unsupported(f"{name}: {' '.join(str(error).split())}") from error
                raise

        inputs = {"a_q": operands.a_q, "a_scale": a_scale}
        return Prepared(operands, out, call, inputs=inputs, picked=lambda: self.picked(operands))

    def picked(self, operands: BlockScaleGemmOperands) -> str:
        """What the tuned table says about these sizes; empty where this version does not tell."""
        if not self.table:
            return ""
        (m, k), n = operands.a_q.shape, operands.b_q.shape[0]
        try:
            file = getattr(TABLES.find(), self.table, None)
            found: Any = LOOK_UP.bind(M=m, N=n, K=k, tuned_file=file)()
        except (BindingError, Unsupported):
            return ""
        if found is None:
            return "default: the tuned table has no row for these sizes"
        words = [str(found.get(name, "")) for name in ("libtype", "kernelName")]
        return " ".join(["tuned:", *filter(None, words), f"splitK={found.get('splitK', 0)}"])


def in_tiles(b_q: torch.Tensor) -> torch.Tensor:
    """[N, K] in the order of AITER's matrix instructions, in tiles of 16x32."""
    shuffled: torch.Tensor = SHUFFLE.bind(x=b_q, layout=(TILE_N, 16))()
    return shuffled


class DispatchGemm(AiterGemm):
    """The kernel and the split that the tuned table has for these sizes, or else CK's default. vLLM's product
    with VLLM_ROCM_USE_AITER=1, except where it takes `aiter.triton`. SGLang's only with
    SGLANG_AITER_GFX942_BLOCKSCALE_USE_CK=1, or on gfx950 before ROCm 7.2."""

    name = "aiter.dispatch"
    since = "0.1.4"
    allocates = True
    multiply = of_ops("gemm_a8w8_blockscale", TABLED)
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE"


class DispatchPreshuffled(AiterGemm):
    """The same among the kernels that take b in tiles: CK, CK Tile, assembly and others. SGLang's product on
    gfx950 from ROCm 7.2, except where it takes `aiter.triton`. No table of e404860 has a row for a gfx942 of
    304 compute units (MI300X, MI325X): there it is CK's default."""

    name = "aiter.dispatch_preshuffled"
    since = "0.1.5.post3"
    allocates = True
    multiply = of_ops("gemm_a8w8_blockscale_bpreshuffle", TABLED)
    table = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE"
    preshuffled = True


class CkGemm(AiterGemm):
    """CK's default kernel without splits; up to 0.1.14 the kernel that AITER's C++ chooses for these sizes.
    Engines run it only through `aiter.dispatch`."""

    name = "aiter.ck"
    since = "0.1.4"
    multiply = of_ops("gemm_a8w8_blockscale_ck", INTO)


class CkTile(AiterGemm):
    """CK Tile's default kernel without splits; up to 0.1.14 the kernel that AITER's C++ chooses for these
    sizes. Engines run it only through `aiter.dispatch`."""

    name = "aiter.cktile"
    since = "0.1.10"
    multiply = of_ops("gemm_a8w8_blockscale_cktile", INTO)


class CkPreshuffled(AiterGemm):
    """As `aiter.ck` with b in tiles. Engines run it only through `aiter.dispatch_preshuffled`."""

    name = "aiter.ck_preshuffled"
    since = "0.1.5.post3"
    multiply = of_ops("gemm_a8w8_blockscale_bpreshuffle_ck", INTO)
    preshuffled = True


class CkTilePreshuffled(AiterGemm):
    """As `aiter.cktile` with b in tiles. Engines run it only through `aiter.dispatch_preshuffled`. With some
    kernels the call transposes the scales of a back."""

    name = "aiter.cktile_preshuffled"
    since = "0.1.11"
    multiply = of_ops("gemm_a8w8_blockscale_bpreshuffle_cktile", INTO)
    preshuffled = True


class AsmGemm(AiterGemm):
    """The assembly kernel and the split of K that its own heuristic chooses; splits are added in the bf16
    output. Engines run it only through `aiter.dispatch_preshuffled`, with the table's kernel and split. From
    0.1.12 to 0.1.14 the call first fills a bias with zeros."""

    name = "aiter.asm"
    since = "0.1.7.post3"
    multiply = of_ops("gemm_a8w8_blockscale_bpreshuffle_asm", "A B A_scale B_scale out")
    step_n = BLOCK
    preshuffled = True


class AiterTritonGemm(AiterGemm):
    """AITER's Triton kernel with the configuration that AITER keeps for these sizes. SGLang's product on
    gfx942, and on gfx950 for a list of n and k that has most of DeepSeek-R1's. vLLM's on gfx950 for the n and
    k that AITER keeps a configuration for."""

    name = "aiter.triton"
    since = "0.1.4"
    multiply = Function(
        "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale",
        "aiter.ops.triton.gemm_a8w8_blockscale.gemm_a8w8_blockscale",  # to 0.1.9
        needs="x w x_scale w_scale y",
    )
    also = ("triton",)
    splits = MOST_SPLITS


class AiterTritonPreshuffled(AiterGemm):
    """AITER's Triton kernel on b in tiles, with the configuration that AITER keeps for these sizes. Engines
    run it on gfx950 where the table of `aiter.dispatch_preshuffled` says so."""

    name = "aiter.triton_preshuffled"
    since = "0.1.10"
    multiply = Function(
        "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale_preshuffle",
        needs="x w x_scale w_scale y",
        wishes="is_x_scale_tranposed",
    )
    flags: ClassVar = {"is_x_scale_tranposed": True}  # AITER spells it so
    also = ("triton",)
    splits = MOST_SPLITS
    preshuffled = True
    rows_of_b = TILE_N
