"""Triton source of DeepSeek-V3's routing: sigmoid scores, groups limited, top-k by biased scores."""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits,  # fp32 [tokens, GROUPS * GROUP]
    bias,  # fp32 [GROUPS * GROUP]
    ids,  # int32 [tokens, TOPK + SHARED]
    weights,  # fp32 [tokens, TOPK + SHARED]
    tokens,
    logits_row,  # strides in elements, here and below
    logits_column,
    ids_row,
    ids_column,
    weights_row,
    weights_column,
    SCALING: tl.constexpr,
    LOCAL: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LIMIT: tl.constexpr,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,  # to powers of two
    GROUP_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: BLOCK_M tokens. Grid (token blocks,)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < tokens
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, GROUP_PADDED)
    expert = group[:, None] * GROUP + member[None, :]
    expert_ok = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    ok = row_ok[:, None, None] & expert_ok[None, :, :]

    at = row[:, None, None] * logits_row + expert[None, :, :] * logits_column
    score = 1 / (1 + tl.exp(-tl.load(logits + at, mask=ok, other=0.0)))
    offset = tl.load(bias + expert, mask=expert_ok, other=0.0)
    biased = tl.where(expert_ok[None, :, :], score + offset[None, :, :], float("-inf"))

    if LIMIT < GROUPS:
        best = tl.max(biased, 2)
        # The second best of a group: without the first of those that are best.
        first = tl.min(tl.where(biased == best[:, :, None], member[None, None, :], GROUP_PADDED), 2)
        others = tl.where(member[None, None, :] == first[:, :, None], float("-inf"), biased)
        second = tl.max(others, 2)
        total = tl.where(second > float("-inf"), best + second, best)
        kept = tl.zeros([BLOCK_M, GROUPS_PADDED], tl.int32)
        for _ in tl.static_range(LIMIT):
            left = tl.where(kept > 0, float("-inf"), total)
            peak = tl.max(left, 1)
            chosen_group = tl.min(tl.where(left == peak[:, None], group[None, :], GROUPS_PADDED), 1)
            kept += (group[None, :] == chosen_group[:, None]).to(tl.int32)
        biased = tl.where((kept > 0)[:, :, None], biased, float("-inf"))

    EXPERTS: tl.constexpr = GROUPS_PADDED * GROUP_PADDED
    flat = tl.reshape(biased, [BLOCK_M, EXPERTS])
    own = tl.reshape(score, [BLOCK_M, EXPERTS])
    place = tl.arange(0, EXPERTS)
    sum_of_chosen = tl.zeros([BLOCK_M], tl.float32)
    # Twice the same choice, rather than weights kept in registers: they are known once all are chosen.
    remaining = flat
    for _ in tl.static_range(TOPK):
        peak = tl.max(remaining, 1)
        chosen = tl.min(tl.where(remaining == peak[:, None], place[None, :], EXPERTS), 1)
        here = place[None, :] == chosen[:, None]
        sum_of_chosen += tl.sum(tl.where(here, own, 0.0), 1)
        remaining = tl.where(here, float("-inf"), remaining)
    remaining = flat
    for i in tl.static_range(TOPK):
        peak = tl.max(remaining, 1)
        chosen = tl.min(tl.where(remaining == peak[:, None], place[None, :], EXPERTS), 1)
        here = place[None, :] == chosen[:, None]
        weight = tl.sum(tl.where(here, own, 0.0), 1) / sum_of_chosen * SCALING
        remaining = tl.where(here, float("-inf"), remaining)
        number = chosen // GROUP_PADDED * GROUP + chosen % GROUP_PADDED
        tl.store(ids + row * ids_row + i * ids_column, tl.where(number < LOCAL, number, -1), mask=row_ok)
        tl.store(weights + row * weights_row + i * weights_column, weight, mask=row_ok)
    if SHARED:
        tl.store(ids + row * ids_row + TOPK * ids_column, tl.full([BLOCK_M], LOCAL, tl.int32), mask=row_ok)
        last = weights + row * weights_row + TOPK * weights_column
        tl.store(last, tl.full([BLOCK_M], 1.0, tl.float32), mask=row_ok)
