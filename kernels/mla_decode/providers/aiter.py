"""AITER's MLA decode on AMD GPUs: its assembly kernels, as vLLM and SGLang call them.

Sources: aiter/mla.py, aiter/ops/attention.py, csrc/py_itfs_cu/asm_mla.cu and hsa/*/mla/mla_asm.csv of
ROCm/aiter at e404860 (2026-08), the Python of its tags v0.1.8 to v0.1.20.post1; for how engines call them
v1/attention/backends/mla/rocm_aiter_mla.py of vLLM 0.33, srt/layers/attention/aiter_backend.py and
srt/models/deepseek_common/attention_forward_methods/forward_mla_rocm.py of SGLang 0.5.23. The persistent
kernels read row 0 of the cache for tokens that they mask (_mla_decode_fwd_with_head_pad of that
aiter_backend.py), and the others do not promise to read none: all get a cache without NaN. Untested on
hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kernels.binding import Function, Taken
from kernels.mla_decode.compute_units import MOST_UNITS
from kernels.mla_decode.layouts import (
    SLACK,
    FiniteCache,
    cache_bytes,
    one_head,
    page_list,
    page_starts,
    pages_of,
    query_buffer,
    query_starts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH, MlaDecodeSizes
from kernels.op import OPS, Prepared
from kernels.platform import Platform, of
from kernels.support import Support, need
from kernels.vendor import Aiter
from shapes.case import Case

if TYPE_CHECKING:
    import torch

# What the assembly kernels take, one query token a sequence. A query on an FP8 cache is FP8 too.
HEADS = {"bf16": (8, 16, 32, 64, 128), "fp8": (8, 16, 128)}

Q_SCALE = 1.0
"""Of a query in FP8, static as in engines: theirs unless a checkpoint brings another. The widest values of
q lie near 30, a tenth of what either format holds."""

PADDED = 16
"""To whose multiple vLLM repeats heads for the persistent kernel (AiterMLAHelper.get_mla_padded_q)."""

GRANULARITY = 16
"""Tokens that a schedule deals out at a time in either engine, one token a page. AITER's own test
(op_tests/test_mla_persistent.py) has 32 for 64 heads on an FP8 cache."""

REQUESTS = {"sglang": 512, "vllm": 1024}
"""For how many sequences of the server's context length engines make the list of pages that they record into
a graph: SGLang for the largest batch of its graphs on 160 GB or more, vLLM for --max-num-seqs."""

ENOUGH = 163_840
"""Entries of such a list for each sequence of a call by which AITER splits as by a longer list: tried with
get_meta_param for 256 and 304 compute units and all batches up to 512."""

SPLITS_OF_SGLANG = 64
"""Into how many parts SGLang has a sequence split at most, without speculation and without attention that is
data-parallel (max_split_per_batch)."""

LEAST_TOKENS = 196
"""Of a sequence that such a schedule takes on gfx950: of shorter ones it divides by 0 parts (get_local_splits
in csrc/kernels/mla/metadata/v1_0_device.cuh)."""

PAGED = "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale"
SCALED = "q_scale kv_scale intra_batch_mode"
SCHEDULE = "work_meta_data work_indptr work_info_set reduce_indptr reduce_final_map reduce_partial_map"

DECODE = Function("aiter.mla.mla_decode_fwd", needs=PAGED, wishes=f"page_size nhead_kv {SCALED}")
DECODE_FP8 = DECODE.needing(SCALED, when="kv=fp8")
PERSISTENT = DECODE.needing(SCHEDULE, when="")
PERSISTENT_FP8 = PERSISTENT.needing(SCALED, when="kv=fp8")
PERSISTENT_OF_SGLANG = PERSISTENT_FP8.needing("num_kv_splits", when="")

SHAPES = Function(
    "aiter.get_mla_metadata_info_v1",
    "aiter.ops.attention.get_mla_metadata_info_v1",
    needs="batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode",
)
SHAPES_OF_SGLANG = SHAPES.needing("num_kv_splits intra_batch_mode", when="")
# 0.1.10 brought the lengths of last pages, which it must have, and their size.
PLAN = Function(
    "aiter.get_mla_metadata_v1",
    "aiter.ops.attention.get_mla_metadata_v1",
    needs="seqlens_qo_indptr seqlens_kv_indptr num_heads_per_head_k num_heads_k is_causal work_metadata_ptrs "
    "work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map kv_granularity "
    "max_seqlen_qo uni_seqlen_qo fast_mode",
    wishes="kv_last_page_lens page_size dtype_q dtype_kv",
)
PLAN_OF_SGLANG = PLAN.needing("max_split_per_batch intra_batch_mode", when="")


class AsmMlaDecode(Aiter):
    """`mla_decode_fwd` without metadata: the sequence is split evenly, a Triton kernel combines. On an FP8
    cache the call rounds q to FP8 first, which engines fuse into the kernel before. SGLang's choice for a
    bf16 cache at 16 and 128 heads. AITER chooses the splits by the length of the list of pages, which is that
    of the buffer in SGLang's graphs, whatever the sequences hold."""

    name = "aiter.asm"
    requires = "AITER 0.1.8 or later, gfx942 or gfx950"
    since = "0.1.8"  # before, the answer of a single split of an FP8 cache is left elsewhere
    activations = "fp8"
    symbols: ClassVar[Sequence[Taken]] = (DECODE, DECODE_FP8)
    requests: ClassVar = REQUESTS["sglang"]

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        takes = HEADS[sizes.kv]
        return need(sizes.heads in takes, f"takes {', '.join(map(str, takes))} heads with kv={sizes.kv}")

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return (listed(sizes, self.requests) + SLACK) * 4

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        splits = 16  # the most that get_meta_param chooses
        rows = sizes.batch * sizes.heads
        return rows * splits * (LATENT + 1) * 4 + rows * WIDTH + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _Asm(operands, out, self.requests)


