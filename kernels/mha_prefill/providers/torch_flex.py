"""MHA prefill as torch's compiler makes it: flex_attention over all sequences at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import MhaPrefillSizes, takes
from kernels.op import Implementation, Prepared
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows of the mask's blocks, and keys
SHAPES = 256  # that one process may compile for; torch's default is 8, and further ones would run unfused


class _CompiledPrefill(Prepared):
    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(operands, out)
        torch._dynamo.config.recompile_limit = SHAPES
        self.mask = block_mask(operands)
        self.attend = torch.compile(flex_attention, dynamic=False)

    def call(self) -> None:
        import torch

        o = self.operands
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (o.q, o.k, o.v))
        with torch.no_grad():
            attended = self.attend(q, k, v, block_mask=self.mask, scale=o.scale)
        self.out.copy_(attended[0].transpose(0, 1))


def block_mask(operands: MhaPrefillOperands) -> BlockMask:
    """Which blocks of keys a block of query rows sees, wholly or in part; written down and not searched for,
    because a mask of all rows and keys would take gigabytes.

    Query rows that follow each other, of one sequence or several, see keys that follow each other: from the
    first key of the first row's sequence to the last row's own.
    """
    import torch
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
    import torch

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
    import torch

    order = torch.argsort((~seen).int(), dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


class Compile(Implementation):
    name = "torch.compile"
    per_size = True
    requires = "torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.compiler())

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, "bf16")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """The mask's tables, which backward products would read too."""
        blocks = (sizes.queries // BLOCK + 1) * (sizes.keys // BLOCK + 1)
        return sizes.queries * 16 + blocks * 4 * 8

    def scratch(self, sizes: MhaPrefillSizes) -> int:
        """The call's own output."""
        return sizes.queries * sizes.heads * 128 * 2

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _CompiledPrefill(operands, out)
