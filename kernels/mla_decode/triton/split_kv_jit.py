"""Triton sources of split-KV MLA decode: attend to a part of a sequence per program, then combine.

All tensors are contiguous, in the layouts of `MlaDecodeOperands`. Scores are kept in the log2 domain.
Parts and slots come from split_kv_plan. A program adds its steps in order and the combine its slots in one
fixed tree, without atomics: the same plan gives the same bits. The plan depends on lengths, configuration and
compute units: another device may round otherwise.
"""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def seen(scores, ok, step, behind, TOKEN: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores, -inf where a row does not see a token. behind: tokens of the step that each row sees."""
    visible = tl.expand_dims(ok, 1 - TOKEN)
    if CAUSAL:
        visible = tl.expand_dims(step, 1 - TOKEN) < tl.expand_dims(behind, TOKEN)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def split_kernel(
    q,  # bf16 [batch, ROWS, LATENT + ROPE]; row = query token * HEADS + head
    kv,  # bf16 or FP8 [pages, PAGE, LATENT + ROPE]; with FNUZ_BITS uint8 that holds the bits of e4m3fnuz
    page_table,  # int32 [batch, table_width]
    parts,  # int32 [parts, 4]: sequence, first token, behind the last, slot or -1: all of its sequence
    partial,  # fp32 [slots, ROWS, LATENT]
    log_sums,  # fp32 [slots, ROWS]: log2 of the sum of exp2(score); -inf where a row sees none
    out,  # bf16 [batch, ROWS, LATENT]: of sequences that are one part
    table_width,
    score_scale,  # turns q . kv into a score in the log2 domain
    value_scale,  # turns a cached value into what it means
    lengths,  # int32 [batch]; None with one query token
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides the first token of each part
    SWAP: tl.constexpr,  # computes transposed tiles: instructions that want 64 rows get tokens and latents
    APART: tl.constexpr,  # computes scores in a branch; see below
    RELOAD: tl.constexpr,  # loads the tokens again for the second product
    XCDS: tl.constexpr,  # dies that programs are dealt to in turn, each with a cache of its own
    PRODUCT: tl.constexpr,  # what tl.dot takes: bf16, or fp32 in the interpreter: its dot gets bf16 wrong
    FNUZ_BITS: tl.constexpr,
):
    """One program: BLOCK_H rows of one sequence over one part of its tokens, BLOCK_N at a time. A block holds
    all heads of several query tokens, where they fit.

    Grid (parts, rounded up to XCDS, times row blocks): blocks that read the same tokens follow each other on
    one die, so that all but one find them in its cache.
    """
    BLOCKS: tl.constexpr = (ROWS + BLOCK_H - 1) // BLOCK_H
    on_die = tl.program_id(0) // XCDS
    part = parts + 4 * (on_die // BLOCKS * XCDS + tl.program_id(0) % XCDS)
    sequence, start = tl.load(part).to(tl.int64), tl.load(part + 1)
    end, slot = tl.load(part + 2), tl.load(part + 3).to(tl.int64)
    if start >= end:
        return

    rows = on_die % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    latent, rope, step = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    # Rows past the last read that one again, and are never stored.
    q_row = q + sequence * ROWS * (LATENT + ROPE) + tl.minimum(rows, ROWS - 1)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q_row + latent[None, :]).to(PRODUCT)
    q_rope = tl.load(q_row + rope[None, :]).to(PRODUCT)
    if SWAP:
        q_latent, q_rope = tl.trans(q_latent), tl.trans(q_rope)
    pages = page_table + sequence * table_width

    TOKEN: tl.constexpr = 0 if SWAP else 1  # the axis of tokens in scores
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    CAUSAL: tl.constexpr = ROWS > HEADS
    # Behind the last token of the part that all rows see, and behind the last that each of them sees.
    common, behind = end, end
    if CAUSAL:
        edge = tl.load(lengths + sequence) - ROWS // HEADS + 1
        common, behind = tl.minimum(edge, end), tl.minimum(edge + rows // HEADS, end)
        # The peak of a row that sees none is finite, so that its weights are exp2(-inf) = 0, not NaN.
        peak = tl.where(behind > start, peak, 0.0)
    total = tl.zeros([BLOCK_H], tl.float32)
    attended = tl.zeros([LATENT, BLOCK_H] if SWAP else [BLOCK_H, LATENT], tl.float32)
    # Slots past the length, and the page behind the last, may hold NaN: they are never read.
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    ahead = start if ONE_PAGE else tl.minimum(start + step, end - 1)
    page = tl.load(pages + ahead // PAGE)
    for first in range(start, end, BLOCK_N):
        ok = step < end - first
        if ONE_PAGE:
            base = kv + (page.to(tl.int64) * PAGE + first % PAGE) * (LATENT + ROPE)
            row = base + step[:, None] * (LATENT + ROPE)
        else:
            row = kv + (page.to(tl.int64) * PAGE + (first + step) % PAGE)[:, None] * (LATENT + ROPE)
        # The next step's, so that no load waits for another.
        ahead = tl.minimum(first + BLOCK_N if ONE_PAGE else first + BLOCK_N + step, end - 1)
        page = tl.load(pages + ahead // PAGE)
        codes = tl.load(row + latent[None, :], mask=ok[:, None], other=0.0)
        rope_codes = tl.load(row + rope[None, :], mask=ok[:, None], other=0.0)
        kv_latent, kv_rope = widen(codes, PRODUCT, FNUZ_BITS), widen(rope_codes, PRODUCT, FNUZ_BITS)

        if SWAP:
            scores = tl.dot(kv_rope, q_rope, tl.dot(kv_latent, q_latent)) * score_scale
            scores = seen(scores, ok, step, behind - first, TOKEN, CAUSAL)
        elif not APART:
            scores = tl.dot(q_rope, tl.trans(kv_rope), tl.dot(q_latent, tl.trans(kv_latent))) * score_scale
            scores = seen(scores, ok, step, behind - first, TOKEN, CAUSAL)
        elif first + BLOCK_N <= common:
            # Triton assigns all warps of a product that feeds another one to its rows: with 64 rows, 8 warps
            # compute each twice. It does not do so across a branch, nor for a sum of two products.
            scores = tl.dot(q_latent, tl.trans(kv_latent)) * score_scale
            scores += tl.dot(q_rope, tl.trans(kv_rope)) * score_scale
        else:
            scores = tl.dot(q_latent, tl.trans(kv_latent)) * score_scale
            scores += tl.dot(q_rope, tl.trans(kv_rope)) * score_scale
            scores = seen(scores, ok, step, behind - first, TOKEN, CAUSAL)

        new_peak = tl.maximum(peak, tl.max(scores, TOKEN))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - tl.expand_dims(new_peak, TOKEN)).to(PRODUCT)
        # The sum takes the rounded weights, so that the common part of their errors cancels.
        total = total * rescale + tl.sum(weights.to(tl.float32), TOKEN)
        attended *= tl.expand_dims(rescale, TOKEN)
        if RELOAD:
            # Another modifier, so that the compiler does not merge both loads; both mean the default.
            codes = tl.load(row + latent[None, :], mask=ok[:, None], other=0.0, cache_modifier=".ca")
            kv_latent = widen(codes, PRODUCT, FNUZ_BITS)
        if SWAP:
            attended = tl.dot(tl.trans(kv_latent), weights, attended)
        else:
            attended = tl.dot(weights, kv_latent, attended)
        peak = new_peak

    divisor = tl.where(total > 0, total, 1.0) if CAUSAL else total
    attended *= tl.expand_dims(value_scale / divisor, TOKEN)
    if SWAP:
        attended = tl.trans(attended)
    at = rows[:, None] * LATENT + latent[None, :]
    stored = (rows < ROWS)[:, None]
    if slot < 0:
        tl.store(out + sequence * ROWS * LATENT + at, attended.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(partial + slot * ROWS * LATENT + at, attended, mask=stored)
        if CAUSAL:
            peak = tl.where(total > 0, peak, float("-inf"))
        tl.store(log_sums + slot * ROWS + rows, peak + tl.log2(divisor), mask=rows < ROWS)


@triton.jit
def combine_kernel(
    partial,  # fp32 [slots, ROWS, LATENT]
    log_sums,  # fp32 [slots, ROWS]
    split,  # int32 [split sequences, 3]: sequence, first slot, slots
    out,  # bf16 [batch, ROWS, LATENT]
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    MOST_SLOTS: tl.constexpr,  # slots of a sequence, rounded up to a power of two
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_D latent columns of one row. Grid (split sequences * ROWS, LATENT / BLOCK_D)."""
    entry, row = split + tl.program_id(0) // ROWS * 3, tl.program_id(0) % ROWS
    sequence, first, slots = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.arange(0, MOST_SLOTS)
    used = part < slots
    found = (first + part).to(tl.int64) * ROWS + row

    log_sum = tl.load(log_sums + found, mask=used, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    weights /= tl.sum(weights, 0)
    values = tl.load(partial + found[:, None] * LATENT + column[None, :], mask=used[:, None], other=0.0)
    tl.store(out + (sequence * ROWS + row) * LATENT + column, tl.sum(values * weights[:, None], 0))