class _Asm(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor, requests: int) -> None:
        super().__init__(operands, out)
        self.query = self.room()
        heads, is_fp8 = self.query.shape[1], operands.kv.element_size() == 1
        self.given = out if heads == out.shape[1] else out.new_empty(len(out), heads, LATENT)
        layout = token_pages(operands, listed(operands.sizes, requests))
        self.decode = self.function(is_fp8).bind(
            q=self.query,
            kv_buffer=one_token_pages(self.kv),
            o=self.given,
            **layout,
            max_seqlen_q=1,
            sm_scale=operands.scale,
            page_size=1,
            nhead_kv=1,
            **(self.scaling() if is_fp8 else {}),
            **self.metadata(layout),
        )

    def room(self) -> torch.Tensor:
        """What the kernel reads q from."""
        return query_buffer(self.operands)

    def function(self, is_fp8: bool) -> Function:
        return DECODE_FP8 if is_fp8 else DECODE

    def scaling(self) -> dict[str, object]:
        """fp32 [1] each, and in which of two ways the sequences are split."""
        device = self.operands.kv.device
        return {
            "q_scale": one_value(Q_SCALE, device),
            "kv_scale": one_value(self.operands.kv_scale, device),
            "intra_batch_mode": False,
        }

    def metadata(self, layout: dict[str, torch.Tensor]) -> dict[str, object]:
        return {}

    def call(self) -> None:
        if self.query is not self.operands.q:
            self.query.copy_(self.operands.q)
        self.decode()


