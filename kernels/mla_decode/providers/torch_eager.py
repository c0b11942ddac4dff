"""MLA decode in plain torch: what one writes first, what torch does best, what its compiler makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import KV_BYTES, LATENT, WIDTH, MlaDecodeSizes
from kernels.op import Implementation, Prepared
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch


class _PaddedMlaDecode(Prepared):
    """Gathers the paged cache into [batch, longest, 576]; places past a length repeat the first token,
    whose value is finite, and are masked. Both tables are those of `first` where the pages are the same."""

    operands: MlaDecodeOperands

    def __init__(
        self, operands: MlaDecodeOperands, out: torch.Tensor, first: _PaddedMlaDecode | None = None
    ) -> None:
        import torch

        super().__init__(operands, out)
        self.slots: torch.Tensor
        self.valid: torch.Tensor
        if first is not None and operands.same_pages(first.operands):
            self.slots, self.valid = first.slots, first.valid
            return
        slots = [operands.token_slots(i) for i in range(len(operands.host_lengths))]
        self.slots = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        position = torch.arange(self.slots.shape[1], device=self.slots.device)
        self.valid = position[None, :] < operands.lengths[:, None]
        self.slots = torch.where(self.valid, self.slots, self.slots[:, :1])


def _attend(
    q: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor, scale: float, kv_scale: float
) -> torch.Tensor:
    """The obvious code: gather, product, mask, softmax, product, all in fp32."""
    rows = kv.view(-1, WIDTH)[slots].float() * kv_scale
    scores = q.float() @ rows.transpose(1, 2) * scale
    scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
    return scores.softmax(-1) @ rows[..., :LATENT]


class _Attend(_PaddedMlaDecode):
    function = staticmethod(_attend)

    def call(self) -> None:
        o = self.operands
        self.out.copy_(self.function(o.q, o.kv, self.slots, self.valid, o.scale, o.kv_scale))


class _TorchMlaDecode(Implementation):
    requires = "torch"

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """The tables of places in the cache."""
        return sizes.batch * max(sizes.lengths()) * (8 + 1)

    def scratch(self, sizes: MlaDecodeSizes) -> int:
        return sizes.batch * max(sizes.lengths()) * (WIDTH * (4 + 4 + 2) + sizes.heads * 4 * 4)


class NaiveMlaDecode(_TorchMlaDecode):
    name = "torch.naive"
    rebinds = True

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _Attend(operands, out)

    def prepare_turn(self, first: Prepared, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        if type(first) is not _Attend:  # what a subclass prepared is its own
            return self.prepare(operands, out)
        return _Attend(operands, out, first)


class CompiledMlaDecode(_TorchMlaDecode):
    name = "torch.compile"
    per_size = True
    requires = "torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.compiler())

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        import torch

        prepared = _Attend(operands, out)
        prepared.function = torch.compile(_attend, dynamic=False)
        return prepared


class _SdpaMlaDecode(_PaddedMlaDecode):
    """One scaled_dot_product_attention for the batch. Heads stand as the query rows of one head, so
    that the cache is read once and not once per head; the value keeps all 576 columns, because the
    flash kernels want one head size, and the last 64 are dropped."""

    def __init__(
        self, operands: MlaDecodeOperands, out: torch.Tensor, first: _SdpaMlaDecode | None = None
    ) -> None:
        super().__init__(operands, out, first)
        self.rows: torch.Tensor
        # One buffer serves the calls on all sets, as one serves all layers of an engine.
        if first is not None and first.slots.shape == self.slots.shape:
            self.rows = first.rows
        else:
            self.rows = operands.kv.new_empty(*self.slots.shape, WIDTH)

    def call(self) -> None:
        import torch

        o, rows = self.operands, self.rows
        # Into a buffer that is there already: faulting in fresh memory costs more than the copy.
        torch.index_select(o.kv.view(-1, WIDTH), 0, self.slots.flatten(), out=rows.view(-1, WIDTH))
        if o.kv_scale != 1.0:
            rows = (rows.float() * o.kv_scale).bfloat16()
        rows = rows[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            o.q[:, None], rows, rows, attn_mask=self.valid[:, None, None, :], scale=o.scale
        )
        self.out.copy_(attended[:, 0, :, :LATENT])


class SdpaMlaDecode(_TorchMlaDecode):
    name = "torch.sdpa"

    def scratch(self, sizes: MlaDecodeSizes) -> int:
        """The gathered rows, which all sets share; of an FP8 cache in fp32 and bf16, too."""
        slots = sizes.batch * max(sizes.lengths())
        return slots * WIDTH * (KV_BYTES[sizes.kv] + (6 if sizes.kv == "fp8" else 0))

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _SdpaMlaDecode(operands, out)

    def prepare_turn(self, first: _SdpaMlaDecode, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _SdpaMlaDecode(operands, out, first)
