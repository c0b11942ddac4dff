"""Plan of split-KV MLA decode: the sequences in parts of nearly equal size, one for each program."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT

# The least tokens of a part for each of its heads: to write and read the partial result of a head moves about
# as many bytes as to read so many tokens.
LEAST_TOKENS_PER_HEAD = 4
# Sequences are split where the longest one is at least so many times as long as a part: else the second pass,
# which combines the parts, takes longer than it saves.
LEAST_GAIN = 1.25


class Part(NamedTuple):
    sequence: int
    start: int  # its first token
    end: int  # behind its last token
    slot: int  # of its partial result; -1 where the part is the whole sequence


class SplitSequence(NamedTuple):
    sequence: int
    first_slot: int
    slots: int


@dataclass(frozen=True)
class SplitPlan:
    parts: tuple[Part, ...]  # the longest first
    split: tuple[SplitSequence, ...]

    def buffers(self, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for partial results, fp32: values [slots, heads, 512] and log-sums [slots, heads]."""
        slots = max(1, sum(sequence.slots for sequence in self.split))  # 1: kernels want an element
        log_sums = torch.empty(slots, heads, dtype=torch.float32, device=device)
        return torch.empty(*log_sums.shape, LATENT, dtype=torch.float32, device=device), log_sums


@functools.lru_cache(4096)
def plan(lengths: tuple[int, ...], step: int, programs: int, least_tokens: int) -> SplitPlan:
    """The plan for about so many programs, which take `step` tokens at a time.

    There is a limit of the length of parts, which is `least_tokens` or more. A longer sequence is cut into as
    few parts as the limit allows. These differ by one step at most."""
    steps = [math.ceil(length / step) for length in lengths]
    limit = _limit(steps, programs, math.ceil(least_tokens / step))
    parts, split, slots = [], [], 0
    for sequence, (length, count) in enumerate(zip(lengths, steps, strict=True)):
        cuts = math.ceil(count / limit)
        if cuts == 1:
            parts.append(Part(sequence, 0, length, -1))
            continue
        bounds = [count * i // cuts * step for i in range(cuts)] + [length]
        parts += [Part(sequence, bounds[i], bounds[i + 1], slots + i) for i in range(cuts)]
        split.append(SplitSequence(sequence, slots, cuts))
        slots += cuts
    return SplitPlan(tuple(sorted(parts, key=lambda part: part.start - part.end)), tuple(split))


def _limit(steps: Sequence[int], programs: int, least: int) -> int:
    """The most steps that a part may have. With fewer sequences than programs it is the smallest limit with
    which there are no more parts than programs. Otherwise it is the steps that a program takes on average, so
    that no sequence outlasts the others. Where splitting gains too little it is the longest sequence.

    steps: of each sequence; least: the smallest limit"""
    average = max(least, math.ceil(sum(steps) / programs))
    longest = max(average, *steps)

    def fits(candidate: int) -> bool:
        return sum(math.ceil(count / candidate) for count in steps) <= programs

    limit = average
    if len(steps) < programs:
        # Larger parts are fewer: from the first candidate that fits on, all fit.
        limit += bisect.bisect_left(range(average, longest), True, key=fits)
    return limit if limit * LEAST_GAIN < longest else longest
