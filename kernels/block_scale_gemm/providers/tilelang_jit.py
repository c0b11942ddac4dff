"""TileLang source of the block-scale GEMM. TileLang reads it as text: no annotation may be a string."""

import tilelang.language as T

from kernels.formats import BLOCK


def scaled_product(n, k, fp8, rows, threads, stages):
    """A TileLang program of the product for any m. k: a multiple of 128; fp8: the dtype of a and b.

    A block of threads computes `rows` rows of 128 columns, which share the scales of b. The products of a
    block of K are added up before they are scaled. stages: those of the pipeline over K
    """
    m = T.dynamic("m")

    @T.prim_func
    def main(
        a: T.Tensor((m, k), fp8),
        a_scale: T.Tensor((m, k // BLOCK), "float32"),
        b: T.Tensor((n, k), fp8),
        b_scale: T.Tensor(((n + BLOCK - 1) // BLOCK, k // BLOCK), "float32"),
        out: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, BLOCK), T.ceildiv(m, rows), threads=threads) as (column, row):
            a_tile = T.alloc_shared((rows, BLOCK), fp8)
            b_tile = T.alloc_shared((BLOCK, BLOCK), fp8)
            products = T.alloc_fragment((rows, BLOCK), "float32")
            total = T.alloc_fragment((rows, BLOCK), "float32")
            T.clear(total)
            for block in T.Pipelined(k // BLOCK, num_stages=stages):
                T.copy(a[row * rows, block * BLOCK], a_tile)
                T.copy(b[column * BLOCK, block * BLOCK], b_tile)
                T.clear(products)
                T.gemm(a_tile, b_tile, products, transpose_B=True)
                for i, j in T.Parallel(rows, BLOCK):
                    total[i, j] += products[i, j] * (a_scale[row * rows + i, block] * b_scale[column, block])
            T.copy(total, out[row * rows, column * BLOCK])

    return main
