"""Plan of split-KV MLA decode: parts of nearly equal size for each program, the longest first."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT

WORTH_OF_HEAD = 4  # tokens of about as many bytes as a head's partial result, written and read again
WORTH = 1.25  # a second pass pays where the longest sequence is so much longer than a part


@dataclass(frozen=True)
class SplitPlan:
    # (sequence, first token, end, slot of the result); slot -1: the part is the whole sequence.
    parts: tuple[tuple[int, int, int, int], ...]
    # (sequence, first slot, number of slots) of each sequence that is split.
    split: tuple[tuple[int, int, int], ...]

    def buffers(self, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for what parts find, at least one slot, fp32: values [slots, heads, 512] and log-sums [slots,
        heads]."""
        log_sums = torch.empty(max(1, self.slots), heads, dtype=torch.float32, device=device)
        return torch.empty(*log_sums.shape, LATENT, dtype=torch.float32, device=device), log_sums

    @property
    def slots(self) -> int:
        return sum(count for *_, count in self.split)


@functools.lru_cache(4096)
def plan(lengths: tuple[int, ...], tokens: int, programs: int, least: int) -> SplitPlan:
    """The plan for about so many programs, in steps of `tokens` tokens, with at least `least` in each part.

    A sequence that is longer than a part is cut into parts that begin at a step and differ by one step at
    most.
    """
    steps = [math.ceil(length / tokens) for length in lengths]
    most = _most_steps(steps, programs, math.ceil(least / tokens))
    parts, split, slots = [], [], 0
    for sequence, (length, count) in enumerate(zip(lengths, steps, strict=True)):
        cuts = math.ceil(count / most)
        if cuts == 1:
            parts.append((sequence, 0, length, -1))
            continue
        bounds = [*(count * i // cuts * tokens for i in range(cuts)), length]
        parts += [(sequence, bounds[i], bounds[i + 1], slots + i) for i in range(cuts)]
        split.append((sequence, slots, cuts))
        slots += cuts
    return SplitPlan(tuple(sorted(parts, key=lambda part: part[1] - part[2])), tuple(split))


def _most_steps(steps: Sequence[int], programs: int, least: int) -> int:
    """The most steps of a part: the fewest with which there are no more parts than programs. Where there are
    more sequences than programs, as many as a program takes on average, so that no sequence outlasts the
    others."""
    low = max(least, math.ceil(sum(steps) / programs))
    longest = max(low, *steps)
    if len(steps) < programs:
        # The number of parts falls as they grow.
        low += bisect.bisect_left(
            range(low, longest), -programs, key=lambda most: -sum(math.ceil(count / most) for count in steps)
        )
    return low if low * WORTH < longest else longest
