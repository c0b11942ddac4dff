"""AMD's AITER: its dispatching MHA, each of the kernels behind it, its FP8 ones and its Triton one.

Read at e404860 (2026-08, after 0.1.20): aiter/ops/mha.py, aiter/mla.py, aiter/ops/attention.py,
csrc/py_itfs_cu/{asm_mha_varlen_fwd,asm_mla}.cu, csrc/kernels/mla/metadata/v1_2_host.cuh, and the signatures
at the tags from 0.1.4. Kernels are built at the first call. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.binding import find, keywords
from kernels.mha_prefill import varlen
from kernels.mha_prefill.problem import BYTES, VALUE, WIDTH, MhaPrefillOperands, Sizes, require_native, takes
from kernels.op import Implementation, Prepared, Support, Unsupported, need
from kernels.platform import Platform

if TYPE_CHECKING:
    import torch

INSTALL = "AMD's AITER comes with ROCm's images or from github.com/ROCm/aiter"
TILE = 256  # query rows, and
KEYS = 128  # keys, of the persistent FP8 kernel's tiles
# Heads that its reduction is built for at 128 columns (csrc/kernels/mla/reduce.cu, all tags from 0.1.11).
REDUCED_HEADS = (1, 2, 4, 8, 10, 16, 32, 64, 128)


class Aiter(Implementation):
    """A kernel of AITER.

    archs:  those that it has been built for
    dtypes: of q, k and v
    """

    runtime = "aiter"
    archs: ClassVar[tuple[str, ...]] = ("gfx942", "gfx950")
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def available(self, platform: Platform) -> Support:
        return Support.all_of(
            platform.is_a("rocm"),
            need(platform.arch in self.archs, f"needs {' or '.join(self.archs)}; this is {platform.arch}"),
            platform.library("torch"),
            platform.library("aiter", install=INSTALL),
        )

    def fits(self, sizes: Sizes) -> Support:
        return takes(sizes, *self.dtypes)


def operator(name: str) -> Callable:
    """A kernel's own entry. As a torch operator its schema tells its arguments; the Python function of the
    same name takes *args and **kwargs (aiter/jit/utils/torch_guard.py)."""
    import torch

    function = find(f"aiter.{name}", f"aiter.ops.mha.{name}")
    return getattr(torch.ops.aiter, name, function)


class Dispatch(Aiter):
    """`flash_attn_varlen_func`, as vLLM and SGLang call it: asm v3 on gfx942; on gfx950 OPUS where it has
    that (0.1.20 or later), before asm v3; CK where neither fits."""

    name = "aiter.dispatch"
    requires = "AITER 0.1.4 or later, gfx942 or gfx950"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        function = find("aiter.flash_attn_varlen_func", "aiter.ops.mha.flash_attn_varlen_func")
        return varlen.Varlen(operands, out, function)


def forward_arguments(o: MhaPrefillOperands) -> dict[str, Any]:
    """What the asm and the CK entry want beside what `flash_attn_varlen_func` takes, as that gives it."""
    return {
        **varlen.lengths(o),
        "min_seqlen_q": 0,
        "dropout_p": 0.0,
        "softmax_scale": varlen.scale(o),
        "logits_soft_cap": 0.0,
        "zero_tensors": False,
        "is_causal": varlen.mask()["causal"],
        "window_size_left": -1,
        "window_size_right": -1,
        "return_softmax_lse": False,
        "return_dropout_randval": False,
    }


class _Direct(Prepared):
    def __init__(
        self, operands: MhaPrefillOperands, out: torch.Tensor, function: Callable, arguments: dict[str, Any]
    ) -> None:
        super().__init__(operands, out)
        self.function = function
        needed = {"q": operands.q, "k": operands.k, "v": operands.v, "out": out, **arguments}
        self.arguments = keywords(function, needed)

    def call(self) -> None:
        self.function(**self.arguments)


class Asm(Aiter):
    """The hand-written kernel (fmha v3) by itself."""

    name = "aiter.asm"
    requires = "AITER 0.1.5 or later, gfx942 or gfx950"

    def fits(self, sizes: Sizes) -> Support:
        longest = max(prefix + new for prefix, new in sizes.lengths())
        extent = longest * sizes.heads * WIDTH * 2
        return Support.all_of(
            super().fits(sizes),
            need(extent < 1 << 32, "its byte offsets within a sequence's keys end at 4 GiB"),
        )

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        # 1, as the dispatch has it: gfx942's kernels round weights to nearest, ties away from zero.
        arguments = forward_arguments(operands) | {"how_v3_bf16_cvt": 1}
        return _Direct(operands, out, operator("fmha_v3_varlen_fwd"), arguments)


class Ck(Aiter):
    """Composable Kernel by itself."""

    name = "aiter.ck"
    requires = "AITER 0.1.8 or later, gfx942 or gfx950"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        arguments = forward_arguments(operands) | {"sink_size": 0}
        return _Direct(operands, out, operator("mha_varlen_fwd"), arguments)


def opus_lengths(o: MhaPrefillOperands) -> dict[str, Any]:
    named = varlen.lengths(o)
    return {
        "seqstart_q": named["cu_seqlens_q"],
        "seqstart_k": named["cu_seqlens_k"],
        "max_seqlen_q": named["max_seqlen_q"],
        "max_seqlen_k": named["max_seqlen_k"],
        "softmax_scale": varlen.scale(o),
    }


class Opus(Aiter):
    """The OPUS kernel by itself, which gfx950 dispatches to."""

    name = "aiter.opus"
    requires = "AITER 0.1.20 or later, gfx950"
    archs = ("gfx950",)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        name = "fmha_fwd_bf16_opus_varlen_fwd"
        function = find(f"aiter.ops.mha.{name}", f"aiter.{name}")
        return _Direct(operands, out, function, opus_lengths(operands) | varlen.mask())


class Triton(Aiter):
    """AITER's Triton kernel, q and k in parts of 128 and 64. Its call allocates an output of zeros."""

    name = "aiter.triton"
    requires = "AITER 0.1.7 or later, gfx942 or gfx950"
    allocates = True

    def workspace(self, sizes: Sizes) -> int:
        """The output, and a sum of exponentials per row."""
        return sizes.queries * sizes.heads * (VALUE * BYTES["bf16"] + 4)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        name = "flash_attn_varlen_func"
        function = find(f"aiter.ops.triton.attention.mha.{name}", f"aiter.ops.triton.mha.{name}")
        return varlen.Varlen(operands, None, function)


