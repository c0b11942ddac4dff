"""Triton sources of split-KV MLA decode: each program attends to a part of a sequence, and a second kernel
combines the parts.

All tensors are contiguous, in the layouts of `MlaDecodeOperands`. Scores are logarithms to base 2 of softmax
weights. Parts and slots come from split_kv_plan. A program adds its steps in order and the second kernel adds
slots in one fixed tree, without atomics: the same plan gives the same bits. The plan depends on lengths,
configuration and compute units, so that another device may round otherwise."""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def masked(scores, inside, step, seen, TOKEN: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores, -inf where a row does not see a token. inside: which tokens are in the part; step: 0 .. BLOCK_N
    - 1; seen: how many tokens of the step each row sees, if CAUSAL; TOKEN: the axis of tokens."""
    visible = tl.expand_dims(inside, 1 - TOKEN)
    if CAUSAL:
        visible = tl.expand_dims(step, 1 - TOKEN) < tl.expand_dims(seen, TOKEN)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def split_kernel(
    q,  # bf16 [batch, ROWS, LATENT + ROPE]; row = query token * HEADS + head
    kv,  # bf16 or FP8 [pages, PAGE, LATENT + ROPE]; with FNUZ_BITS uint8 that holds the bits of e4m3fnuz
    page_table,  # int32 [batch, table_width]
    parts,  # int32 [parts, 4]: Part of split_kv_plan
    partial,  # fp32 [slots, ROWS, LATENT]
    log_sums,  # fp32 [slots, ROWS]: log2 of the sum of exp2(score); -inf where a row sees no token
    out,  # bf16 [batch, ROWS, LATENT]; written for sequences that are one part
    table_width,
    score_scale,  # turns q . kv into a score
    value_scale,  # a stored value is to be multiplied by it
    lengths,  # int32 [batch]; None with one query token
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides the first token of each part
    SWAP: tl.constexpr,  # computes transposed tiles: instructions that want 64 rows get tokens and latents
    APART: tl.constexpr,  # computes the latent and the rope part of scores apart, and adds them up
    RELOAD: tl.constexpr,  # loads the tokens again for the second product
    XCDS: tl.constexpr,  # dies that programs are dealt to in turn, each with a cache of its own
    PRODUCT: tl.constexpr,  # the dtype of products: bf16; fp32 in the interpreter, which gets bf16 wrong
    FNUZ_BITS: tl.constexpr,
):
    """One program: BLOCK_H rows of one sequence over one part of its tokens, BLOCK_N at a time. A block holds
    all heads of several query tokens, where they fit.

    The grid is (parts * row blocks), with the parts rounded up to a multiple of XCDS: blocks that read the
    same tokens follow each other on one die, so that all but the first find them in its cache."""
    BLOCKS: tl.constexpr = (ROWS + BLOCK_H - 1) // BLOCK_H
    die, number_on_die = tl.program_id(0) % XCDS, tl.program_id(0) // XCDS
    # Of the parts, a die takes those whose number modulo XCDS is its own: all blocks of one, then the next.
    part = parts + 4 * (number_on_die // BLOCKS * XCDS + die)
    sequence, start = tl.load(part).to(tl.int64), tl.load(part + 1)
    end, slot = tl.load(part + 2), tl.load(part + 3).to(tl.int64)
    if start >= end:
        return

    rows = number_on_die % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    latent, rope, step = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    # Rows past the last one read it again, and are never stored.
    q_row = q + sequence * ROWS * (LATENT + ROPE) + tl.minimum(rows, ROWS - 1)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q_row + latent[None, :]).to(PRODUCT)
    q_rope = tl.load(q_row + rope[None, :]).to(PRODUCT)
    if SWAP:
        q_latent, q_rope = tl.trans(q_latent), tl.trans(q_rope)
    pages = page_table + sequence * table_width

    TOKEN: tl.constexpr = 0 if SWAP else 1  # the axis of tokens in scores
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    CAUSAL: tl.constexpr = ROWS > HEADS
    # The end of the tokens of the part that all rows see, and of those that each row sees.
    end_for_all, end_for_row = end, end
    if CAUSAL:
        end_for_first = tl.load(lengths + sequence) - ROWS // HEADS + 1  # for the first query token
        end_for_all = tl.minimum(end_for_first, end)
        end_for_row = tl.minimum(end_for_first + rows // HEADS, end)
        # The peak of a row that sees no token is finite, so that its weights are exp2(-inf) = 0, not NaN.
        peak = tl.where(end_for_row > start, peak, 0.0)
    total = tl.zeros([BLOCK_H], tl.float32)
    attended = tl.zeros([LATENT, BLOCK_H] if SWAP else [BLOCK_H, LATENT], tl.float32)
    # Slots past the length, and the page behind the last one, may hold NaN: they are never read.
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0  # all tokens of a step are on one page
    token = start if ONE_PAGE else tl.minimum(start + step, end - 1)
    page = tl.load(pages + token // PAGE)
    for first in range(start, end, BLOCK_N):
        inside = step < end - first
        if ONE_PAGE:
            base = kv + (page.to(tl.int64) * PAGE + first % PAGE) * (LATENT + ROPE)
            row = base + step[:, None] * (LATENT + ROPE)
        else:
            row = kv + (page.to(tl.int64) * PAGE + (first + step) % PAGE)[:, None] * (LATENT + ROPE)
        # The page of the next step is loaded here, so that no load of tokens waits for that of a page.
        token = tl.minimum(first + BLOCK_N if ONE_PAGE else first + BLOCK_N + step, end - 1)
        page = tl.load(pages + token // PAGE)
        codes = tl.load(row + latent[None, :], mask=inside[:, None], other=0.0)
        rope_codes = tl.load(row + rope[None, :], mask=inside[:, None], other=0.0)
        kv_latent, kv_rope = widen(codes, PRODUCT, FNUZ_BITS), widen(rope_codes, PRODUCT, FNUZ_BITS)

        seen = end_for_row - first
        if SWAP:
            scores = tl.dot(kv_rope, q_rope, tl.dot(kv_latent, q_latent)) * score_scale
            scores = masked(scores, inside, step, seen, TOKEN, CAUSAL)
        elif not APART:
            scores = tl.dot(q_rope, tl.trans(kv_rope), tl.dot(q_latent, tl.trans(kv_latent))) * score_scale
            scores = masked(scores, inside, step, seen, TOKEN, CAUSAL)
        elif first + BLOCK_N <= end_for_all:
            # If one product simply feeds the next, as above, Triton divides the rows among all warps: with 64
            # rows, 8 warps compute each row twice. A branch and a sum of two products keep it from doing so.
            scores = tl.dot(q_latent, tl.trans(kv_latent)) * score_scale
            scores += tl.dot(q_rope, tl.trans(kv_rope)) * score_scale
        else:
            scores = tl.dot(q_latent, tl.trans(kv_latent)) * score_scale
            scores += tl.dot(q_rope, tl.trans(kv_rope)) * score_scale
            scores = masked(scores, inside, step, seen, TOKEN, CAUSAL)

        new_peak = tl.maximum(peak, tl.max(scores, TOKEN))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - tl.expand_dims(new_peak, TOKEN)).to(PRODUCT)
        # The rounded weights are summed, so that the common part of their errors cancels in the division.
        total = total * rescale + tl.sum(weights.to(tl.float32), TOKEN)
        attended *= tl.expand_dims(rescale, TOKEN)
        if RELOAD:
            # The modifier means the default; with it the compiler does not merge this load with the first.
            codes = tl.load(row + latent[None, :], mask=inside[:, None], other=0.0, cache_modifier=".ca")
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
    place = rows[:, None] * LATENT + latent[None, :]
    is_row = (rows < ROWS)[:, None]
    if slot < 0:
        tl.store(out + sequence * ROWS * LATENT + place, attended.to(out.dtype.element_ty), mask=is_row)
    else:
        tl.store(partial + slot * ROWS * LATENT + place, attended, mask=is_row)
        if CAUSAL:
            peak = tl.where(total > 0, peak, float("-inf"))
        tl.store(log_sums + slot * ROWS + rows, peak + tl.log2(divisor), mask=rows < ROWS)


@triton.jit
def combine_kernel(
    partial,  # fp32 [slots, ROWS, LATENT]
    log_sums,  # fp32 [slots, ROWS]
    split,  # int32 [split sequences, 3]: SplitSequence of split_kv_plan
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
    number = tl.arange(0, MOST_SLOTS)
    is_used = number < slots
    slot_row = (first + number).to(tl.int64) * ROWS + row

    log_sum = tl.load(log_sums + slot_row, mask=is_used, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    weights /= tl.sum(weights, 0)
    values = tl.load(partial + slot_row[:, None] * LATENT + column[None, :], mask=is_used[:, None], other=0.0)
    tl.store(out + (sequence * ROWS + row) * LATENT + column, tl.sum(values * weights[:, None], 0))
