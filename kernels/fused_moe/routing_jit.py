"""Triton source of DeepSeek-V3's routing: sigmoid scores, a limit on groups, top-k by biased scores."""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits,  # fp32 [tokens, GROUPS * GROUP]
    bias,  # fp32 [GROUPS * GROUP]
    ids,  # int32 [tokens, TOPK + SHARED]
    weights,  # fp32 [tokens, TOPK + SHARED]
    tokens,
    logits_row,  # this and the next five: strides in elements
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
    GROUPS_PADDED: tl.constexpr,  # this and the next two: rounded up to powers of two
    GROUP_PADDED: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each program routes BLOCK_M tokens. Grid: (blocks of tokens,). Equal inputs give equal bits: of equal
    scores the first expert's wins, and every sum has a fixed order."""
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
        # The second best of a group: the best without the first expert that has the best score.
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
    place, pick = tl.arange(0, EXPERTS), tl.arange(0, PICKS_PADDED)
    chosen = tl.zeros([BLOCK_M, PICKS_PADDED], tl.int32)
    for i in tl.static_range(TOPK):
        best = tl.argmax(flat, 1)
        chosen = tl.where(pick[None, :] == i, best[:, None], chosen)
        flat = tl.where(place[None, :] == best[:, None], float("-inf"), flat)

    # The scores of the chosen come from their logits again: that is one load, where each would be a
    # reduction.
    routed = (pick < TOPK)[None, :]
    number = chosen // GROUP_PADDED * GROUP + chosen % GROUP_PADDED
    at = row[:, None] * logits_row + number * logits_column
    own = 1 / (1 + tl.exp(-tl.load(logits + at, mask=row_ok[:, None] & routed, other=0.0)))
    own = tl.where(routed, own, 0.0)
    weight = own / tl.sum(own, 1)[:, None] * SCALING
    number = tl.where(number < LOCAL, number, -1)
    if SHARED:
        number, weight = tl.where(routed, number, LOCAL), tl.where(routed, weight, 1.0)
    stored = row_ok[:, None] & (pick < TOPK + SHARED)[None, :]
    tl.store(ids + row[:, None] * ids_row + pick[None, :] * ids_column, number, mask=stored)
    tl.store(weights + row[:, None] * weights_row + pick[None, :] * weights_column, weight, mask=stored)
