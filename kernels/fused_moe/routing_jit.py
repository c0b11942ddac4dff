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
    logits_column, ids_row, ids_column, weights_row, weights_column,
    SCALING: tl.constexpr,  # this and LOCAL, GROUPS, LIMIT, TOPK, SHARED: fields of `Router`
    LOCAL: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,  # experts of a group
    LIMIT: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,  # this and the next two: rounded up to powers of two
    GROUP_PADDED: tl.constexpr,
    PICKS_PADDED: tl.constexpr,  # TOPK + SHARED
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Each program routes BLOCK_M tokens. Grid: (blocks of tokens,). Equal inputs give equal bits: of equal
    scores the first expert's wins, and every sum has a fixed order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < tokens
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, GROUP_PADDED)
    expert = group[:, None] * GROUP + member[None, :]
    expert_exists = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    exists = row_exists[:, None, None] & expert_exists[None, :, :]

    at = row[:, None, None] * logits_row + expert[None, :, :] * logits_column
    score = 1 / (1 + tl.exp(-tl.load(logits + at, mask=exists, other=0.0)))
    expert_bias = tl.load(bias + expert, mask=expert_exists, other=0.0)
    biased = tl.where(expert_exists[None, :, :], score + expert_bias[None, :, :], float("-inf"))

    if LIMIT < GROUPS:
        best = tl.max(biased, 2)
        # The second best of a group: the best without the first expert that has the best score.
        first = tl.min(tl.where(biased == best[:, :, None], member[None, None, :], GROUP_PADDED), 2)
        others = tl.where(member[None, None, :] == first[:, :, None], float("-inf"), biased)
        second = tl.max(others, 2)
        group_sum = tl.where(second > float("-inf"), best + second, best)
        is_chosen = tl.zeros([BLOCK_M, GROUPS_PADDED], tl.int32)
        for _ in tl.static_range(LIMIT):
            sum_left = tl.where(is_chosen > 0, float("-inf"), group_sum)
            largest = tl.max(sum_left, 1)
            chosen_group = tl.min(tl.where(sum_left == largest[:, None], group[None, :], GROUPS_PADDED), 1)
            is_chosen += (group[None, :] == chosen_group[:, None]).to(tl.int32)
        biased = tl.where((is_chosen > 0)[:, :, None], biased, float("-inf"))

    EXPERTS: tl.constexpr = GROUPS_PADDED * GROUP_PADDED
    flat = tl.reshape(biased, [BLOCK_M, EXPERTS])
    place, pick = tl.arange(0, EXPERTS), tl.arange(0, PICKS_PADDED)
    chosen_place = tl.zeros([BLOCK_M, PICKS_PADDED], tl.int32)
    for i in tl.static_range(TOPK):
        best_place = tl.argmax(flat, 1)
        chosen_place = tl.where(pick[None, :] == i, best_place[:, None], chosen_place)
        flat = tl.where(place[None, :] == best_place[:, None], float("-inf"), flat)

    # The scores of the chosen are computed again, by one load. From `score` each would take a reduction.
    is_routed = (pick < TOPK)[None, :]
    chosen = chosen_place // GROUP_PADDED * GROUP + chosen_place % GROUP_PADDED
    at = row[:, None] * logits_row + chosen * logits_column
    own_score = 1 / (1 + tl.exp(-tl.load(logits + at, mask=row_exists[:, None] & is_routed, other=0.0)))
    own_score = tl.where(is_routed, own_score, 0.0)
    weight = own_score / tl.sum(own_score, 1)[:, None] * SCALING
    chosen = tl.where(chosen < LOCAL, chosen, -1)
    if SHARED:
        chosen, weight = tl.where(is_routed, chosen, LOCAL), tl.where(is_routed, weight, 1.0)
    is_stored = row_exists[:, None] & (pick < TOPK + SHARED)[None, :]
    tl.store(ids + row[:, None] * ids_row + pick[None, :] * ids_column, chosen, mask=is_stored)
    tl.store(weights + row[:, None] * weights_row + pick[None, :] * weights_column, weight, mask=is_stored)
