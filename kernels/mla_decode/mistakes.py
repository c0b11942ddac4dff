"""Kernels of MLA decode that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one sequence: the longest one behind the first.
"""

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
    """What is read for a sequence, whose number is i; right by default. slots: the rows of the cache that are
    read for its tokens, int64 [n]"""
    if slots is None:
        slots = o.token_slots(i)
    kv = o.kv.view(-1, WIDTH)[slots].float() * o.kv_scale
    q = o.q[i].flatten(0, 1).float()
    hidden = o.hidden(len(kv))
    seen = None if hidden is None else ~hidden
    return Attended(o, i, i, q, kv, kv[:, :LATENT], o.scale, o.kv.dtype, evenly(len(kv), 4), seen)


ATTENTION = AttentionOp(
    sequences=lambda o: [*range(len(o.host_lengths))],
    victim=lambda o: max([*range(1, len(o.host_lengths))] or [0], key=o.host_lengths.__getitem__),
    read=read,
)


# Wrong tokens, pages and page tables

Slots = Callable[[Attended], torch.Tensor]  # returns the rows of the cache that are read, int64 [n]


def taken(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Slots:
    """change: (right slots [length], size of a page) -> other slots."""
    return lambda a: change(a.operands.token_slots(a.sequence), a.operands.page)


def page_left_out(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return torch.cat([slots[:start], slots[start + page :]])


def page_read_twice(slots: torch.Tensor, page: int) -> torch.Tensor:
    start = len(slots) // 2 // page * page
    return put(slots, slice(start, start + page), slots[start - page : start][: len(slots) - start])


def by_table(a: Attended, more: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The slots that the page table gives for a sequence's tokens, with page numbers cast to dtype. more: how
    many tokens behind the last one are added"""
    o = a.operands
    i = a.sequence
    token = torch.arange(min(o.host_lengths[i] + more, o.page_table.shape[1] * o.page), device=o.q.device)
    page = o.page_table[i, token // o.page].to(dtype).long()
    return page % len(o.kv) * o.page + token % o.page


def in_a_row(a: Attended, page: int) -> torch.Tensor:
    """The rows of the cache from the start of a page."""
    start = page * a.operands.page
    return torch.arange(start, start + len(a.k), device=a.k.device) % a.operands.kv[..., 0].numel()


SLOTS: Mapping[str, Slots] = {
    "page table ignored": lambda a: in_a_row(a, 0),
    "page table ignored and sequences packed": lambda a: in_a_row(
        a, sum(-(-n // a.operands.page) for n in a.operands.host_lengths[: a.sequence])
    ),
    "page table of the first sequence": lambda a: by_table(
        replace(a, sequence=0), more=len(a.k) - a.operands.host_lengths[0]
    ),
    "first page alone": taken(lambda t, page: t[:page]),
    "first token left out": taken(lambda t, page: t[1:]),
    "last page left out": taken(lambda t, page: t[: (len(t) - 1) // page * page]),
    "page in the middle left out": taken(page_left_out),
    "page read twice in place of the next": taken(page_read_twice),
    "last token left out": taken(lambda t, page: t[:-1]),
    "last token counted twice": taken(lambda t, page: torch.cat([t, t[-1:]])),
    "one token too many": partial(by_table, more=1),
    "tokens of the previous sequence": lambda a: a.operands.token_slots(a.sequence - 1),
    "page numbers in 16 bits with a sign": partial(by_table, dtype=torch.int16),
}
# Mistakes of SLOTS whose errors are near the limit of calls that round to FP8.
SLOTS_IN_FP8 = ("last page left out", "page in the middle left out", "page read twice in place of the next")


def of_slots(slots: Slots, call: Callable[[Attended], torch.Tensor]) -> Wrong:
    return lambda a: call(read(a.operands, a.sequence, slots(a)))


def with_empty_part(parts: list[PartResult]) -> torch.Tensor:
    """A part without tokens has a log-sum of 0 where it should have -inf."""
    log, result = parts[0]
    return combine([*parts, (torch.zeros_like(log), torch.zeros_like(result))])


def unused_slots_weigh_0(a: Attended) -> torch.Tensor:
    """The slots behind the last token have a weight of 0, but they hold NaN."""
    length = len(a.k)
    page = a.operands.page
    more = read(a.operands, a.sequence, by_table(a, more=2 * page - 1 - (length - 1) % page))
    scores = more.scores
    scores[:, length:] = -math.inf
    return more.by_softmax(scores)


# Wrong query tokens and causal edges, which one query token does not have

# (what is read, query rows = token * heads + head) -> the last key that each row sees, int64 [rows].
Edge = Callable[[Attended, torch.Tensor], torch.Tensor]


def edge(a: Attended, row: torch.Tensor) -> torch.Tensor:
    return len(a.k) - a.operands.sizes.q + row // a.operands.heads


EDGES: Mapping[str, Edge] = {
    "query tokens see all keys": lambda a, row: len(a.k) + 0 * row,
    "all query tokens have the first one's edge": lambda a, row: edge(a, 0 * row),
    "causal edge one short": lambda a, row: edge(a, row) - 1,
    "causal edge one long": lambda a, row: edge(a, row) + 1,
    "causal edge one short for one token": lambda a, row: (
        edge(a, row) - (row // a.operands.heads == a.operands.sizes.q // 2).long()
    ),
    "causal edge of a length without the query tokens": lambda a, row: edge(a, row) - a.operands.sizes.q,
    "causal edge of the first sequence": lambda a, row: edge(a, row) - len(a.k) + a.operands.host_lengths[0],
    "causal edge from the top left": lambda a, row: row // a.operands.heads,
    "causal edge by row instead of token": lambda a, row: edge(a, row * a.operands.heads),
    "causal edge by row modulo q": lambda a, row: edge(a, row % a.operands.sizes.q * a.operands.heads),
    "causal edges in reverse order": lambda a, row: edge(a, row.flip(0)),
    "causal edge of the first row in a tile of 32": lambda a, row: edge(a, row // 32 * 32),
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
    """change: maps the right output to a wrong one of as many values"""
    return lambda a: change(output(a)).reshape(-1, LATENT)


def by_token(source: Callable[[MlaDecodeOperands, int, int], tuple[Attended, int]]) -> Wrong:
    """source: (operands, sequence, query token) -> what is read, and the token of that whose output this
    query token gets"""

    def wrong(a: Attended) -> torch.Tensor:
        sources = (source(a.operands, a.sequence, token) for token in range(a.operands.sizes.q))
        return torch.cat([output(attended)[other_token] for attended, other_token in sources])

    return wrong


def stored_token_major(o: MlaDecodeOperands, i: int, token: int) -> tuple[Attended, int]:
    other_token, sequence = divmod(i * o.sizes.q + token, len(o.q))
    return read(o, sequence), other_token


def repeated_in_turn(o: MlaDecodeOperands, i: int, token: int) -> tuple[Attended, int]:
    """Each query token is made a sequence, which has the length and the pages of another one."""
    return replace(read(o, (i * o.sizes.q + token) % len(o.q)), q=read(o, i).q), token


def of_queries(change: Callable[[MlaDecodeOperands, int], torch.Tensor]) -> Wrong:
    """change: (operands, sequence) -> other query tokens [q, heads, 576]"""
    return lambda a: a.out(q=change(a.operands, a.sequence).flatten(0, 1).float())


def log_sums_head_major(a: Attended) -> torch.Tensor:
    o = a.operands
    return combined(lambda logs: logs.unflatten(1, (o.heads, o.sizes.q)).transpose(1, 2).flatten(1, 2))(a)


def short_last_part(empty: Callable[[torch.Tensor], tuple[Any, Any]]) -> Wrong:
    """The last part has q - 1 keys at most, so that the first query token sees none of it. empty: maps the
    part's values to the log-sum and the result that a query row gets which sees none of them"""

    def wrong(a: Attended) -> torch.Tensor:
        start = max(1, len(a.k) - a.operands.sizes.q + 1)
        scores = a.scores
        log_sum, result = attend(scores[:, start:], a.v[start:])
        wrong_log_sum, wrong_result = empty(a.v[start:])
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
    "pad token stored over the first of the next sequence": by_token(
        lambda o, i, token: (read(o, i), token) if token else (read(o, i - 1), -1)
    ),
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

OWN_FP8_MISTAKES_EVERYWHERE: Mapping[str, Wrong] = {
    "queries in e5m2": in_fp8(query=E5M2),
    "weights up to 2^10 saturated": in_fp8(how=Arithmetic(headroom=10.0)),
}
OWN_FP8_MISTAKES: Mapping[str, Wrong] = {
    "maximum kept until 2^20 above it": in_fp8(how=Arithmetic(block=1, lazy=20.0)),
    "cache's scale twice in values": lambda a: a.in_fp8() * a.operands.kv_scale,
    "rope part left out": lambda a: a.in_fp8(q=without(ROPE, a.q)),
    "sums of 5 bits": in_fp8(how=Arithmetic(round_result=partial(truncated_to, 5))),
    **{name: of_slots(SLOTS[name], Attended.in_fp8) for name in SLOTS_IN_FP8},
}
"""Calls that round q and the softmax weights to FP8 themselves."""


MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION.mistakes({**OWN_MISTAKES, **QUERY_MISTAKES}),
    *ATTENTION.mistakes_in_fp8(OWN_FP8_MISTAKES_EVERYWHERE, {**OWN_FP8_MISTAKES, **QUERY_MISTAKES}),
)


def answers(o: MlaDecodeOperands, rows: list[int], columns: slice) -> Answers:
    of_tokens = QUERY_MISTAKES if o.sizes.q > 1 else {}
    return ATTENTION.answers([read(o, i) for i in rows], {**of_tokens, **OWN_MISTAKES}, columns)
