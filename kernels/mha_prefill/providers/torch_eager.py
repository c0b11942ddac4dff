"""MHA prefill in plain torch: the obvious code, one sequence after the other."""

from __future__ import annotations

from kernels.lazy import torch
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes
from kernels.op import Call, implementation

ROWS = 256  # query rows at once: all heads' scores of a whole sequence would not fit


def scratch(sizes: MhaPrefillSizes) -> int:
    longest = max(prefix + new for prefix, new in sizes.lengths())
    row = longest + 2 * WIDTH + 2 * VALUE
    return 4 * sizes.heads * (longest * (WIDTH + VALUE) * 2 + 3 * ROWS * row)


@implementation("torch.naive", requires="torch", rebinds=True, scratch=scratch)
def naive(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    import torch

    def call() -> None:
        for sequence in o.sequences:
            k = o.k[sequence.keys].float().transpose(0, 1)
            v = o.v[sequence.keys].float().mul_(o.value_scale).transpose(0, 1)
            key = torch.arange(sequence.length, device=k.device)
            for first in range(0, sequence.new, ROWS):
                begin = sequence.queries.start + first
                rows = slice(begin, min(begin + ROWS, sequence.queries.stop))
                position = sequence.prefix + first + key[: rows.stop - rows.start, None]
                q = o.q[rows].float().transpose(0, 1)
                out[rows] = attend(q, k, v, key > position, o.score_scale).transpose(0, 1)

    return call


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """[heads, rows, 128] of q [heads, rows, 192], k [heads, keys, 192], v [heads, keys, 128], all fp32, with
    hidden [rows, keys] true where the mask hides a key: product, mask, softmax, product."""
    scores = q @ k.transpose(1, 2) * scale
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
