"""AITER's MLA decode on AMD GPUs: its assembly kernels, as vLLM and SGLang call them.

Sources: aiter/mla.py, aiter/ops/attention.py, csrc/py_itfs_cu/asm_mla.cu and hsa/*/mla/mla_asm.csv of
ROCm/aiter at e404860 (2026-08), the Python of its tags v0.1.4 to v0.1.20.post1; for how an engine calls them
v1/attention/backends/mla/rocm_aiter_mla.py of vLLM 0.32. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import find, keywords
from kernels.mla_decode.compute_units import MOST_UNITS
from kernels.mla_decode.layouts import (
    SLACK,
    last_page_lengths,
    one_head,
    page_list,
    page_starts,
    pages_of,
    query_buffer,
    query_starts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import Aiter

if TYPE_CHECKING:
    import torch

# What the assembly kernels take, one query token a sequence. A query on an FP8 cache is FP8 too.
HEADS = {"bf16": (8, 16, 32, 64, 128), "fp8": (8, 16, 128)}

Q_SCALE = 1.0
"""Of a query in FP8, static as in engines: theirs unless a checkpoint brings another. The widest values of
q lie near 30, a tenth of what either format holds."""


class AsmMlaDecode(Aiter):
    """`mla_decode_fwd` without metadata: the sequence is split evenly, a Triton kernel combines. On an FP8
    cache the call rounds q to FP8 first, which engines fuse into the kernel before."""

    name = "aiter.asm"
    requires = "AITER 0.1.4 or later (0.1.8 for an FP8 cache), gfx942 or gfx950"
    activations = "fp8"

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        takes = HEADS[sizes.kv]
        return need(sizes.heads in takes, f"takes {', '.join(map(str, takes))} heads with kv={sizes.kv}")

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return (sizes.tokens + SLACK) * 4

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        splits = 16  # the most that get_meta_param chooses
        rows = sizes.batch * sizes.heads
        return rows * splits * (LATENT + 1) * 4 + rows * (LATENT + ROPE)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _Asm(operands, out)


class _Asm(Prepared):
    operands: MlaDecodeOperands

    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.decode = find("aiter.mla.mla_decode_fwd")
        self.query = query_buffer(operands)
        layout = token_pages(operands)
        needed = {
            "q": self.query,
            "kv_buffer": one_token_pages(operands.kv),
            "o": out,
            **layout,
            "max_seqlen_q": 1,
            "sm_scale": operands.scale,
            **scales(operands),
            **self.metadata(layout),
        }
        self.arguments = keywords(self.decode, needed, {"page_size": 1, "nhead_kv": 1})

    def metadata(self, layout: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}

    def call(self) -> None:
        if self.query is not self.operands.q:
            self.query.copy_(self.operands.q)
        self.decode(**self.arguments)


class AsmPersistent(AsmMlaDecode):
    """`mla_decode_fwd` with the schedule of `get_mla_metadata_v1`, made before timing as an engine makes it
    once a step: as many work groups as compute units, each with its share of all tokens. AITER itself takes
    the other path on gfx950 with 16 heads and a bf16 cache from 32 sequences on."""

    name = "aiter.asm_persistent"
    requires = "AITER 0.1.8 or later, gfx942 or gfx950"

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(
            sizes.heads % 16 == 0 and sizes.heads <= 128, "takes multiples of 16 heads, 128 at the most"
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results: one more for each unit, of 16 heads or of all."""
        tiles = sizes.batch + MOST_UNITS
        return tiles * sizes.heads * (LATENT + 1) * 4 + sizes.batch * sizes.heads * (LATENT + ROPE)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _AsmPersistent(operands, out)


class _AsmPersistent(_Asm):
    def metadata(self, layout: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return schedule(self.operands, self.query.dtype, layout)


def one_token_pages(kv: torch.Tensor) -> torch.Tensor:
    """[slots, 1, 1, 576]: engines give every token a page of its own, whatever theirs."""
    return one_head(pages_of(kv, 1))


def token_pages(operands: MlaDecodeOperands) -> dict[str, torch.Tensor]:
    """qo_indptr and kv_indptr [batch + 1], kv_indices [tokens], kv_last_page_lens [batch], all int32."""
    return {
        "qo_indptr": query_starts(operands),
        "kv_indptr": page_starts(operands, 1),
        "kv_indices": page_list(operands, 1),
        "kv_last_page_lens": last_page_lengths(operands, 1),
    }


def scales(operands: MlaDecodeOperands) -> dict[str, object]:
    """q_scale and kv_scale, fp32 [1] each, on an FP8 cache."""
    if operands.kv.element_size() > 1:
        return {}
    device = operands.kv.device
    # The last is of 0.1.8: 0.1.7 leaves the answer of a single split in a tensor of its own.
    return {
        "q_scale": one_value(Q_SCALE, device),
        "kv_scale": one_value(operands.kv_scale, device),
        "intra_batch_mode": False,
    }


def one_value(value: float, device: torch.device) -> torch.Tensor:
    import torch

    return torch.full((1,), value, dtype=torch.float32, device=device)


def granularity(heads: int, fp8: bool) -> int:
    """Tokens that a schedule deals out at a time: 32 for the one kernel that takes 32 at a time
    (op_tests/test_mla_persistent.py), else 16."""
    return 32 if fp8 and heads == 64 else 16


def schedule(
    operands: MlaDecodeOperands, q_dtype: torch.dtype, layout: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The metadata that the persistent kernel walks, by the names that mla_decode_fwd gives it."""
    import torch

    batch, heads = operands.q.shape[:2]
    kv_dtype = operands.kv.dtype
    shapes = find("aiter.get_mla_metadata_info_v1", "aiter.ops.attention.get_mla_metadata_info_v1")
    plan = find("aiter.get_mla_metadata_v1", "aiter.ops.attention.get_mla_metadata_v1")
    wanted: dict[str, object] = {
        "batch_size": batch,
        "max_seqlen_qo": 1,
        "num_head_qo": heads,
        "q_dtype": q_dtype,
        "kv_dtype": kv_dtype,
        "is_sparse": False,
    }
    names = (
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    )
    given = shapes(**keywords(shapes, wanted, {"fast_mode": True}))
    buffers = {
        name: torch.empty(shape, dtype=dtype, device=operands.q.device)
        for name, (shape, dtype) in zip(names, given, strict=True)
    }
    needed = {
        "seqlens_qo_indptr": layout["qo_indptr"],
        "seqlens_kv_indptr": layout["kv_indptr"],
        "num_heads_per_head_k": heads,
        "num_heads_k": 1,
        "is_causal": True,
        "work_metadata_ptrs": buffers["work_meta_data"],
        **{name: buffers[name] for name in names[1:]},
    }
    wished = {
        "kv_last_page_lens": layout["kv_last_page_lens"],
        "page_size": 1,
        "kv_granularity": granularity(heads, kv_dtype.itemsize == 1),
        "max_seqlen_qo": 1,
        "uni_seqlen_qo": 1,
        "fast_mode": True,
        "dtype_q": q_dtype,
        "dtype_kv": kv_dtype,
    }
    plan(**keywords(plan, needed, wished))
    return buffers
