"""Triton sources of split-KV MLA decode: attend to a part of the sequence per program, then combine.

All tensors are contiguous, in the layouts of `MlaDecodeOperands`. Scores are kept in the log2 domain.
"""

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    q,  # bf16 [batch, HEADS, LATENT + ROPE]
    kv,  # bf16 or FP8 [pages, PAGE, LATENT + ROPE]
    page_table,  # int32 [batch, table_width]
    lengths,  # int32 [batch], each at least 1
    partial,  # fp32 [batch, HEADS, splits, LATENT]; not touched if ONE_SPLIT
    log_sums,  # fp32 [batch, HEADS, splits]: log2 of the sum of exp2(score); not touched if ONE_SPLIT
    out,  # bf16 [batch, HEADS, LATENT]; touched only if ONE_SPLIT
    table_width,
    score_scale,  # turns q . kv into a score in the log2 domain
    value_scale,  # turns a cached value into what it means
    splits,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,  # what tl.dot takes: bf16, or fp32 in the interpreter, whose dot gets bf16 wrong
):
    """One program: BLOCK_H heads of one sequence over one split of its tokens, BLOCK_N at a time.

    Grid (head blocks, batch, splits): head blocks that read the same rows run side by side, so that all
    but one find them in the cache.
    """
    sequence, split = tl.program_id(1), tl.program_id(2)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = heads < HEADS
    # Of the sequence in 64 bits, of a head within it in 32: pointers take half the registers so.
    query = sequence.to(tl.int64) * HEADS
    part, part_of = query * splits + split, heads * splits

    length = tl.load(lengths + sequence)
    per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * per_split
    end = tl.minimum(start + per_split, length)
    if start >= end:
        tl.store(log_sums + part + part_of, float("-inf"), mask=head_ok)
        return

    latent, rope = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    q_row = q + query * (LATENT + ROPE) + heads[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q_row + latent[None, :], mask=head_ok[:, None], other=0.0).to(PRODUCT)
    q_rope = tl.load(q_row + rope[None, :], mask=head_ok[:, None], other=0.0).to(PRODUCT)
    pages = page_table + sequence.to(tl.int64) * table_width

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    attended = tl.zeros([BLOCK_H, LATENT], tl.float32)
    for first in range(start, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        ok = token < end
        # Slots past the length, and the page behind the last, may hold NaN: they are never read.
        page = tl.load(pages + token // PAGE, mask=ok, other=0).to(tl.int64)
        row = kv + (page * PAGE + token % PAGE)[:, None] * (LATENT + ROPE)
        kv_latent = tl.load(row + latent[None, :], mask=ok[:, None], other=0.0).to(PRODUCT)
        kv_rope = tl.load(row + rope[None, :], mask=ok[:, None], other=0.0).to(PRODUCT)

        scores = tl.dot(q_latent, tl.trans(kv_latent))
        scores = tl.dot(q_rope, tl.trans(kv_rope), scores)
        scores = tl.where(ok[None, :], scores * score_scale, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None]).to(PRODUCT)
        # The sum takes the rounded weights, so that the common part of their errors cancels.
        total = total * rescale + tl.sum(weights.to(tl.float32), 1)
        attended = tl.dot(weights, kv_latent, attended * rescale[:, None])
        peak = new_peak

    attended *= (value_scale / total)[:, None]
    if ONE_SPLIT:
        out_at = out + query * LATENT + (heads[:, None] * LATENT + latent[None, :])
        tl.store(out_at, attended, mask=head_ok[:, None])
    else:
        partial_at = partial + part * LATENT + (part_of[:, None] * LATENT + latent[None, :])
        tl.store(partial_at, attended, mask=head_ok[:, None])
        tl.store(log_sums + part + part_of, peak + tl.log2(total), mask=head_ok)


@triton.jit
def combine_kernel(
    partial,  # fp32 [queries, splits, LATENT]
    log_sums,  # fp32 [queries, splits]; -inf where the split had no tokens and its partial holds anything
    out,  # bf16 [queries, LATENT]
    splits,
    LATENT: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,  # to a power of two
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_D latent columns of one query. Grid (queries, LATENT / BLOCK_D)."""
    query = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS_PADDED)

    log_sum = tl.load(log_sums + query * splits + split, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    weights /= tl.sum(weights, 0)
    used = log_sum > float("-inf")
    parts = partial + (query * splits + split)[:, None] * LATENT + column[None, :]
    values = tl.load(parts, mask=used[:, None], other=0.0)
    tl.store(out + query * LATENT + column, tl.sum(values * weights[:, None], 0))
