"""Triton sources of varlen causal flash attention: a tile of query rows per program, keys in blocks.

Tensors are contiguous, in the layouts of `MhaPrefillOperands`. Scores are logarithms to base 2 of softmax
weights. One program sums all keys of a row, in order: equal inputs give equal bits."""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def flash_kernel(
    q,  # bf16 or FP8 [T, HEADS, NOPE + ROPE]; with FNUZ_BITS, uint8 that holds the bits of e4m3fnuz
    k,  # [S, HEADS, NOPE + ROPE], of the dtype of q
    v,  # [S, HEADS, VALUE], of the dtype of q; if TURNED, the output of turn_kernel
    out,  # bf16 [T, HEADS, VALUE]
    cu_q,  # int32 [batch + 1]
    cu_k,  # int32 [batch + 1]
    programs,  # int32 [grid, 3]: Tile of flash.py
    score_scale,  # turns q . k into a score, besides their descales
    q_descale,  # fp32 [1], as k_descale and v_descale; None for bf16
    k_descale,
    v_descale,
    columns,  # columns of v, if TURNED
    q_nope_blocks,  # the next five are descriptors, or None: see `descriptors` of flash.py
    q_rope_blocks,
    k_nope_blocks,
    k_rope_blocks,
    v_blocks,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TURNED: tl.constexpr,
    PAD: tl.constexpr,  # as in turn_kernel
    LANES: tl.constexpr,  # as in `_in_order_of_registers`
    RUN: tl.constexpr,
    HEADROOM: tl.constexpr,  # the largest weight of a row is 2 ** HEADROOM
    PRODUCT: tl.constexpr,  # the dtype of products; fp32 in the interpreter, which gets bf16 wrong
    FNUZ_BITS: tl.constexpr,
):
    """One program: BLOCK_M query rows of one head of one sequence, over the keys that any of them sees.

    First come the blocks of keys that all rows see, then those on the diagonal. Rows of q and k past the end
    of the sequence may hold anything: their results are masked or not stored. Rows of v past the end are read
    as zeros, because a weight of 0 times NaN is NaN."""
    program = programs + 3 * tl.program_id(0)
    head, sequence, first = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    q_start, k_start = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
    new = tl.load(cu_q + sequence + 1) - q_start
    length = tl.load(cu_k + sequence + 1) - k_start
    if q_descale is not None:
        score_scale *= tl.load(q_descale) * tl.load(k_descale)

    WIDTH: tl.constexpr = NOPE + ROPE
    nope, rope = head * WIDTH, head * WIDTH + NOPE
    row = first + tl.arange(0, BLOCK_M)
    is_row = (row < new)[:, None]
    q_nope = _rows(q, q_nope_blocks, q_start + first, nope, HEADS * WIDTH, is_row, BLOCK_M, NOPE)
    q_rope = _rows(q, q_rope_blocks, q_start + first, rope, HEADS * WIDTH, is_row, BLOCK_M, ROPE)
    q_nope, q_rope = widen(q_nope, PRODUCT, FNUZ_BITS), widen(q_rope, PRODUCT, FNUZ_BITS)

    # All rows of the tile see the keys up to that of the first row; none sees one behind that of the last.
    unmasked_end = (length - new + first + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length - new + first + BLOCK_M, length)
    last_seen = length - new + row
    key = tl.arange(0, BLOCK_N)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, VALUE], tl.float32)
    for masked in tl.static_range(2):
        for start in range(unmasked_end if masked else 0, end if masked else unmasked_end, BLOCK_N):
            k_row = k_start + start
            inside = (start + key < end)[:, None] if masked else None
            k_nope = _rows(k, k_nope_blocks, k_row, nope, HEADS * WIDTH, inside, BLOCK_N, NOPE)
            k_rope = _rows(k, k_rope_blocks, k_row, rope, HEADS * WIDTH, inside, BLOCK_N, ROPE)
            if TURNED:
                column = (k_start // PAD + sequence) * PAD + start
                values = tl.trans(_rows(v, v_blocks, head * VALUE, column, columns, None, VALUE, BLOCK_N))
            else:
                # A descriptor would read past the end of the sequence.
                blocks = None if masked else v_blocks
                values = _rows(v, blocks, k_row, head * VALUE, HEADS * VALUE, inside, BLOCK_N, VALUE)

            scores = tl.dot(q_nope, tl.trans(widen(k_nope, PRODUCT, FNUZ_BITS)))
            scores = tl.dot(q_rope, tl.trans(widen(k_rope, PRODUCT, FNUZ_BITS)), scores)
            if masked:
                scores = tl.where((start + key)[None, :] <= last_seen[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
            weights = tl.exp2(scores * score_scale - (new_peak - HEADROOM)[:, None])
            rescale = tl.exp2(peak - new_peak)
            peak, total = new_peak, total * rescale + tl.sum(weights, 1)
            weights = weights.to(PRODUCT)
            if TURNED:
                weights = _in_order_of_registers(weights, BLOCK_M, BLOCK_N, LANES, RUN)
            attended = tl.dot(weights, widen(values, PRODUCT, FNUZ_BITS), attended * rescale[:, None])

    factor = 1.0 / total
    if v_descale is not None:
        factor *= tl.load(v_descale)
    attended = (attended * factor[:, None]).to(out.dtype.element_ty)
    place = ((q_start + row).to(tl.int64) * HEADS + head) * VALUE
    tl.store(out + place[:, None] + tl.arange(0, VALUE)[None, :], attended, mask=is_row)


@triton.jit
def _rows(x, blocks, row, column, stride, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x[row : row + ROWS, column : column + COLUMNS], where rows of x are `stride` apart. A descriptor
    `blocks` loads all of that; without one, rows that are not `inside` (None: all are) become zeros."""
    if blocks is not None:
        block = blocks.load([row, column])
    else:
        # The offset of the block in the tensor may exceed 32 bits, offsets within the block do not.
        first = x + (row.to(tl.int64) * stride + column)
        place = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        if inside is None:
            block = tl.load(first + place)
        else:
            block = tl.load(first + place, mask=inside, other=0.0)
    return block


@triton.jit
def _in_order_of_registers(
    weights, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr
):
    """The weights, with keys in the order of turned values, in which no weight has to move to another thread.
    LANES threads hold a row in turn, some neighbouring columns each: RUN columns in the result of a product,
    2 * RUN in an FP8 operand. turn_kernel puts the keys of values into the same order."""
    weights = tl.reshape(weights, [BLOCK_M, BLOCK_N // (2 * LANES * RUN), 2, LANES, RUN])
    return tl.reshape(tl.permute(weights, [0, 1, 3, 2, 4]), [BLOCK_M, BLOCK_N])


@triton.jit
def turn_kernel(
    v,  # uint8 [S, HEADS, VALUE]
    turned,  # uint8 [HEADS, VALUE, columns]
    cu_k,  # int32 [batch + 1]
    blocks,  # int32 [blocks, 2]: a sequence, and the first of PAD of its keys
    columns,  # of turned
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    PAD: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """One program: PAD keys of one head of one sequence, zeros behind its end. Grid (HEADS, blocks)."""
    head, block = tl.program_id(0), tl.program_id(1)
    sequence, start = tl.load(blocks + 2 * block), tl.multiple_of(tl.load(blocks + 2 * block + 1), PAD)
    k_start = tl.load(cu_k + sequence)
    length = tl.load(cu_k + sequence + 1) - k_start
    # The key of each column: see `_in_order_of_registers`.
    column = tl.arange(0, PAD)
    key = tl.reshape(column, [PAD // (2 * LANES * RUN), 2, LANES, RUN])
    key = tl.reshape(tl.permute(key, [0, 2, 1, 3]), [PAD])
    v_column = tl.arange(0, VALUE)
    v += ((k_start + start).to(tl.int64) * HEADS + head) * VALUE
    inside = (start + key < length)[:, None]
    codes = tl.load(v + (key[:, None] * (HEADS * VALUE) + v_column[None, :]), mask=inside, other=0)
    turned += (head * VALUE).to(tl.int64) * columns + (k_start // PAD + sequence) * PAD + start
    tl.store(turned + (v_column[:, None] * columns + column[None, :]), tl.trans(codes))
