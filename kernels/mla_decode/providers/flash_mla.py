"""DeepSeek's FlashMLA, dense decode on Hopper.

Sources: flash_mla/flash_mla_interface.py and csrc/api/dense_decode.h of deepseek-ai/FlashMLA at 9241ae3
(2026-04), and at 01a2772 (2025-04) and 42f3c57 (2025-09), when the metadata was made by its own call;
SGLang's sgl-kernel/python/sgl_kernel/flash_mla.py at 176ee5c, of the form of 2025-09. FlashMLA
is always version 1.0.0: the functions tell which it is. It fills values past the end with zeros itself
(fill_oob_V in csrc/sm90/decode/dense/splitkv_mla.cuh). Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import find, keywords
from kernels.mla_decode.compute_units import HOPPER_UNITS
from kernels.mla_decode.layouts import OneToken, full_pages, one_head, one_token, pages_of
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, MlaDecodeSizes
from kernels.op import Prepared
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.vendor import Vendor

if TYPE_CHECKING:
    import torch

PAGE = 64
MODULES = ("flash_mla", "sgl_kernel.flash_mla")


class FlashMla(Vendor):
    name = "flashmla"
    library = "flash_mla"
    requires = "FlashMLA (from source, 2025-04 or later), or an sgl-kernel that has it; sm_90"
    runtime = "flash_mla"
    install = "build github.com/deepseek-ai/FlashMLA with CUDA"
    kinds = ("cuda",)
    archs = ("sm_90",)
    allocates = True

    def installed(self, platform: Platform) -> Support:
        """By itself, or as a part of sgl-kernel."""
        return Support(True) if platform.library("sgl_kernel").ok else super().installed(platform)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.kv == "bf16", f"takes a bf16 cache in dense decode, not {sizes.kv}"),
            need(sizes.page % PAGE == 0, f"needs a page that is a multiple of {PAGE}"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results of all parts, fp32; the table; the answer."""
        rows = (sizes.batch + HOPPER_UNITS) * sizes.heads
        table = sizes.batch * max(sizes.lengths()) // PAGE * 4
        return rows * (LATENT + 1) * 4 + table

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _FlashMla(operands)


class _FlashMla(OneToken):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands)
        self.decode = find(*(f"{module}.flash_mla_with_kvcache" for module in MODULES))
        tiles, splits = schedule(operands)
        needed = {
            "q": one_token(operands.q),
            "k_cache": one_head(pages_of(operands.kv, PAGE)),
            "block_table": full_pages(operands, PAGE),
            "cache_seqlens": operands.lengths,
            "head_dim_v": LATENT,
            "tile_scheduler_metadata": tiles,
            "num_splits": splits,
            "softmax_scale": operands.scale,
            "causal": False,
        }
        self.arguments = keywords(self.decode, needed)

    def call(self) -> None:
        self.answer, _ = self.decode(**self.arguments)


def schedule(operands: MlaDecodeOperands) -> tuple[object, object]:
    """What get_mla_metadata gives: the schedule and its splits; or, since 2026-01, an empty one that the
    first call fills, which is not timed, and None. The older forms differ in the name of their second
    argument, the newer one ignores all: they go by position."""
    heads = operands.q.shape[1]
    metadata = find(*(f"{module}.get_mla_metadata" for module in MODULES))
    return metadata(operands.lengths, heads, 1)