def descales(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """fp32 [1], by which what is stored is to be multiplied."""
    return {"q_descale": o.q_descale, "k_descale": o.k_descale, "v_descale": o.v_descale}


class Fp8(Aiter):
    """`flash_attn_varlen_fp8_pertensor_func`: CK at 192/128, for which no asm kernel is built. The call
    allocates its output."""

    name = "aiter.fp8"
    requires = "AITER 0.1.8 or later, gfx942 (e4m3fnuz) or gfx950 (e4m3fn)"
    dtypes = ("fp8",)
    activations = "fp8"
    allocates = True

    def workspace(self, sizes: Sizes) -> int:
        return sizes.queries * sizes.heads * VALUE * BYTES["bf16"]

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        require_native(operands)
        name = "flash_attn_varlen_fp8_pertensor_func"
        function = find(f"aiter.{name}", f"aiter.ops.mha.{name}")
        return varlen.Varlen(operands, None, function, descales(operands))


class Fp8Persistent(Aiter):
    """`mla.mla_prefill_ps_fwd`: the asm kernel whose programs each take a share of tiles planned beforehand,
    and the reduction of those tiles that were split over keys."""

    name = "aiter.fp8_ps"
    requires = "AITER 0.1.11 or later, gfx950 (e4m3fn)"
    archs = ("gfx950",)
    dtypes = ("fp8",)
    activations = "fp8"

    def fits(self, sizes: Sizes) -> Support:
        heads = ", ".join(map(str, REDUCED_HEADS))
        return Support.all_of(
            super().fits(sizes), need(sizes.heads in REDUCED_HEADS, f"takes {heads} heads, not {sizes.heads}")
        )

    def workspace(self, sizes: Sizes) -> int:
        """Partial results of split tiles, as many as the library reserves on 256 compute units at most, the
        rows' sums of exponentials, and a number per key."""
        most_new = max(new for _, new in sizes.lengths())
        partial = min(sizes.batch + 255, 510) * -(-most_new // TILE) * TILE
        return sizes.heads * 4 * (partial * (VALUE + 1) + sizes.queries) + 4 * sizes.keys

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        require_native(operands)
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
    info = find("aiter.get_ps_metadata_info_v1", "aiter.ops.attention.get_ps_metadata_info_v1")
    plan = find("aiter.get_ps_metadata_v1", "aiter.ops.attention.get_ps_metadata_v1")
    wanted = info(
        **keywords(
            info,
            {
                "batch_size": len(o.sequences),
                "num_head_k": heads,
                "max_qlen": most_new,
                "qlen_granularity": TILE,
            },
        )
    )
    names = (
        "work_metadata_ptrs",
        "work_indptr",
        "work_info",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    )
    if len(wanted) != len(names):
        raise Unsupported(f"aiter's get_ps_metadata_info_v1 names {len(wanted)} tensors, not {len(names)}")
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=o.q.device)
        for name, (shape, dtype) in zip(names, wanted, strict=True)
    }
    cu_q, cu_k, keys = host_lengths(o)
    plan(
        **keywords(
            plan,
            {
                "seqlens_qo_indptr": cu_q,
                "pages_kv_indptr": cu_k,
                "context_lens": keys,
                "gqa_ratio": 1,
                "num_heads_k": heads,
                **tensors,
                "qhead_granularity": 1,
                "qlen_granularity": TILE,
                "kvlen_granularity": KEYS,
                "block_size": 1,
                "is_causal": varlen.mask()["causal"],
            },
        )
    )
    return tensors


class _Persistent(Prepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        o, plan = operands, planned(operands)
        descale = descales(o)
        self.function = find("aiter.mla.mla_prefill_ps_fwd")
        self.arguments = keywords(
            self.function,
            {
                "Q": o.q,
                "K": o.k,
                "V": o.v,
                "output": out,
                "qo_indptr": o.cu_q,
                "kv_indptr": o.cu_k,
                "kv_page_indices": pages(o),
                "work_indptr": plan["work_indptr"],
                "work_info_set": plan["work_info"],
                "max_seqlen_q": o.longest[0],
                "is_causal": varlen.mask()["causal"],
                "reduce_indptr": plan["reduce_indptr"],
                "reduce_final_map": plan["reduce_final_map"],
                "reduce_partial_map": plan["reduce_partial_map"],
                "softmax_scale": varlen.scale(o),
                "q_scale": descale["q_descale"],
                "k_scale": descale["k_descale"],
                "v_scale": descale["v_descale"],
            },
        )

    def call(self) -> None:
        self.function(**self.arguments)
