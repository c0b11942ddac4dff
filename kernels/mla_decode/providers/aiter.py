"""AITER's MLA decode on AMD GPUs: its assembly kernels, as vLLM and SGLang call them, and its kernels in
Triton and Gluon.

Sources: aiter/mla.py, aiter/ops/attention.py, csrc/py_itfs_cu/asm_mla.cu, hsa/*/mla/mla_asm.csv, and in
aiter/ops/triton attention/mla.py, attention/mla_decode.py and gluon/mla_gluon.py of ROCm/aiter at e404860
(2026-08), the Python of its tags v0.1.8 to v0.1.20.post1; for how engines call them
v1/attention/backends/mla/rocm_aiter_mla.py of vLLM 0.33, srt/layers/attention/aiter_backend.py and
srt/models/deepseek_common/attention_forward_methods/forward_mla_rocm.py of SGLang 0.5.23. The persistent
kernels read row 0 of the cache for tokens that they mask (_mla_decode_fwd_with_head_pad in SGLang's
aiter_backend.py), and the other assembly kernels do not promise to leave masked tokens unread: all get a
cache without NaN. Untested on hardware."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from kernels import platform as platforms
from kernels.attention import arguments_of
from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.mla_decode.providers import vllm
from kernels.op import OPS, Call, Prepared, implementation
from kernels.platform import Platform, of
from kernels.support import Support, need
from kernels.vendor import Aiter, is_older
from shapes.case import MOST_QUERIES, Case

# An engine records one page list into its graphs. It has room for so many sequences of the server's context
# length: SGLang takes the largest batch of its graphs on 160 GB or more, vLLM takes --max-num-seqs.
REQUESTS = {"sglang": 512, "vllm": 1024}
# AITER chooses its splits by the length of this list. Beyond so many entries for each sequence of a call, its
# choice is always the same (get_meta_param on 256 and 304 compute units, with all batches up to 512).
MOST_ENTRIES = 163_840
# The most parts into which SGLang has a sequence split (max_split_per_batch) without data-parallel attention.
SPLITS_OF_SGLANG = 64
SPLITS_WITH_DRAFTS = 32  # the same with speculation
# The tokens of the shortest sequence that SGLang's schedule takes on gfx950. It divides shorter ones by 0
# parts (get_local_splits in csrc/kernels/mla/metadata/v1_0_device.cuh).
LEAST_TOKENS = 196
PAGED = "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale"
FOR_FP8 = "q_scale kv_scale intra_batch_mode"
SCHEDULE = "work_indptr work_info_set reduce_indptr reduce_final_map reduce_partial_map"
# The tensors of a schedule, in the order in which `get_mla_metadata_info_v1` lists their shapes.
SCHEDULE_TENSORS = ("work_meta_data work_metadata_ptrs", *SCHEDULE.split())
DECODE = Function("aiter.mla.mla_decode_fwd", needs=PAGED, wishes=f"page_size nhead_kv {FOR_FP8}")
DECODE_FP8 = DECODE.needing(FOR_FP8, when="kv=fp8")
PERSISTENT = DECODE.needing(f"work_meta_data {SCHEDULE}", when="")  # in all cases
PERSISTENT_FP8 = PERSISTENT.needing(FOR_FP8, when="kv=fp8")
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
    f"{SCHEDULE} kv_granularity max_seqlen_qo uni_seqlen_qo fast_mode",
    wishes="kv_last_page_lens page_size dtype_q dtype_kv",
)
PLAN_OF_SGLANG = PLAN.needing("max_split_per_batch intra_batch_mode", when="")


class Asm(Aiter):
    """`mla_decode_fwd`."""

    requires = "AITER 0.1.8 or later (several query tokens: 0.1.18), gfx942 or gfx950"
    since = "0.1.8"  # with an FP8 cache older ones do not write `o` where they split no sequence
    activations = "fp8"
    # Heads -> the first release that is right with one query token; for other heads every release is.
    first_release: ClassVar[Mapping[int, str]] = {}

    def supports(self, case: Case, platform: Platform) -> Support:
        sizes = sizes_of(case)
        most = self.most_q(sizes, platform.arch)
        return Support.all_of(
            super().supports(case, platform),
            need(
                sizes.q <= most,
                f"AITER has no kernel on {platform.arch} for {sizes.q} query tokens of {sizes.heads} heads "
                f"with kv={sizes.kv}; the most are {most}",
            ),
            is_recent(sizes, platform, self.first_release.get(sizes.heads, "")),
        )

    @staticmethod
    def most_q(sizes: MlaDecodeSizes, arch: str) -> int:
        """The most query tokens, here of the persistent kernels (hsa/*/mla/mla_asm.csv); `aiter.asm` has its
        own. On gfx950, with kernels of any number of heads in bf16 and of powers of two in FP8, AITER takes
        any number. On gfx942 kernels of 16 heads take up to 4, and the one of 128 heads with FP8 any number;
        AITER folds other heads, so that each group of 16 becomes a sequence."""
        has_many = arch == "gfx950" or (sizes.kv == "fp8" and repeated_heads(sizes.heads) == 128)
        return MOST_QUERIES if has_many else 4


def sizes_of(case: Case) -> MlaDecodeSizes:
    sizes = OPS["mla_decode"].sizes(case.sizes)
    assert isinstance(sizes, MlaDecodeSizes)
    return sizes


def is_before(platform: Platform, release: str) -> bool:
    """Whether the AITER that is installed here is older than a release; False where there is none."""
    return platform.here and is_older(platforms.version("aiter") or "", release)


def is_recent(
    sizes: MlaDecodeSizes, platform: Platform, first: str, first_of_several: str = "0.1.18"
) -> Support:
    """Whether AITER, where it is installed, is recent enough. first, first_of_several: the first release that
    is right with one query token, and with several; empty: any. Before 0.1.18 some releases mask or fold
    several query tokens wrongly, or have no kernel."""
    release = first if sizes.q == 1 else first_of_several
    is_too_old = release != "" and is_before(platform, release)
    reason = f"needs aiter {release} or later for {sizes.q} query tokens of {sizes.heads} heads"
    return need(not is_too_old, reason)


def split_bytes(sizes: MlaDecodeSizes, splits: int) -> int:
    """The bytes of partial results of so many splits, of q in FP8 and of the copy of the cache."""
    return layouts.partial_bytes(sizes.rows * splits) + sizes.rows * WIDTH + layouts.cache_bytes(sizes)


def asm_takes_heads(sizes: MlaDecodeSizes) -> Support:
    heads = (8, 16, 128) if sizes.kv == "fp8" else (8, 16, 32, 64, 128)  # for which there are kernels
    return need(sizes.heads in heads, f"takes {', '.join(map(str, heads))} heads with kv={sizes.kv}")


def most_q_of_asm(sizes: MlaDecodeSizes, arch: str) -> int:
    # For 8 heads gfx950 has two kernels of two query tokens, with a causal mask and without: AITER chooses
    # between them by the order of a hash table (hsa/codegen.py).
    if sizes.heads == 8:
        return 1
    # With FP8 AITER has a table of splits by query tokens times heads. It ends at 512, which are 4 query
    # tokens of 128 heads, and it lacks 80, 96 and 112, which are 5, 6 and 7 of 16 heads.
    return 4 if sizes.kv == "fp8" else MOST_QUERIES


@implementation(
    "aiter.asm",
    Asm,
    symbols=(DECODE, DECODE_FP8),
    first_release={8: "0.1.15", 32: "0.1.13", 64: "0.1.13"},
    most_q=staticmethod(most_q_of_asm),
    supports=lambda case, platform: need(
        platform.arch == "gfx950" or sizes_of(case).heads != 64 or sizes_of(case).q > 1,
        "AITER has no kernel of 64 heads for one query token",
    ),
    fits=asm_takes_heads,
    layout=lambda sizes: list_bytes(sizes, REQUESTS["sglang"]),
    workspace=lambda sizes: split_bytes(sizes, 16),  # the most splits that get_meta_param chooses
)
def asm(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """Without a schedule: each sequence is split evenly, and a Triton kernel combines the parts. SGLang's
    choice for a bf16 cache at 16 and 128 heads. The kernels of 16 heads are for 1, 4 and 8 query tokens, on
    an FP8 cache for 1, 2 and 4: other numbers run the kernel of the next larger one. AITER chooses the splits
    by the length of the page list; in SGLang's graphs that is the length of the buffer that holds it."""
    cache, query = layouts.FiniteCache(o), layouts.query_buffer(o)
    function = DECODE_FP8 if o.is_fp8 else DECODE
    decode = function.bind(**arguments_of(function, by_names(o, cache, query, out, REQUESTS["sglang"])))
    return cache.prepared(out, layouts.rounding_q(o, query, decode))


def persistent_bytes(sizes: MlaDecodeSizes) -> int:
    """The bytes of partial results, of q in FP8, or of q and the output with repeated heads, and of the
    copy of the cache. There is a partial result for each sequence and one more for each compute unit."""
    heads = repeated_heads(sizes.heads)
    bytes_per_row = 2 * (WIDTH + LATENT) if heads > sizes.heads else WIDTH
    partial = layouts.partial_bytes((sizes.batch + layouts.MOST_UNITS) * sizes.q * heads)
    return partial + sizes.batch * sizes.q * heads * bytes_per_row + layouts.cache_bytes(sizes)


@implementation(
    "aiter.asm_persistent",
    Asm,
    truncates=True,
    symbols=(PERSISTENT, PERSISTENT_FP8, SHAPES, PLAN),
    fits=takes(most_heads=128, most_q=MOST_QUERIES),
    layout=lambda sizes: list_bytes(sizes, REQUESTS["vllm"]),
    workspace=persistent_bytes,
)
def asm_persistent(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """With the schedule of `get_mla_metadata_v1`, made before timing as an engine makes it once a step: as
    many work groups as compute units, each with its share of all tokens. It is vLLM's way, which repeats
    heads up to a multiple of 16 within the call, and SGLang's at 32, 64 and 128 heads. AITER itself does
    without the schedule on gfx950 with 16 heads and a bf16 cache from 32 sequences on.

    Its reduction of split sequences truncates to bf16 on gfx942: csrc/kernels/mla/reduce.cu casts by
    csrc/include/opus/opus.hpp, where OPUS_FP32_to_BF16_DEFAULT is 2, and which rounds on gfx950 only with
    clang 20 or later (at e404860). The assembly kernels contain the constants of rounding to nearest."""
    heads, repeated, cache = o.heads, repeated_heads(o.heads), layouts.FiniteCache(o)
    query, kernel_out = layouts.query_buffer(o).flatten(0, 1), out.flatten(0, 1)
    if repeated > heads:
        query = cache.kv.new_empty(len(query), repeated, WIDTH)
        kernel_out = out.new_empty(len(query), repeated, LATENT)
    fills_query = query.data_ptr() != o.q.data_ptr()  # for repeated heads or FP8
    arguments = by_names(o, cache, query, kernel_out, REQUESTS["vllm"])
    arguments |= {"q_dtype dtype_q": query.dtype, "is_causal": True, "fast_mode": True}
    decode = scheduled(SHAPES, PLAN, PERSISTENT_FP8 if o.is_fp8 else PERSISTENT, arguments)
    # Where AITER folds heads, a call moves its output to new memory (o_orig.set_ in mla.py). A graph would
    # write that after it is freed, so each call begins with the output at the memory that is kept here.
    written = arguments["o"]
    own_memory = written.view_as(written)

    def call() -> None:
        if fills_query:
            repeat_heads(o.packed, query)
        written.set_(own_memory)
        decode()

    def result(_: object) -> torch.Tensor:
        """The first copy of each head, in the order of `repeat_heads`."""
        return o.unpacked(written[:, :: repeated // heads] if repeated % heads == 0 else written[:, :heads])

    return cache.prepared(out, call, result=result)


def repeat_heads(q: torch.Tensor, query: torch.Tensor) -> None:
    """Fills query [n, more heads, 576] with the heads of q [n, heads, 576], as vLLM does: if all come equally
    often, as 0 0 1 1 2 2, else as 0 1 2 0 1. On an FP8 cache this rounds q, even if no head is repeated."""
    times, remainder = divmod(query.shape[1], q.shape[1])
    if remainder == 0:
        query.unflatten(1, (q.shape[1], times)).copy_(q[:, :, None])
    else:
        for part in query.split(q.shape[1], 1):
            part.copy_(q[:, : part.shape[1]])


def has_no_short_sequence(case: Case, platform: Platform) -> Support:
    shortest = min(sizes_of(case).lengths())
    return need(
        platform.arch != "gfx950" or shortest >= LEAST_TOKENS,
        f"divides by 0 on gfx950 where a sequence has fewer than {LEAST_TOKENS} tokens, as {shortest}",
    )


@implementation(
    "aiter.asm_persistent@sglang",
    Asm,
    truncates=True,
    symbols=(PERSISTENT_OF_SGLANG, SHAPES_OF_SGLANG, PLAN_OF_SGLANG),
    supports=has_no_short_sequence,
    fits=lambda sizes: Support.all_of(
        need(sizes.kv == "fp8", f"SGLang calls it on an FP8 cache, not on {sizes.kv}"),
        need(sizes.heads == 16, f"SGLang calls it at 16 heads, not at {sizes.heads}"),
    ),
    layout=lambda sizes: list_bytes(sizes, 0),
    workspace=lambda sizes: split_bytes(sizes, SPLITS_OF_SGLANG),
)
def asm_persistent_of_sglang(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """As SGLang calls it on an FP8 cache at 16 heads: each sequence is split by itself (intra_batch_mode).
    On gfx950 q is FP8; on gfx942 it stays bf16, although the schedule is asked for FP8. SGLang zeroes row 0
    of the cache before each call, which is not in the time."""
    cache = layouts.FiniteCache(o)
    query = o.q if of(o.q.device).arch == "gfx942" else layouts.query_buffer(o)
    # The page list is as short as it can be: its length decides only where a call gets no number of splits.
    arguments = by_names(o, cache, query, out, requests=0)
    arguments |= {"q_dtype dtype_q": o.kv.dtype, "is_causal": False}
    arguments |= {"fast_mode": False, "intra_batch_mode": True}
    decode = scheduled(SHAPES_OF_SGLANG, PLAN_OF_SGLANG, PERSISTENT_OF_SGLANG, arguments)
    return cache.prepared(out, layouts.rounding_q(o, query, decode))


def repeated_heads(heads: int) -> int:
    """The heads of the persistent kernel, for which vLLM repeats some (AiterMLAHelper.get_mla_padded_q)."""
    return math.ceil(heads / 16) * 16


def list_entries(sizes: MlaDecodeSizes, requests: int) -> int:
    """The length of a page list. An engine's has room for `requests` sequences of the server's context
    length. It is cut to MOST_ENTRIES for each sequence of the call, but has one for each token at least."""
    return max(sizes.tokens, min(requests * sizes.model_len, sizes.batch * MOST_ENTRIES))


def list_bytes(sizes: MlaDecodeSizes, requests: int) -> int:
    return (list_entries(sizes, requests) + layouts.SLACK) * 4


def by_names(
    o: MlaDecodeOperands, cache: layouts.FiniteCache, query: torch.Tensor, out: torch.Tensor, requests: int
) -> dict[str, Any]:
    """The arguments of `mla_decode_fwd` and of the functions that make its schedule, for `arguments_of`: a
    key has all names of an argument. The page size is 1 token, as in engines. requests: see `list_entries`"""
    query, out = query.view(-1, *query.shape[-2:]), out.view(-1, *out.shape[-2:])
    arguments = {
        "q": query,
        "kv_buffer": cache.kv.view(-1, 1, 1, WIDTH),
        "o": out,
        "qo_indptr seqlens_qo_indptr": layouts.query_starts(o),
        "kv_indptr seqlens_kv_indptr": layouts.page_starts(o, 1),
        "kv_indices": layouts.page_list(o, 1, list_entries(o.sizes, requests)),
        "kv_last_page_lens": torch.ones_like(o.lengths),
        "page_size nhead_kv num_heads_k": 1,
        "max_seqlen_q max_seqlen_qo uni_seqlen_qo": o.q.shape[1],
        "sm_scale": o.scale,
        "batch_size": len(o.q),
        "num_head_qo num_heads_per_head_k": query.shape[1],
        "kv_dtype dtype_kv": o.kv.dtype,
        "is_sparse": False,
        # The tokens that a schedule deals out at a time, in both engines. AITER's own test
        # (op_tests/test_mla_persistent.py) has 32 for 64 heads on an FP8 cache.
        "kv_granularity": 16,
        "num_kv_splits max_split_per_batch": SPLITS_WITH_DRAFTS if o.q.shape[1] > 1 else SPLITS_OF_SGLANG,
    }
    if o.is_fp8:
        # As in engines, a query in FP8 has a static scale: 1, where a checkpoint brings no other. The largest
        # values of q lie near 30, a tenth of what either format holds.
        scales = {"q_scale": o.scale_tensor(1.0), "kv_scale": o.scale_tensor(o.kv_scale)}
        arguments |= {**scales, "intra_batch_mode": False}
    return arguments


def scheduled(shapes: Function, plan: Function, decode: Function, arguments: dict[str, Any]) -> Call:
    """The call of `mla_decode_fwd` with a schedule, whose tensors are made and filled here."""
    shapes_and_dtypes = shapes.bind(**arguments_of(shapes, arguments))()
    arguments = dict(arguments)
    for names, (shape, dtype) in zip(SCHEDULE_TENSORS, shapes_and_dtypes, strict=True):
        arguments[names] = torch.empty(shape, dtype=dtype, device=arguments["q"].device)
    plan.bind(**arguments_of(plan, arguments))()
    return decode.bind(**arguments_of(decode, arguments))


# Triton and Gluon

SEGMENTED = Function(
    "aiter.ops.triton.attention.mla.mla_decode_fwd",
    needs="q kv_buffer out cu_seqlens_q seqused_k max_seqlen_kv block_tables softmax_scale kv_lora_rank "
    "qk_rope_head_dim causal q_descale kv_descale",
    wishes="out_scale shuffled_kv_cache",  # releases that have them have no default for them (0.1.15)
)
SPLIT_KV = Function(
    "aiter.ops.triton.attention.mla_decode.decode_attention_fwd",
    needs=f"{vllm.ARGUMENTS} {vllm.SCALES}",
    wishes="lse is_mla",
)
GLUON = Function(
    "aiter.ops.triton.gluon.mla_gluon.mla_gluon",
    "aiter.ops.triton.gluon.mla_decode_gluon.mla_decode_gluon",
    needs="q_nope q_pe kv_c o page_table seq_info sm_scale k_pe kv_pe_offset use_2d_view min_kv_seq_len",
    wishes="kv_scale",
)


class AiterTriton(Aiter):
    requires = "AITER 0.1.15 or later, gfx942 or gfx950"
    since = "0.1.15"
    also = ("triton",)


@implementation(
    "aiter.triton",
    AiterTriton,
    symbols=(SEGMENTED,),
    fits=lambda sizes: need(
        sizes.page % 16 == 0, f"needs pages of a multiple of 16 tokens, not {sizes.page}"
    ),
    # Partial results of 128 segments; the copy of the cache.
    workspace=lambda sizes: sizes.rows * 128 * (LATENT + 2) * 4 + layouts.cache_bytes(sizes),
)
def triton(o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
    """The segmented kernel, which multiplies whole pages, so it gets a cache without NaN. q stays bf16, to
    which an FP8 cache is converted on the way."""
    cache = layouts.FiniteCache(o)
    page = math.gcd(o.page, 128)  # as in vLLM, the largest power of two that divides the page, to 128
    decode = layouts.bound(
        SEGMENTED, o, out, kv_buffer=cache.kv.view(-1, page, 1, WIDTH), max_seqlen_kv=max(o.host_lengths),
        block_tables=layouts.finite_table(o, page), causal=True, q_descale=None,
        kv_descale=o.scale_tensor(o.kv_scale) if o.is_fp8 else None,
        out_scale=None, shuffled_kv_cache=False,
    )  # fmt: skip
    return cache.prepared(out, decode)


@implementation(
    "aiter.triton_split",
    AiterTriton,
    symbols=(SPLIT_KV,),
    fits=takes(),
    workspace=lambda sizes: vllm.split_bytes(sizes, max(sizes.lengths())),
)
def triton_split(o: MlaDecodeOperands, out: torch.Tensor) -> Call:
    """vLLM's split-KV kernel in AITER, with splits as in vLLM without graphs. No engine runs it."""
    return vllm.split_kv(o, out, SPLIT_KV, max(o.host_lengths))


@implementation(
    "aiter.gluon",
    AiterTriton,
    requires="AITER 0.1.16 or later (several query tokens: 0.1.19) with Triton 3.7 or later, gfx950",
    archs=("gfx950",),
    symbols=(GLUON,),
    # At 0.1.15 it takes only a single sequence, of 49152 tokens or more.
    supports=lambda case, platform: is_recent(sizes_of(case), platform, "0.1.16", "0.1.19"),
    fits=lambda sizes: Support.all_of(
        # Only some versions, or only in some batches, take an FP8 cache or more heads.
        need(sizes.kv == "bf16", f"takes a bf16 cache in batches of any size, not {sizes.kv}"),
        takes(most_heads=16, most_q=MOST_QUERIES)(sizes),
        need(
            sizes.cache_pages * sizes.page * WIDTH * 2 <= 2 << 30,
            "takes a cache of up to 2 GiB, beyond which it masks no loads",
        ),
    ),
    layout=lambda sizes: sizes.tokens * 4,
    # Of 256 work groups or more: partial results in bf16, and the logarithms of their sums in fp32.
    workspace=lambda sizes: max(sizes.batch * sizes.q, 256) * sizes.heads * (LATENT * 2 + 4),
)
def gluon(o: MlaDecodeOperands, out: torch.Tensor) -> Call:
    """`mla_gluon`: what vLLM runs for 1, 2, 4 or 8 heads where a layer's cache for all requests takes up to
    2 GiB. In a larger one it masks no loads behind a sequence's end, so vLLM runs `aiter.asm_persistent`. It
    takes several query tokens as [batch, q, heads, width], one as [batch, heads, width]."""
    has_several = o.q.shape[1] > 1
    q_nope, q_pe = layouts.latent_and_rope(o.q if has_several else o.packed)
    return layouts.bound(
        GLUON,
        o,
        o=out if has_several else out[:, 0],
        q_nope=q_nope,
        q_pe=q_pe,
        kv_c=o.kv.view(-1, WIDTH),
        k_pe=None,
        kv_pe_offset=LATENT,
        use_2d_view=False,
        page_table=layouts.page_list(o, 1),
        seq_info=layouts.page_starts(o, 1),
        min_kv_seq_len=min(o.host_lengths) if has_several else 1,  # as vLLM has it
    )
