"""Triton source of varlen causal flash attention: a tile of query rows per program, keys in blocks.

All tensors are contiguous, in the layouts of `MhaPrefillOperands`. Scores are kept in the log2 domain.
"""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q,  # bf16 [T, HEADS, NOPE + ROPE]
    k,  # bf16 [S, HEADS, NOPE + ROPE]
    v,  # bf16 [S, HEADS, VALUE]
    out,  # bf16 [T, HEADS, VALUE]
    cu_q,  # int32 [batch + 1]
    cu_k,  # int32 [batch + 1]
    tiles,  # int32 [tiles, 2]: a sequence, and the first of BLOCK_M of its query rows
    score_scale,  # turns q . k into a score in the log2 domain
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,  # what tl.dot takes: bf16, or fp32 in the interpreter, whose dot gets bf16 wrong
):
    """One program: BLOCK_M query rows of one head of one sequence, over the keys that any of them sees.

    Grid (HEADS, tiles): where programs are dealt to dies in turn, as on MI300X, a head's keys stay in the
    cache of one, if the number of heads is a multiple of that of dies.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    q_start, k_start = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
    new = tl.load(cu_q + sequence + 1) - q_start
    length = tl.load(cu_k + sequence + 1) - k_start

    row = first + tl.arange(0, BLOCK_M)
    row_ok = row < new
    position = length - new + row
    query = (q_start + row).to(tl.int64) * HEADS + head
    nope, rope, value = tl.arange(0, NOPE), NOPE + tl.arange(0, ROPE), tl.arange(0, VALUE)
    q_row = q + query[:, None] * (NOPE + ROPE)
    q_nope = tl.load(q_row + nope[None, :], mask=row_ok[:, None], other=0.0).to(PRODUCT)
    q_rope = tl.load(q_row + rope[None, :], mask=row_ok[:, None], other=0.0).to(PRODUCT)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, VALUE], tl.float32)
    # Keys up to the tile's first row are seen by all of its rows; behind its last row none is seen.
    unmasked = (length - new + first + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length - new + first + BLOCK_M, length)
    base = k_start.to(tl.int64) * HEADS + head
    key_rows = tl.arange(0, BLOCK_N)[:, None] * HEADS
    k_block = k + base * (NOPE + ROPE) + key_rows * (NOPE + ROPE)
    v_block = v + base * VALUE + key_rows * VALUE + value[None, :]
    for _ in range(0, unmasked, BLOCK_N):
        k_nope = tl.load(k_block + nope[None, :]).to(PRODUCT)
        k_rope = tl.load(k_block + rope[None, :]).to(PRODUCT)
        values = tl.load(v_block).to(PRODUCT)
        scores = tl.dot(q_nope, tl.trans(k_nope))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores) * score_scale
        weights, rescale, peak, total = _softmax(scores, peak, total, PRODUCT)
        attended = tl.dot(weights, values, attended * rescale[:, None])
        # Not an offset from the start: that may exceed 32 bits.
        k_block += BLOCK_N * HEADS * (NOPE + ROPE)
        v_block += BLOCK_N * HEADS * VALUE
    for start in range(unmasked, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        ok = (key < end)[:, None]
        k_nope = tl.load(k_block + nope[None, :], mask=ok, other=0.0).to(PRODUCT)
        k_rope = tl.load(k_block + rope[None, :], mask=ok, other=0.0).to(PRODUCT)
        values = tl.load(v_block, mask=ok, other=0.0).to(PRODUCT)
        scores = tl.dot(q_nope, tl.trans(k_nope))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores) * score_scale
        seen = key[None, :] <= tl.minimum(position, end - 1)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        weights, rescale, peak, total = _softmax(scores, peak, total, PRODUCT)
        attended = tl.dot(weights, values, attended * rescale[:, None])
        k_block += BLOCK_N * HEADS * (NOPE + ROPE)
        v_block += BLOCK_N * HEADS * VALUE

    attended /= total[:, None]
    tl.store(out + query[:, None] * VALUE + value[None, :], attended, mask=row_ok[:, None])


@triton.jit
def _softmax(scores, peak, total, PRODUCT: tl.constexpr):
    """A further block of scores [rows, keys] in the log2 domain. Gives its weights relative to the highest
    score so far, the factor that brings what was summed before to the same footing, and both sums anew."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None]).to(PRODUCT)
    # The sum takes the rounded weights, so that the common part of their errors cancels.
    return weights, rescale, new_peak, total * rescale + tl.sum(weights.to(tl.float32), 1)
