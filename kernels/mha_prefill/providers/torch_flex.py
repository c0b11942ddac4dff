"""MHA prefill as torch's compiler makes it: flex_attention over all sequences at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.lazy import torch
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import MhaPrefillSizes, takes_bf16
from kernels.op import Call, implementation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows of the mask's blocks, and keys
SHAPES = 256  # one process may compile for so many; beyond torch's default of 8 they would run unfused


def workspace(sizes: MhaPrefillSizes) -> int:
    """The mask's tables, which backward products would read too."""
    blocks = (sizes.queries // BLOCK + 1) * (sizes.keys // BLOCK + 1)
    return sizes.queries * 16 + blocks * 4 * 8


@implementation(
    "torch.compile",
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    available=lambda platform: platform.compiler(),
    per_size=True,
    fits=takes_bf16,
    workspace=workspace,
    scratch=lambda sizes: sizes.queries * sizes.heads * 128 * 2,  # the call's own output
)
def compiled(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = SHAPES
    mask = block_mask(o)
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> None:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (o.q, o.k, o.v))
        with torch.no_grad():
            attended = attend(q, k, v, block_mask=mask, scale=o.scale)
        out.copy_(attended[0].transpose(0, 1))

    return call


def block_mask(operands: MhaPrefillOperands) -> BlockMask:
    """Which blocks of keys a block of query rows sees, wholly or in part; written down and not searched for,
    because a mask of all rows and keys would take gigabytes.

    Query rows that follow each other, of one sequence or several, see keys that follow each other: from the
    first key of the first row's sequence to the last row's own.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first_key, own_key = _key_ranges(operands)
    rows, keys = len(first_key), len(operands.k)
    begin = torch.arange(0, rows, BLOCK, device=first_key.device)
    end = (begin + BLOCK).clamp(max=rows) - 1
    # Blocks [low, high) are seen; of those [full_low, full_high) by every row.
    low, high = first_key[begin] // BLOCK, own_key[end] // BLOCK + 1
    one_sequence = first_key[begin] == first_key[end]
    full_low = -(-first_key[begin] // BLOCK)
    full_high = torch.where(one_sequence, (own_key[begin] + 1) // BLOCK, 0).maximum(full_low)
    block = torch.arange(-(-keys // BLOCK), device=low.device)[None, :]
    full = (block >= full_low[:, None]) & (block < full_high[:, None])
    partial = (block >= low[:, None]) & (block < high[:, None]) & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(first_key, own_key),
        seq_lengths=(rows, keys),
    )


def _key_ranges(operands: MhaPrefillOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every query row the first key that it sees and its own, the last, int64 [T]."""
    first = [torch.full((s.new,), s.keys.start) for s in operands.sequences]
    own = [torch.arange(s.keys.start + s.prefix, s.keys.stop) for s in operands.sequences]
    return torch.cat(first).to(operands.q.device), torch.cat(own).to(operands.q.device)


def _sees(first_key: torch.Tensor, own_key: torch.Tensor) -> Callable[..., torch.Tensor]:
    def sees(batch, head, row, key):
        return (key >= first_key[row]) & (key <= own_key[row])

    return sees


def _listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of rows sees, and which, those first: int32 [1, 1, rows] and
    [1, 1, rows, keys] of a bool [rows, keys]."""
    order = torch.argsort((~seen).int(), dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
