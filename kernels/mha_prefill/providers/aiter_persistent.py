"""AITER's persistent FP8 prefill, which is planned for the lengths.

Read at e404860 (2026-08, after 0.1.20): aiter/mla.py, aiter/ops/attention.py, csrc/py_itfs_cu/asm_mla.cu,
csrc/kernels/mla/{reduce.cu,metadata/v1_2_host.cuh}, op_tests/test_mla_prefill_ps.py, and the signatures at
the tags from 0.1.11. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import BindingError, Function
from kernels.mha_prefill import layouts
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.providers.aiter import AiterPrefill, descales
from kernels.mha_prefill.sizes import VALUE, MhaPrefillSizes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

TILE = 256  # query rows, and
KEYS = 128  # keys, of the persistent FP8 kernel's tiles
# Heads that its reduction is built for at 128 columns (csrc/kernels/mla/reduce.cu, all tags from 0.1.11).
REDUCED_HEADS = (1, 2, 4, 8, 10, 16, 32, 64, 128)

TENSORS = "work_metadata_ptrs work_indptr work_info reduce_indptr reduce_final_map reduce_partial_map"
"""Of a plan, as `get_ps_metadata_info_v1` lists their shapes."""

INFO = Function(
    "aiter.get_ps_metadata_info_v1",
    "aiter.ops.attention.get_ps_metadata_info_v1",
    needs="batch_size num_head_k max_qlen qlen_granularity",
)
PLAN = Function(
    "aiter.get_ps_metadata_v1",
    "aiter.ops.attention.get_ps_metadata_v1",
    needs=f"seqlens_qo_indptr pages_kv_indptr context_lens gqa_ratio num_heads_k {TENSORS} "
    "qhead_granularity qlen_granularity kvlen_granularity block_size is_causal",
)
ATTEND = Function(
    "aiter.mla.mla_prefill_ps_fwd",
    needs="Q K V output qo_indptr kv_indptr kv_page_indices work_indptr work_info_set max_seqlen_q is_causal "
    "reduce_indptr reduce_final_map reduce_partial_map softmax_scale q_scale k_scale v_scale",
)


class Fp8Persistent(AiterPrefill):
    """`mla.mla_prefill_ps_fwd`: the asm kernel whose programs each take a share of tiles planned beforehand,
    and the reduction of those tiles that were split over keys."""

    name = "aiter.fp8_ps"
    requires = "AITER 0.1.11 or later, gfx950 (e4m3fn)"
    archs = ("gfx950",)
    dtypes = ("fp8",)
    activations = "fp8"
    symbols = (INFO, PLAN, ATTEND)
    since = "0.1.11"

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        heads = ", ".join(map(str, REDUCED_HEADS))
        return Support.all_of(
            super().fits(sizes), need(sizes.heads in REDUCED_HEADS, f"takes {heads} heads, not {sizes.heads}")
        )

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """Partial results of split tiles, as many as the library reserves on 256 compute units at most, the
        rows' sums of exponentials, and a number per key."""
        most_new = max(new for _, new in sizes.lengths())
        partial = min(sizes.batch + 255, 510) * -(-most_new // TILE) * TILE
        return sizes.heads * 4 * (partial * (VALUE + 1) + sizes.queries) + 4 * sizes.keys

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Persistent(operands, out)


def pages(o: MhaPrefillOperands) -> torch.Tensor:
    """Every key is a page of its own, in order: int32 [S]."""
    import torch

    return torch.arange(len(o.k), dtype=torch.int32, device=o.k.device)


def host_lengths(o: MhaPrefillOperands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cumulative new tokens and keys, and the keys of each sequence, int32 on the host, which plans."""
    import torch

    keys = torch.tensor([s.length for s in o.sequences], dtype=torch.int32)
    return o.cu_q.cpu(), o.cu_k.cpu(), keys


def planned(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """The tiles that each program takes, and how their parts are put together."""
    import torch

    heads = o.q.shape[1]
    most_new, _ = o.longest
    shapes = INFO.bind(
        batch_size=len(o.sequences), num_head_k=heads, max_qlen=most_new, qlen_granularity=TILE
    )()
    names = TENSORS.split()
    if len(shapes) != len(names):
        raise BindingError(f"aiter's get_ps_metadata_info_v1 names {len(shapes)} tensors, not {len(names)}")
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=o.q.device)
        for name, (shape, dtype) in zip(names, shapes, strict=True)
    }
    cu_q, cu_k, keys = host_lengths(o)
    PLAN.bind(
        seqlens_qo_indptr=cu_q,
        pages_kv_indptr=cu_k,
        context_lens=keys,
        gqa_ratio=1,
        num_heads_k=heads,
        **tensors,
        qhead_granularity=1,
        qlen_granularity=TILE,
        kvlen_granularity=KEYS,
        block_size=1,
        is_causal=layouts.mask()["causal"],
    )()
    return tensors


class _Persistent(Prepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        o, plan = operands, planned(operands)
        descale = descales(o)
        self.attend = ATTEND.bind(
            Q=o.q,
            K=o.k,
            V=o.v,
            output=out,
            qo_indptr=o.cu_q,
            kv_indptr=o.cu_k,
            kv_page_indices=pages(o),
            work_indptr=plan["work_indptr"],
            work_info_set=plan["work_info"],
            max_seqlen_q=o.longest[0],
            is_causal=layouts.mask()["causal"],
            reduce_indptr=plan["reduce_indptr"],
            reduce_final_map=plan["reduce_final_map"],
            reduce_partial_map=plan["reduce_partial_map"],
            softmax_scale=layouts.scale(o),
            q_scale=descale["q_descale"],
            k_scale=descale["k_descale"],
            v_scale=descale["v_descale"],
        )

    def call(self) -> None:
        self.attend()
