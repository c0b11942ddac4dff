"""DeepSeek's FlashMLA, dense decode on Hopper, by itself and as vLLM ships it.

Sources: flash_mla/flash_mla_interface.py and csrc/api/dense_decode.h of deepseek-ai/FlashMLA at 9241ae3
(2026-04), and at 01a2772 (2025-04) and 42f3c57 (2025-09), when the metadata was made by its own call;
flash_mla/flash_mla_interface.py of sgl-flash-mla 1.0.0, which SGLang 0.5.23 requires, with how its
kernels/ops/attention/flash_mla_interface.py calls it; third_party/flashmla/flash_mla_interface.py and
v1/attention/ops/flashmla.py of vLLM 0.33, with how its v1/attention/backends/mla/flashmla.py calls them.
FlashMLA is always version 1.0.0: the functions tell which it is. It fills values past the end with zeros
itself (fill_oob_V in csrc/sm90/decode/dense/splitkv_mla.cuh). `flashmla` ran on
an H100 and an H200; as vLLM ships it, it is untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.binding import Function, Taken
from kernels.mla_decode.compute_units import HOPPER_UNITS
from kernels.mla_decode.layouts import OneToken, full_pages, one_head, one_token, pages_of, query_buffer
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need
from kernels.vendor import Vendor, Vllm

if TYPE_CHECKING:
    import torch

PAGE = 64
Q_SCALE = 1.0
"""Of a query in FP8, static as in engines."""

ARGUMENTS = (
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal"
)
SCALES = "descale_q descale_k"

# sgl-flash-mla keeps dense decode as a kernel of before 2026-09, which it must be asked for.
DECODE = Function(
    "flash_mla.flash_mla_with_kvcache", needs=ARGUMENTS, wishes=f"use_legacy is_fp8_kvcache {SCALES}"
)
METADATA = Function("flash_mla.get_mla_metadata", positions=3)
METADATA_FP8 = Function(
    "flash_mla.get_mla_decoding_metadata",
    positions=3,
    needs="is_fp8_kvcache use_legacy",
    when="kv=fp8, with sgl-flash-mla",
)
VLLM = "vllm.third_party.flashmla.flash_mla_interface"
VLLM_OPS = "vllm.v1.attention.ops.flashmla"
VLLM_DECODE = Function(f"{VLLM}.flash_mla_with_kvcache", needs=ARGUMENTS)
VLLM_DECODE_FP8 = Function(
    f"{VLLM_OPS}.flash_mla_with_kvcache_fp8", needs=f"{ARGUMENTS} {SCALES}", when="kv=fp8"
)
VLLM_METADATA = Function(f"{VLLM}.get_mla_metadata", positions=3)
VLLM_METADATA_FP8 = Function(f"{VLLM_OPS}.get_mla_metadata_dense_fp8", positions=3, when="kv=fp8")


class FlashMla(Vendor):
    """What SGLang runs too, whose requirement sgl-flash-mla is: an FP8 cache is taken by that alone. On an
    FP8 cache the call rounds q to FP8 first, which engines fuse into the kernel before."""

    name = "flashmla"
    library = "flash_mla"
    requires = "FlashMLA (from source, 2025-04 or later) or sgl-flash-mla, which an FP8 cache needs; sm_90"
    runtime = "flash_mla"
    install = (
        "pip install --no-deps sgl-flash-mla (1.0.0 asks for torch 2.14.1 and loads beside 2.11 too), or "
        "build github.com/deepseek-ai/FlashMLA with CUDA"
    )
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    archs = ("sm_90",)
    activations = "fp8"
    allocates = True
    symbols: ClassVar[Sequence[Taken]] = (DECODE, METADATA)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(sizes.page % PAGE == 0, f"needs a page that is a multiple of {PAGE}")

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results of all parts, fp32; the table; q in FP8."""
        rows = (sizes.batch + HOPPER_UNITS) * sizes.heads
        table = sizes.batch * max(sizes.lengths()) // PAGE * 4
        return rows * (LATENT + 1) * 4 + table + sizes.batch * sizes.heads * (LATENT + ROPE)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _FlashMla(operands)


class FlashMlaOfVllm(FlashMla, Vllm):
    """The build that vLLM carries, whose FP8 kernel is another function."""

    name = "flashmla@vllm"
    library = "vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90"
    runtime = "vllm"
    install = Vllm.install
    kinds = ("cuda",)
    symbols = (VLLM_DECODE, VLLM_METADATA, VLLM_DECODE_FP8, VLLM_METADATA_FP8)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _FlashMlaOfVllm(operands)


class _FlashMla(OneToken):
    operands: MlaDecodeOperands

    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands)
        self.query = query_buffer(operands)
        self.is_fp8 = operands.kv.element_size() == 1
        tiles, splits = self.schedule(operands.lengths, operands.q.shape[1])
        self.decode = self.bind(
            q=one_token(self.query),
            k_cache=one_head(pages_of(operands.kv, PAGE)),
            block_table=full_pages(operands, PAGE),
            cache_seqlens=operands.lengths,
            head_dim_v=LATENT,
            tile_scheduler_metadata=tiles,
            num_splits=splits,
            softmax_scale=operands.scale,
            causal=False,
        )

    def schedule(self, lengths: torch.Tensor, heads: int) -> tuple[object, object]:
        """The schedule and its splits; or, since 2026-01, an empty schedule that the first call fills, which
        is not timed, and None. The older forms differ in the name of their second argument, the newer ones
        ignore all: they go by position."""
        schedule, splits = METADATA.bind(lengths, heads, 1)()
        if self.is_fp8:
            if not DECODE.takes("descale_k"):
                raise Unsupported("this flash_mla has no dense decode on an FP8 cache; sgl-flash-mla has")
            filled = METADATA_FP8.bind(lengths, heads, 1, is_fp8_kvcache=True, use_legacy=True)()
            schedule.tile_scheduler_metadata, schedule.num_splits = filled
        return schedule, splits

    def bind(self, **arguments: object) -> Callable[[], Any]:
        of_fp8 = {"is_fp8_kvcache": True, **self.scales()} if self.is_fp8 else {}
        return DECODE.bind(**arguments, **of_fp8, use_legacy=True)

    def scales(self) -> dict[str, torch.Tensor]:
        """fp32 [1] each."""
        import torch

        kv = self.operands.kv
        named = {"descale_q": Q_SCALE, "descale_k": self.operands.kv_scale}
        return {name: torch.full((1,), scale, device=kv.device) for name, scale in named.items()}

    def call(self) -> None:
        if self.query is not self.operands.q:
            self.query.copy_(self.operands.q)
        self.answer, _ = self.decode()


class _FlashMlaOfVllm(_FlashMla):
    def schedule(self, lengths: torch.Tensor, heads: int) -> tuple[object, object]:
        metadata = VLLM_METADATA_FP8 if self.is_fp8 else VLLM_METADATA
        schedule, splits = metadata.bind(lengths, heads, 1)()
        return schedule, splits

    def bind(self, **arguments: object) -> Callable[[], Any]:
        if self.is_fp8:
            return VLLM_DECODE_FP8.bind(**arguments, **self.scales())
        return VLLM_DECODE.bind(**arguments)