class AsmPersistent(AsmMlaDecode):
    """`mla_decode_fwd` with the schedule of `get_mla_metadata_v1`, made before timing as an engine makes it
    once a step: as many work groups as compute units, each with its share of all tokens. It is vLLM's way,
    which repeats heads up to a multiple of 16 within the call, and SGLang's at 32, 64 and 128 heads. AITER
    itself takes the other path on gfx950 with 16 heads and a bf16 cache from 32 sequences on.

    Its reduction of split sequences truncates to bf16 on gfx942: csrc/kernels/mla/reduce.cu casts by
    csrc/include/opus/opus.hpp, whose OPUS_FP32_to_BF16_DEFAULT is 2 and which rounds on gfx950 only with
    clang 20 or later (at e404860). The assembly kernels round to nearest: theirs hold that code's
    constants."""

    name = "aiter.asm_persistent"
    truncates = True
    symbols: ClassVar[Sequence[Taken]] = (PERSISTENT, PERSISTENT_FP8, SHAPES, PLAN)
    requests = REQUESTS["vllm"]

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(sizes.heads <= 128, f"takes up to 128 heads, not {sizes.heads}")

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results: one more for each unit, of 16 heads or of all; q in FP8 or with repeated heads,
        the output of these; the cache."""
        tiles, heads = sizes.batch + MOST_UNITS, padded(sizes.heads)
        rows = sizes.batch * heads
        repeated = rows * 2 * (WIDTH + LATENT) if heads > sizes.heads else rows * WIDTH
        return tiles * heads * (LATENT + 1) * 4 + repeated + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _AsmPersistent(operands, out, self.requests)


class _AsmPersistent(_Asm):
    def room(self) -> torch.Tensor:
        q = self.operands.q
        heads = padded(q.shape[1])
        return super().room() if heads == q.shape[1] else self.kv.new_empty(len(q), heads, WIDTH)

    def call(self) -> None:
        """Heads are repeated one by one where that gives the number, else all of them, as in vLLM."""
        q, room = self.operands.q, self.query
        heads, times = q.shape[1], room.shape[1] // q.shape[1]
        if times * heads == room.shape[1]:
            if room is not q:
                room.unflatten(1, (heads, times)).copy_(q[:, :, None])
        else:
            for part in room.split(heads, 1):
                part.copy_(q[:, : part.shape[1]])
        self.decode()

    def result(self) -> torch.Tensor:
        heads, given = self.operands.q.shape[1], self.given.shape[1]
        return self.given[:, :: given // heads] if given % heads == 0 else self.given[:, :heads]

    def function(self, is_fp8: bool) -> Function:
        return PERSISTENT_FP8 if is_fp8 else PERSISTENT

    def metadata(self, layout: dict[str, torch.Tensor]) -> dict[str, object]:
        heads, dtype = self.query.shape[1], self.query.dtype
        of_all = shaped(self.operands, heads, dtype)
        buffers = made(SHAPES.bind(**of_all, fast_mode=True)(), self.query)
        planned = plan(self.operands, heads, dtype, layout, buffers)
        PLAN.bind(**planned, is_causal=True, fast_mode=True)()
        return buffers


class AsmPersistentOfSglang(AsmPersistent):
    """As SGLang calls it on an FP8 cache at 16 heads: each sequence is split by itself (intra_batch_mode).
    On gfx950 q is FP8; on gfx942 it stays bf16, although the schedule is asked for FP8. SGLang zeroes row 0
    of the cache before each call, which is not in the time."""

    name = "aiter.asm_persistent@sglang"
    symbols = (PERSISTENT_OF_SGLANG, SHAPES_OF_SGLANG, PLAN_OF_SGLANG)
    requests = 0  # the number of splits is given

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.kv == "fp8", f"SGLang calls it on an FP8 cache, not on {sizes.kv}"),
            need(sizes.heads == 16, f"SGLang calls it at 16 heads, not at {sizes.heads}"),
        )

    def supports(self, case: Case, platform: Platform) -> Support:
        sizes = OPS[self.op].sizes(case.sizes)
        assert isinstance(sizes, MlaDecodeSizes)
        least = min(sizes.lengths())
        return Support.all_of(
            super().supports(case, platform),
            need(
                platform.arch != "gfx950" or least >= LEAST_TOKENS,
                f"divides by 0 on gfx950 where a sequence has fewer than {LEAST_TOKENS} tokens, as {least}",
            ),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        rows = sizes.batch * sizes.heads
        return rows * SPLITS_OF_SGLANG * (LATENT + 1) * 4 + rows * WIDTH + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _AsmPersistentOfSglang(operands, out, self.requests)


class _AsmPersistentOfSglang(_Asm):
    def room(self) -> torch.Tensor:
        is_gfx942 = of(self.operands.q.device).arch == "gfx942"
        return self.operands.q if is_gfx942 else query_buffer(self.operands)

    def function(self, is_fp8: bool) -> Function:
        return PERSISTENT_OF_SGLANG

    def scaling(self) -> dict[str, object]:
        return super().scaling() | {"intra_batch_mode": True}

    def metadata(self, layout: dict[str, torch.Tensor]) -> dict[str, object]:
        fp8 = self.operands.kv.dtype
        way = {"fast_mode": False, "intra_batch_mode": True}
        heads = self.query.shape[1]
        of_all = shaped(self.operands, heads, fp8)
        shapes = SHAPES_OF_SGLANG.bind(**of_all, **way, num_kv_splits=SPLITS_OF_SGLANG)()
        buffers = made(shapes, self.query)
        planned = plan(self.operands, heads, fp8, layout, buffers)
        PLAN_OF_SGLANG.bind(**planned, is_causal=False, **way, max_split_per_batch=SPLITS_OF_SGLANG)()
        return {**buffers, "num_kv_splits": SPLITS_OF_SGLANG}


def one_token_pages(kv: torch.Tensor) -> torch.Tensor:
    """[slots, 1, 1, 576]: engines give every token a page of its own, whatever theirs."""
    return one_head(pages_of(kv, 1))


def padded(heads: int) -> int:
    return -(-heads // PADDED) * PADDED


def listed(sizes: MlaDecodeSizes, requests: int) -> int:
    """Entries of the list of pages that an engine makes for so many requests, at most ENOUGH for each
    sequence of the call."""
    return max(sizes.tokens, min(requests * sizes.model_len, sizes.batch * ENOUGH))


def token_pages(operands: MlaDecodeOperands, entries: int) -> dict[str, torch.Tensor]:
    """qo_indptr and kv_indptr [batch + 1], kv_indices [entries], the first of which are the tokens',
    kv_last_page_lens [batch], all int32."""
    import torch

    return {
        "qo_indptr": query_starts(operands),
        "kv_indptr": page_starts(operands, 1),
        "kv_indices": page_list(operands, 1, entries),
        "kv_last_page_lens": torch.ones_like(operands.lengths),
    }


def one_value(value: float, device: torch.device) -> torch.Tensor:
    import torch

    return torch.full((1,), value, dtype=torch.float32, device=device)


def shaped(operands: MlaDecodeOperands, heads: int, q_dtype: torch.dtype) -> dict[str, object]:
    """What the shapes of a schedule depend on; heads: those that the kernel is given."""
    return {
        "batch_size": len(operands.q),
        "max_seqlen_qo": 1,
        "num_head_qo": heads,
        "q_dtype": q_dtype,
        "kv_dtype": operands.kv.dtype,
        "is_sparse": False,
    }


def made(shapes: Sequence[tuple[object, torch.dtype]], like: torch.Tensor) -> dict[str, object]:
    """The tensors of a schedule, by the names that mla_decode_fwd gives them, in its order."""
    import torch

    return {
        name: torch.empty(shape, dtype=dtype, device=like.device)  # type: ignore[call-overload]
        for name, (shape, dtype) in zip(SCHEDULE.split(), shapes, strict=True)
    }


def plan(
    operands: MlaDecodeOperands,
    heads: int,
    q_dtype: torch.dtype,
    layout: dict[str, torch.Tensor],
    buffers: dict[str, object],
) -> dict[str, object]:
    """What fills a schedule, whichever way sequences are split."""
    return {
        "seqlens_qo_indptr": layout["qo_indptr"],
        "seqlens_kv_indptr": layout["kv_indptr"],
        "kv_last_page_lens": layout["kv_last_page_lens"],
        "num_heads_per_head_k": heads,
        "num_heads_k": 1,
        "work_metadata_ptrs": buffers["work_meta_data"],
        **{name: buffers[name] for name in SCHEDULE.split()[1:]},
        "page_size": 1,
        "kv_granularity": GRANULARITY,
        "max_seqlen_qo": 1,
        "uni_seqlen_qo": 1,
        "dtype_q": q_dtype,
        "dtype_kv": operands.kv.dtype,
    }
