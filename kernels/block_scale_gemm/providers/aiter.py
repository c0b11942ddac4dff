"""AITER's FP8 products: CK, CK Tile, assembly and Triton, and the tuned table that chooses among them.

Read in AITER e404860 (August 2026) and its tags v0.1.4 to v0.1.20.post1: aiter/ops/gemm_op_a8w8.py,
aiter/ops/shuffle.py, csrc/ck_gemm_a8w8_blockscale*/, csrc/py_itfs_cu/asm_a8w8_blockscale_bpreshuffle.cu,
aiter/ops/triton/gemm/basic/gemm_a8w8_blockscale.py. Engines run CK's, CK Tile's and the assembly kernels only
through the two rows with a tuned table. Untested on hardware.
"""

from __future__ import annotations

import functools
from typing import Any

from kernels import vendor
from kernels.binding import BindingError, Function, Symbol
from kernels.block_scale_gemm.layouts import column_major, multiples
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Implementation, Prepared, Unsupported, implementation

TILE_N = 16  # rows of b in a tile of shuffle_weight(x, layout=(16, 16))
MOST_SPLITS = 28  # the most splits of K in the Triton kernels' tuned configurations

SHUFFLE = Function("aiter.ops.shuffle.shuffle_weight", needs="x layout")

# Asked only for the record: no row depends on them.
LOOK_UP = Function("aiter.ops.gemm_op_a8w8.get_CKGEMM_config", needs="M N K tuned_file")
TABLES = Symbol("aiter.ops.gemm_op_a8w8.AITER_CONFIGS")  # from 0.1.7.post3


