"""Kernels of MLA decode that are wrong in one way each.

A kernel is wrong in the longest sequence behind the first, unless its name or its table says `everywhere`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.attention_mistakes import (
    ROPE,
    Arithmetic,
    Attended,
    AttentionOp,
    PartResult,
    Wrong,
    attend,
    combine,
    combined,
    evenly,
    in_fp8,
    output_with,
    times,
    without,
)
from kernels.mistakes import E4M3, E5M2, OTHER_FP8, Answers, Mistake, fp8, put, truncated_to
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands


def read(o: MlaDecodeOperands, i: int, slots: torch.Tensor | None = None) -> Attended:
    """What a kernel reads for sequence i. slots: rows of the cache, int64 [n]; None for the right ones"""
    if slots is None:
        slots = o.token_slots(i)
    kv = o.kv.view(-1, WIDTH)[slots].float() * o.kv_scale
    q = o.q[i].flatten(0, 1).float()
    hidden = o.hidden(len(kv))
    seen = None if hidden is None else ~hidden
    v, parts = kv[:, :LATENT], evenly(len(kv), 4)
    return Attended(o, i, rows=i, q=q, k=kv, v=v, scale=o.scale, fp8=o.kv.dtype, parts=parts, seen=seen)


ATTENTION = AttentionOp(
    sequences=lambda o: list(range(len(o.host_lengths))),
    victim=lambda o: max(range(1, len(o.host_lengths)), key=o.host_lengths.__getitem__, default=0),
    read=read,
)


# Wrong tokens, pages and page tables

SlotsRead = Callable[[Attended], torch.Tensor]
"""Maps what a right kernel reads to the rows of the cache that a wrong one reads, int64 [n]."""


def changed(change: Callable[[torch.Tensor, int], torch.Tensor]) -> SlotsRead:
    """change: maps (right slots [length], tokens of a page) to other slots"""
    return lambda a: change(a.operands.token_slots(a.sequence), a.operands.page)


def page_left_out(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return torch.cat([slots[:start], slots[start + page :]])


def page_read_twice(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    before = slots[start - page : start]
    return put(slots, slice(start, start + page), before[: len(slots) - start])  # a last page may be shorter


def by_table(o: MlaDecodeOperands, i: int, tokens: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The slots of so many tokens, but at most of those that row i of the page table has room for. Page
    numbers are cast to `dtype`; a negative one then counts from the end of the cache."""
    token = torch.arange(min(tokens, o.page_table.shape[1] * o.page), device=o.q.device)
    page = o.page_table[i, token // o.page].to(dtype).long() % len(o.kv)
    return page * o.page + token % o.page


def consecutive(a: Attended, first_page: int) -> torch.Tensor:
    """As many rows of the cache as the sequence has tokens, from the start of a page on."""
    start = first_page * a.operands.page
    return torch.arange(start, start + len(a.k), device=a.k.device) % a.operands.kv[..., 0].numel()


def consecutive_sequences(a: Attended) -> torch.Tensor:
    """The sequences are taken to lie in the cache one after the other, each in whole pages."""
    o = a.operands
    return consecutive(a, sum(math.ceil(length / o.page) for length in o.host_lengths[: a.sequence]))


SLOTS: Mapping[str, SlotsRead] = {
    "page table ignored": lambda a: consecutive(a, 0),
    "page table ignored and sequences packed": consecutive_sequences,
    "page table of the first sequence": lambda a: by_table(a.operands, 0, len(a.k)),
    "first page alone": changed(lambda slots, page: slots[:page]),
    "first token left out": changed(lambda slots, page: slots[1:]),
    "last page left out": changed(lambda slots, page: slots[: (len(slots) - 1) // page * page]),
    "page in the middle left out": changed(page_left_out),
    "page read twice in place of the next": changed(page_read_twice),
    "last token left out": changed(lambda slots, page: slots[:-1]),
    "last token counted twice": changed(lambda slots, page: torch.cat([slots, slots[-1:]])),
    "one token too many": lambda a: by_table(a.operands, a.sequence, len(a.k) + 1),
    "tokens of the previous sequence": lambda a: a.operands.token_slots(a.sequence - 1),
    "page numbers in 16 bits with a sign": lambda a: by_table(a.operands, a.sequence, len(a.k), torch.int16),
}
# Mistakes of SLOTS whose errors are near the limit of calls that round to FP8.
SLOTS_IN_FP8 = ("last page left out", "page in the middle left out", "page read twice in place of the next")


def of_slots(slots_read: SlotsRead, output: Wrong) -> Wrong:
    return lambda a: output(read(a.operands, a.sequence, slots_read(a)))


def with_empty_part(parts: list[PartResult]) -> torch.Tensor:
    """A part without tokens has a log-sum of 0 where it should have -inf."""
    log_sum, result = parts[0]
    return combine([*parts, (torch.zeros_like(log_sum), torch.zeros_like(result))])


def unused_slots_weigh_0(a: Attended) -> torch.Tensor:
    """The slots behind the last token, up to the end of the next page, have a weight of 0, but hold NaN."""
    length, page = len(a.k), a.operands.page
    end = (math.ceil(length / page) + 1) * page
    with_unused = read(a.operands, a.sequence, by_table(a.operands, a.sequence, end))
    scores = with_unused.scores
    scores[:, length:] = -math.inf
    return with_unused.by_softmax(scores)


# Wrong query tokens and causal edges, which one query token does not have

Edge = Callable[[Attended, torch.Tensor], torch.Tensor]
"""Maps what is read and query rows, token * heads + head, to the last key that each row sees [rows]."""


def token_edge(a: Attended, token: torch.Tensor) -> torch.Tensor:
    """The last key that each query token should see."""
    return len(a.k) - a.operands.sizes.q + token


def edge(a: Attended, row: torch.Tensor) -> torch.Tensor:
    """The last key that each row should see."""
    return token_edge(a, row // a.operands.heads)


EDGES: Mapping[str, Edge] = {
    "query tokens see all keys": lambda a, row: torch.full_like(row, len(a.k) - 1),
    "all query tokens have the first one's edge": lambda a, row: token_edge(a, torch.zeros_like(row)),
    "causal edge one short": lambda a, row: edge(a, row) - 1,
    "causal edge one long": lambda a, row: edge(a, row) + 1,
    "causal edge one short for one token": lambda a, row: (
        edge(a, row) - (row // a.operands.heads == a.operands.sizes.q // 2).long()
    ),
    "causal edge of a length without the query tokens": lambda a, row: edge(a, row) - a.operands.sizes.q,
    "causal edge of the first sequence": lambda a, row: edge(a, row) - len(a.k) + a.operands.host_lengths[0],
    "causal edge from the top left": lambda a, row: row // a.operands.heads,
    "causal edge by row instead of token": token_edge,
    "causal edge by row modulo q": lambda a, row: token_edge(a, row % a.operands.sizes.q),
    "causal edges in reverse order": lambda a, row: edge(a, row.flip(0)),
    "causal edge of the first row in a tile of 32": lambda a, row: edge(a, row // 32 * 32),
    # All rows see the keys before the last page.
    "causal mask in the last page alone": lambda a, row: edge(a, row).clamp(
        min=(len(a.k) - 1) // a.operands.page * a.operands.page - 1
    ),
}


def of_edge(last_seen: Edge) -> Wrong:
    def wrong(a: Attended) -> torch.Tensor:
        row = torch.arange(len(a.q), device=a.q.device)
        key = torch.arange(len(a.k), device=a.q.device)
        return a.out(seen=key <= last_seen(a, row)[:, None])

    return wrong


def output(a: Attended) -> torch.Tensor:
    """The right output of what is read, [q, heads, width]."""
    return a.out().unflatten(0, a.operands.q.shape[1:3])


def output_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """change: maps the right output [q, heads, 512] to a wrong one of as many values"""
    return lambda a: change(output(a)).reshape(-1, LATENT)


def by_token(source: Callable[[MlaDecodeOperands, int, int], tuple[Attended, int]]) -> Wrong:
    """source: maps (operands, sequence, query token) to what is read, and to the token that is stored"""

    def wrong(a: Attended) -> torch.Tensor:
        outputs = []
        for token in range(a.operands.sizes.q):
            attended, stored_token = source(a.operands, a.sequence, token)
            outputs.append(output(attended)[stored_token])
        return torch.cat(outputs)

    return wrong


def stored_token_major(o: MlaDecodeOperands, i: int, token: int) -> tuple[Attended, int]:
    """The place [i, token] of [batch, q] is taken for a place of [q, batch]."""
    stored_token, sequence = divmod(i * o.sizes.q + token, len(o.q))
    return read(o, sequence), stored_token


def stored_one_early(o: MlaDecodeOperands, i: int, token: int) -> tuple[Attended, int]:
    """The last token of the sequence before is stored once more, over the first one of this sequence."""
    return (read(o, i - 1), -1) if token == 0 else (read(o, i), token)


def repeated_in_turn(o: MlaDecodeOperands, i: int, token: int) -> tuple[Attended, int]:
    """Each query token is made a sequence. For that the list of sequences is repeated as a whole, not each
    sequence by itself, so that a token gets the length and the pages of another sequence."""
    other = (i * o.sizes.q + token) % len(o.q)
    return replace(read(o, other), q=read(o, i).q), token


def of_queries(change: Callable[[MlaDecodeOperands, int], torch.Tensor]) -> Wrong:
    """change: maps (operands, sequence) to other query tokens [q, heads, 576]"""
    return lambda a: a.out(q=change(a.operands, a.sequence).flatten(0, 1).float())


def log_sums_head_major(a: Attended) -> torch.Tensor:
    """Log-sums [parts, rows, 1] are read as if row were head * tokens + token."""
    shape = (a.operands.heads, a.operands.sizes.q)
    wrong = combined(lambda log_sums: log_sums.unflatten(1, shape).transpose(1, 2).flatten(1, 2))
    return wrong(a)


def short_last_part(of_unseen: Callable[[torch.Tensor], tuple[Any, Any]]) -> Wrong:
    """The last part has q - 1 keys at most, so that the first query token sees none of it. of_unseen: maps
    the values of that part to the log-sum and the result that a query row gets which sees none of its keys"""

    def wrong(a: Attended) -> torch.Tensor:
        start = max(1, len(a.k) - a.operands.sizes.q + 1)
        scores = a.scores
        log_sum, result = attend(scores[:, start:], a.v[start:])
        wrong_log_sum, wrong_result = of_unseen(a.v[start:])
        sees_none = log_sum == -math.inf
        log_sum = torch.where(sees_none, wrong_log_sum, log_sum)
        result = torch.where(sees_none, wrong_result, result)
        return combine([attend(scores[:, :start], a.v[:start]), (log_sum, result)])

    return wrong


QUERY_MISTAKES: Mapping[str, Wrong] = {
    **{name: of_edge(last_seen) for name, last_seen in EDGES.items()},
    "query tokens in reverse order": output_tokens(lambda out: out.flip(0)),
    "first query token's answer for all": output_tokens(lambda out: out[:1].expand_as(out)),
    "output stored head-major": output_tokens(lambda out: out.transpose(0, 1)),
    "output stored token-major": by_token(stored_token_major),
    "pad token stored over the first of the next sequence": by_token(stored_one_early),
    "sequences repeated in turn for their query tokens": by_token(repeated_in_turn),
    "last query used for the token before too": of_queries(lambda o, i: put(o.q[i], -2, o.q[i, -1])),
    "queries of sequences start one apart": of_queries(lambda o, i: o.packed[i : i + o.sizes.q]),
    "log-sums read head-major": log_sums_head_major,
    "empty part of an earlier token weighs 1": short_last_part(lambda v: (0.0, 0.0)),
    "empty part of an earlier token weighs its keys evenly": short_last_part(
        lambda v: (math.log2(len(v)), v.mean(0))
    ),
    "empty part of an earlier token gives NaN": short_last_part(lambda v: (math.nan, math.nan)),
}
"""Mistakes with several query tokens. With one query token they are right or have no meaning."""


OWN_MISTAKES: Mapping[str, Wrong] = {
    **{name: of_slots(slots, Attended.out) for name, slots in SLOTS.items()},
    "first token of a part counted in the part before too": lambda a: a.in_parts(combine, overlap=1),
    "empty part with a log-sum of 0": lambda a: a.in_parts(with_empty_part),
    "partial results in FP8": lambda a: a.in_parts(partial(combine, round_results=partial(fp8, E4M3))),
    "unused slots weigh 0 and hold NaN": unused_slots_weigh_0,
    "scale 1/sqrt(576)": output_with(scale=times((192 / 576) ** 0.5)),
    "queries rounded to FP8": output_with(q=partial(fp8, E4M3)),
    "values of the last 512 columns": lambda a: replace(a, v=a.k[:, -LATENT:]).by_softmax(a.scores),
    "cache's scale left out": lambda a: a.out(scale=a.scale / a.operands.kv_scale) / a.operands.kv_scale,
    "cache's scale left out in scores": lambda a: a.out(scale=a.scale / a.operands.kv_scale),
    "cache's scale left out in values": lambda a: a.out() / a.operands.kv_scale,
    "cache read in the other FP8 format": lambda a: read(
        a.operands.replaced(kv=a.operands.kv.view(OTHER_FP8[a.fp8])), a.sequence
    ).out(),
}

# Calls that round q and the softmax weights to FP8 themselves. The first ones are wrong everywhere, because a
# mistake may show only in the average over the whole output.
OWN_FP8_MISTAKES_EVERYWHERE: Mapping[str, Wrong] = {
    "queries in e5m2": in_fp8(query=E5M2),
    "weights up to 2^10 saturated": in_fp8(how=Arithmetic(headroom=10.0)),
}
OWN_FP8_MISTAKES: Mapping[str, Wrong] = {
    "maximum not raised until a weight exceeds 2^20": in_fp8(how=Arithmetic(block=1, lazy=20.0)),
    "cache's scale twice in values": lambda a: a.in_fp8() * a.operands.kv_scale,
    "rope part left out": lambda a: a.in_fp8(q=without(ROPE, a.q)),
    "sums of 5 bits": in_fp8(how=Arithmetic(round_result=partial(truncated_to, 5))),
    **{name: of_slots(SLOTS[name], Attended.in_fp8) for name in SLOTS_IN_FP8},
}


MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION.mistakes({**OWN_MISTAKES, **QUERY_MISTAKES}),
    *ATTENTION.mistakes_in_fp8(OWN_FP8_MISTAKES_EVERYWHERE, {**OWN_FP8_MISTAKES, **QUERY_MISTAKES}),
)


def answers(o: MlaDecodeOperands, rows: list[int], columns: slice) -> Answers:
    of_tokens = QUERY_MISTAKES if o.sizes.q > 1 else {}
    return ATTENTION.answers([read(o, i) for i in rows], {**of_tokens, **OWN_MISTAKES}, columns)
