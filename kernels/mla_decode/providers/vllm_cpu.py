"""vLLM's two CPU kernels for MLA decode: the ones it serves DeepSeek with on x86-64 servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import VllmCpu, vllm_operator

if TYPE_CHECKING:
    import torch

VEC = vllm_operator("mla_decode_kvcache", positions=6)
AMX = vllm_operator("decode_attention_cpu", positions=17)


class Bf16Cache(VllmCpu):
    rebinds = True

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}")


class VecMlaDecode(Bf16Cache):
    """`mla_decode_kvcache`, of the backend CPU_MLA: one thread per sequence, page 16 built in."""

    name = "vllm.vec"
    requires = "vLLM's CPU build, AVX-512 with bf16"
    symbols = (VEC,)

    PAGE = 16

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        divides = need(sizes.page % self.PAGE == 0, f"needs a page that is a multiple of {self.PAGE}")
        return Support.all_of(super().fits(sizes), divides)

    def prepare_turn(
        self, first: _VecMlaDecode | None, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> Prepared:
        self.require()
        return _VecMlaDecode(operands, out, first)


class _VecMlaDecode(Prepared):
    """The table is that of `first` where the pages are the same."""

    operands: MlaDecodeOperands

    def __init__(
        self,
        operands: MlaDecodeOperands,
        out: torch.Tensor,
        first: _VecMlaDecode | None,
    ) -> None:
        super().__init__(operands, out)
        if first is not None and operands.same_pages(first.operands):
            self.table: torch.Tensor = first.table
        else:
            self.table = operands.split_pages(VecMlaDecode.PAGE)
        o, kv = operands, operands.kv.view(-1, VecMlaDecode.PAGE, WIDTH)
        self.decode = VEC.bind(out, o.q, kv, o.scale, self.table, o.lengths)

    def call(self) -> None:
        self.decode()


class AmxMlaDecode(Bf16Cache):
    """`decode_attention_cpu` (SGLang's CPU kernel), of the backend AMX_MLA: split over the cache, with
    a combine. Built on oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""

    name = "vllm.amx"
    symbols = (AMX,)
    onednn_isa = "AVX512_CORE_BF16"

    # vllm/v1/attention/backends/mla/amx_mla.py, _compute_num_kv_splits, of vLLM 0.32.
    MIN_WORK_PER_SPLIT = 512
    SPLITS_PER_THREAD = 2

    def splits(self, longest: int, threads: int) -> int:
        ideal = 1
        while ideal < max(1, longest // self.MIN_WORK_PER_SPLIT):
            ideal *= 2
        return min(ideal, threads * self.SPLITS_PER_THREAD)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return sizes.batch * sizes.heads * 64 * (LATENT + 1) * 4 + sizes.tokens * 4

    def prepare_turn(
        self, first: _AmxMlaDecode | None, operands: MlaDecodeOperands, out: torch.Tensor
    ) -> Prepared:
        import torch

        splits = self.splits(max(operands.host_lengths), torch.get_num_threads())
        self.require()
        return _AmxMlaDecode(operands, out, splits, first)


class _AmxMlaDecode(Prepared):
    """The table of rows and the lengths are those of `first` where the pages are the same."""

    operands: MlaDecodeOperands

    def __init__(
        self,
        operands: MlaDecodeOperands,
        out: torch.Tensor,
        splits: int,
        first: _AmxMlaDecode | None,
    ) -> None:
        import torch

        super().__init__(operands, out)
        batch, heads = operands.q.shape[:2]
        kv = operands.kv.view(-1, 1, WIDTH)
        partial = torch.zeros(batch, heads, splits, LATENT + 1)
        self.rows: torch.Tensor
        self.requests: torch.Tensor
        self.lengths: torch.Tensor
        if first is not None and operands.same_pages(first.operands):
            self.rows, self.requests, self.lengths = first.rows, first.requests, first.lengths
        else:
            self.rows, self.requests = operands.split_pages(1), torch.arange(batch)
            self.lengths = operands.lengths.long()
        self.decode = AMX.bind(
            operands.q,
            kv,
            kv[..., :LATENT],
            out,
            None,
            None,
            None,
            partial,
            self.rows,
            self.requests,
            self.lengths,
            operands.scale,
            0.0,
            False,
            0,
            None,
            None,
        )

    def call(self) -> None:
        self.decode()