def gemm(
    name: str,
    since: str,
    multiply: Function,
    *,
    has_table: bool = False,
    preshuffled: bool = False,
    is_triton: bool = False,
    step_n: int = TILE_N,
) -> type[Implementation]:
    """Declares the row of a product.

    since:       AITER's first version that has it
    multiply:    its `needs` are the arguments for a, b, the scales of a, the scales of b, and the output, in
                 this order; with a table the last is the output's dtype, because the call then allocates the
                 output. Its `wishes` are flags, which are all set to True
    has_table:   whether the call takes its kernel from a tuned table
    preshuffled: whether it takes b in tiles, and the scales of a column by column
    is_triton:   whether it is a Triton kernel, which allocates the fp32 parts of a split K
    step_n:      N has to be a multiple of this
    """

    def prepare(operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        b_q = operands.b_q
        a_scale = passed_a_scale = operands.a_scale
        if preshuffled:
            b_q = in_tiles(b_q)
            if is_triton:  # takes all rows of a tile as one row of a tensor
                b_q = b_q.reshape(b_q.shape[0] // TILE_N, -1)
            # The kernel reads the scales block after block, but takes a contiguous tensor [M, blocks]. So the
            # passed one is the memory of a_scale in another shape: its indexes are no rows and blocks.
            a_scale = column_major(operands.a_scale)
            passed_a_scale = a_scale.t().view(operands.a_scale.shape)
        output = torch.bfloat16 if has_table else out
        values = (operands.a_q, b_q, passed_a_scale, operands.b_scale, output)
        arguments = dict(zip(multiply.needs, values, strict=True))
        product = multiply.bind(**arguments, **dict.fromkeys(multiply.wishes, True))

        def call() -> object:
            try:
                return product()
            except RuntimeError as error:
                # Only the instance of a CK kernel knows which sizes it takes.
                if "not supported" in str(error):
                    function = multiply.places[0].rpartition(".")[2]
                    raise Unsupported(f"{function}: {' '.join(str(error).split())}") from error
                raise

        inputs = {"a_q": operands.a_q, "a_scale": a_scale}
        picked = functools.partial(picked_in_table, operands, preshuffled) if has_table else None
        return Prepared(operands, out, call, inputs=inputs, picked=picked)

    with_triton = " with Triton" if is_triton else ""
    parts = MOST_SPLITS if is_triton else 0  # fp32 outputs of a split K
    return implementation(
        name,
        vendor.Aiter,
        requires=f"AITER {since} or later (read to 0.1.20){with_triton}, gfx942 or gfx950",
        since=since,
        allocates=has_table,
        also=("triton",) if is_triton else (),
        symbols=(multiply, SHUFFLE) if preshuffled else (multiply,),
        fits=lambda sizes: multiples(sizes, step_n),
        layout=lambda sizes: sizes.n * sizes.k if preshuffled else 0,
        workspace=lambda sizes: 4 * sizes.m * (sizes.k_blocks + parts * sizes.n),
    )(prepare)


def in_tiles(weights: torch.Tensor) -> torch.Tensor:
    """FP8 weights [..., N, K] in tiles of 16 x 32, in the order in which matrix instructions read them."""
    tiles: torch.Tensor = SHUFFLE.bind(x=weights, layout=(TILE_N, 16))()
    return tiles


def marked_tiles(weights: torch.Tensor) -> torch.Tensor:
    """`in_tiles`, with the mark by which AITER and SGLang know such weights from weights in rows."""
    tiles = in_tiles(weights)
    tiles.is_shuffled = True  # type: ignore[attr-defined]
    return tiles


def picked_in_table(operands: BlockScaleGemmOperands, preshuffled: bool) -> str:
    """For the record: what the tuned table has for these sizes; empty where this version does not tell."""
    sizes = operands.sizes
    kind = "BPRESHUFFLE_" if preshuffled else ""
    try:
        file = getattr(TABLES.find(), f"AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_{kind}FILE", None)
        row: Any = LOOK_UP.bind(M=sizes.m, N=sizes.n, K=sizes.k, tuned_file=file)()
    except (BindingError, Unsupported):
        return ""
    if row is None:
        return "default: the tuned table has no row for these sizes"
    names = [str(row.get(column, "")) for column in ("libtype", "kernelName")]
    return " ".join(["tuned:", *filter(None, names), f"splitK={row.get('splitK', 0)}"])


def of_ops(name: str, needs: str = "XQ WQ x_scale w_scale Out") -> Function:
    """A function of gemm_op_a8w8.py. needs: its arguments in the order that `gemm` describes"""
    return Function(f"aiter.ops.gemm_op_a8w8.{name}", f"aiter.{name}", needs=needs)


WITH_DTYPE = "XQ WQ x_scale w_scale dtype"


# The kernel and the split that the tuned table has for these sizes, or else CK's default.
dispatch = gemm("aiter.dispatch", "0.1.4", of_ops("gemm_a8w8_blockscale", WITH_DTYPE), has_table=True)

# The same for kernels that take b in tiles: CK, CK Tile, assembly and others. No table of e404860 has a row
# for a gfx942 of 304 compute units (MI300X, MI325X). There the call takes CK's default.
dispatch_preshuffled = gemm(
    "aiter.dispatch_preshuffled", "0.1.5.post3", of_ops("gemm_a8w8_blockscale_bpreshuffle", WITH_DTYPE),
    has_table=True, preshuffled=True,
)  # fmt: skip

# The default kernels of CK and CK Tile, which do not split K; up to 0.1.14 those that AITER's C++ chooses for
# these sizes. For some of CK Tile's kernels for b in tiles, the call first transposes the scales of a back.
ck = gemm("aiter.ck", "0.1.4", of_ops("gemm_a8w8_blockscale_ck"))
cktile = gemm("aiter.cktile", "0.1.10", of_ops("gemm_a8w8_blockscale_cktile"))
ck_preshuffled = gemm(
    "aiter.ck_preshuffled", "0.1.5.post3", of_ops("gemm_a8w8_blockscale_bpreshuffle_ck"), preshuffled=True
)
cktile_preshuffled = gemm(
    "aiter.cktile_preshuffled", "0.1.11", of_ops("gemm_a8w8_blockscale_bpreshuffle_cktile"), preshuffled=True
)

# The assembly kernel and the split of K that its own heuristic chooses; splits are added in the bf16 output.
# From 0.1.12 to 0.1.14 the call first fills a bias with zeros.
ASM = of_ops("gemm_a8w8_blockscale_bpreshuffle_asm", "A B A_scale B_scale out")
asm = gemm("aiter.asm", "0.1.7.post3", ASM, preshuffled=True, step_n=BLOCK)

# AITER's Triton kernel with the configuration that AITER keeps for these sizes.
TRITON = Function(
    "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale",
    "aiter.ops.triton.gemm_a8w8_blockscale.gemm_a8w8_blockscale",  # to 0.1.9
    needs="x w x_scale w_scale y",
)
TRITON_PRESHUFFLED = Function(
    "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale.gemm_a8w8_blockscale_preshuffle",
    needs="x w x_scale w_scale y",
    wishes="is_x_scale_tranposed",  # AITER spells it so
)
triton_plain = gemm("aiter.triton", "0.1.4", TRITON, is_triton=True)
triton_preshuffled = gemm(
    "aiter.triton_preshuffled", "0.1.10", TRITON_PRESHUFFLED, is_triton=True, preshuffled=True
)
