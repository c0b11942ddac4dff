"""Calls of a library with one argument broken, for every argument that a row gives.

All calls of rows go through `Function.bind`: there an argument is replaced by one that a mistake would give,
of the wrong layout, order, index type, scale or flag.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.binding import Function
from tests.support.contracts import Contract

MANY = 1 << 24
"""Elements from which a tensor is a workspace, of which only the place matters."""


@dataclass(frozen=True)
class Break:
    """place: of the function; argument: its name, or position; element: of a tuple, or None; how: a key of
    WAYS"""

    place: str
    argument: str | int
    element: int | None
    how: str

    def __str__(self) -> str:
        name = f"{self.argument}" if self.element is None else f"{self.argument}[{self.element}]"
        return f"{self.place.rpartition('.')[2]}({name}): {self.how}"


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """One more than it was, but for indices that must stay inside."""
    return (tensor - 1).clamp(min=0) if int(tensor.max()) > 0 else tensor + 1


def rolled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same strides, other values."""
    return torch.empty_like(tensor).copy_(as_bytes(tensor).roll(1, dim).view(tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)


def other_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind each other the other way round."""
    by_columns = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.contiguous() if by_columns.stride() == tensor.stride() else by_columns


INDICES = (torch.int32, torch.int64)


def is_tensor(value: Any, *dtypes: torch.dtype) -> bool:
    if not isinstance(value, torch.Tensor) or not 0 < value.numel() < MANY:
        return False
    return value.dtype in dtypes if dtypes else True


def has_columns(value: Any) -> bool:
    return is_tensor(value) and value.ndim > 1 and min(value.shape[-2:]) > 1


def differ(tensor: torch.Tensor, dim: int) -> bool:
    """Whether rolling changes anything."""
    if tensor.ndim == 0 or tensor.shape[dim] < 2:
        return False
    whole = as_bytes(tensor)
    return not torch.equal(whole, whole.roll(1, dim)) and not is_empty(tensor)


def is_empty(tensor: torch.Tensor) -> bool:
    """An output, which tests fill with NaN before a row is prepared."""
    return tensor.is_floating_point() and bool(tensor.float().isnan().all())


def same(a: object, b: object) -> bool:
    return isinstance(a, torch.Tensor) or a == b


WAYS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    "other index type": (
        lambda x: is_tensor(x, *INDICES),
        lambda x: x.long() if x.dtype == torch.int32 else x.int(),
    ),
    "one less": (lambda x: is_tensor(x, *INDICES), shifted),
    "another order": (lambda x: is_tensor(x) and differ(x, 0), lambda x: rolled(x, 0)),
    "another order of columns": (lambda x: has_columns(x) and differ(x, -1), lambda x: rolled(x, -1)),
    "other strides": (lambda x: has_columns(x) and x.dtype != torch.uint8, other_strides),
    "twice the scale": (lambda x: is_tensor(x, torch.float32) and x.numel() == 1, lambda x: x * 2),
    "another tensor": (lambda x: is_tensor(x, torch.bfloat16) and is_empty(x), torch.empty_like),
    "the other flag": (lambda x: isinstance(x, bool), lambda x: not x),
    "half of it": (lambda x: isinstance(x, float) and x != 0, lambda x: x / 2),
    "one more": (lambda x: type(x) is int, lambda x: x + 1),
    "none": (lambda x: type(x) is int and x > 1, lambda x: 0),
    "the other order": (
        lambda x: isinstance(x, tuple | list) and len(x) > 1 and not same(x[0], x[-1]),
        lambda x: type(x)(reversed(x)),
    ),
}


def ways(value: Any) -> Iterator[str]:
    return (name for name, (fits, _) in WAYS.items() if fits(value))


@contextlib.contextmanager
def listed() -> Iterator[list[Break]]:
    """Every way to break the calls that are bound meanwhile."""
    breaks: dict[Break, None] = {}
    right = Function.bind

    def bind(self: Function, *by_position: object, of: object = None, **given: object) -> Callable[[], Any]:
        call = right(self, *by_position, of=of, **given)
        taken: dict[str | int, object] = {**dict(enumerate(by_position)), **call.keywords}  # type: ignore[attr-defined]
        for argument, value in taken.items():
            breaks.update({Break(self.places[0], argument, None, how): None for how in ways(value)})
            if isinstance(value, tuple | list):
                for i, inner in enumerate(value):
                    breaks.update({Break(self.places[0], argument, i, how): None for how in ways(inner)})
        return call

    everything: list[Break] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "bind", bind)
        yield everything
    everything += breaks


@contextlib.contextmanager
def broken(broken: Break) -> Iterator[None]:
    """That argument of those calls is given broken; the function's own work on it stays."""
    right = Function.bind
    change = WAYS[broken.how][1]

    def instead(value: Any) -> Any:
        if broken.element is None:
            return change(value)
        parts = list(value)
        parts[broken.element] = change(parts[broken.element])
        return type(value)(parts)

    def bind(self: Function, *by_position: object, of: object = None, **given: object) -> Callable[[], Any]:
        if self.places[0] == broken.place:
            if isinstance(broken.argument, int):
                positions = list(by_position)
                positions[broken.argument] = instead(positions[broken.argument])
                by_position = tuple(positions)
            elif broken.argument in given:
                given[broken.argument] = instead(given[broken.argument])
        return right(self, *by_position, of=of, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "bind", bind)
        yield


ONE = "a sequence has one query token, and pages of one token are full"
SPLITS = "the answer does not depend on how sequences are split"
SORTED = "the order of sequences, of which each is one tile and one split"
ROOM = "there may be more room than is needed"

HARMLESS = {
    ".*": {
        r"\(max_\w+\): one more": "an upper bound",
        r"\(causal\w*\): the other flag": "a query of one token sees all keys",
        r"\(num_splits\): one more": "the answer does not depend on the splits",
    },
    "block_scale_gemm": {
        r"shuffle_weight\(x\): other strides": "tiles are cut by shape",
        r"gemm_a8w8_blockscale(_preshuffle)?\((w|w_scale)\): other strides": "Triton takes strides",
        r"w8a8_block_fp8_matmul_triton\(Bs\): other strides": "Triton takes strides",
        r"fp8_gemm_nt\(b\[1\]\): other strides": "on sm_90 DeepGEMM takes scales of b by rows or by columns",
        r"\(mma_sm\): one more": "how many SMs share an instruction",
    },
    "fused_moe": {
        r"shuffle_weight\(x\): other strides": "the same values",
        r"moe_sorting\(num_experts\): one more": "an expert that nobody picks",
        r"get_padded_M\(|\(use_non_temporal_load\)": "how weights are read, not what",
        r"\(moe_sorting_dispatch_policy\)": "how pairs are sorted, not which",
        r"ck_moe_stage1_fwd\(w2\)|ck_moe_stage2_fwd\(w1\)": "its shape is read alone",
        r"ck_moe_stage1_fwd\(splitk\): one more": "0 and 1 split nothing",
        r"get_optimal_moe_config\(M\)|\(tune_max_num_tokens\)|autotune\(": "a choice of tiles",
        r"aiter.triton .* fused_moe\(topk_": "weights are applied after it",
        r"aiter.triton .* fused_moe\(B\w*\): other strides": "it is told strides",
        r"get_theoretical_mk_alignment": "experts' rows keep to whatever is advised, and the library is told",
        r"nt_masked\(4\): one more|\(alignment\): one more": "a hint",
        r"deepgemm.contiguous .*\(1\[1\]\): other strides|w1_scale\): other strides": "it reads strides",
        # vLLM 0.33 deep_gemm_utils.py:479 asks for a signed type, and its Triton kernels load either.
        r"deepgemm_moe_permute\(topk_ids\): other index type": "it takes both",
        r"transform_sf_into_required_layout\((sf\): other strides|recipe\[0\])": "not read of weights",
        r"\(block_shape\[0\]\)": "x has blocks of one row",
        r"post_reorder_deepgemm\(topk_ids\)": "rows of -1 tell what is elsewhere",
        r"compute_aligned_M_and_alignment\(": "room for more rows",
        r"\((aq_out|output|output_q)\): another order": "it is written",
        r"deepgemm_unpermute_and_reduce\(topk_ids\): other (index type|strides)": "it takes both",
        r"shuffle_matrix_a\(1\): one more": "tiles below 128 rows have one order",
        r"\(ep_size\): one more": "the rank's experts are the first",
        r"init_distributed_environment\(local_rank\)|MoeRunnerConfig\(num_": "of one rank, with all experts",
    },
    "mha_prefill": {
        r"cute_dsl .*deepseek\(((q|kv)_seq_lens_cpu|seq_lens|batch_size)\)": "it reads cum_seq_lens_*",
        r"fa3@vllm .*\(fa_version\)": "tests/kernels/mha_prefill/test_rows.py asks for it",
        # SGLang 0.5.23 extend_attention.py:1058: `_is_hip and ...`; the case tried is of sm_90.
        r"extend_attention_fwd\(extend_seq_lens_cpu": "the grid without idle programs is HIP's alone",
        r"(sglang.triton_extend|aiter.triton) .*: other index type": "Triton loads either type",
        # AITER v0.1.20.post1 _triton_kernels/attention/mha.py:519: VARLEN takes it from cu_seqlens_k.
        r"aiter.triton .*\(max_seqlen_k\)": "a length is read of cu_seqlens_k",
        # FlashInfer 0.7.2.post1 prefill.py, trtllm_ragged_attention_deepseek: _validate_cpu_seq_lens takes
        # int32 and int64; attention/cute_dsl/fmha.py:532, 592: qo_indptr.to(torch.int32).
        r"deepseek\((q|kv)_seq_lens_cpu\): other index type": "it takes both",
        r"flashinfer.cute_dsl .*deepseek\(cum_seq_lens_\w+\): other index type": "it is converted",
        r"deepseek\(return_lse\)": "out is given, and the LSE another tensor (prefill.py:7500)",
        # FlashInfer fb28d72 include/flashinfer/trtllm/fmha/fmhaKernels.cuh:488.
        r"deepseek\(enable_pdl\)": "it sets a launch attribute and nothing else",
        # AITER v0.1.20.post1 ops/mha.py:435: seqstart_q.to(torch.int32).
        r"aiter.opus .*: other index type": "it is converted",
        # FA3 0251105 and vLLM's fork 617264c, hopper/flash_api.cpp: params.q_descale_batch_stride.
        r"flash_attn.fa3.*\([qkv]_descale\): other strides": "it is told strides",
        # vLLM 0.33.0 vllm_flash_attn/cute/interface.py:724: maybe_contiguous.
        r"fa4@vllm .*\([qkv]_descale\): other strides": "it is made contiguous",
        # FlashInfer fb28d72 prefill.py:4929.
        r"flashinfer.cute_dsl .*deepseek\(o_sf_scale\)": "it is not passed on",
        # FlashInfer fb28d72 prefill.py:3882 and 3895, where cuDNN is left out; cudnn/prefill.py:282 and 363.
        r"flashinfer.cudnn .*plan\((num_\w+_heads|head_dim_\w+)\)": "they are read of the tensors",
        # FlashInfer fb28d72 cudnn/prefill.py:351, 382, 400 and 565: tensor_like; cudnn-frontend 1.23.0 has
        # offsets in INT64 (test/python/sdpa/fp16.py:230-233) and in INT32 (python/cudnn/experimental/ops/
        # sdpa.py:624).
        r"flashinfer.cudnn .*plan\(\w+_indptr\): other index type": "the graph takes it from the tensor",
        # cudnn-frontend 1.23.0 include/cudnn_frontend/plans.h:566: the first that can be built.
        r" create_execution_plans\(0\): the other order": "which of the right plans is taken",
        # cudnn-frontend 1.23.0 python/cudnn/experimental/ops/sdpa.py:720: torch.empty.
        r" execute\(1\): another order": "what a workspace holds before is nobody's",
        # AITER e404860 ops/attention.py:1027-1035: more is reserved.
        r"aiter.fp8_ps .*info_v1\((batch_size|num_head_k)\): one more": ROOM,
        # AITER e404860 csrc/kernels/mla/metadata/v1_2_host.cuh:71, 255 and 275: neither is used.
        r"aiter.fp8_ps .*metadata_v1\((gqa_ratio|work_metadata_ptrs)\)": "the planner does not read it",
        # AITER e404860 csrc/py_itfs_cu/asm_mha_varlen_fwd.cu and py_itfs_ck/mha_varlen_fwd_kernels.cu.
        r"aiter.(ck|asm) .*\(zero_tensors\)": "the output is filled with zeros before it is written",
        r"aiter.(ck|asm) .*\(return_softmax_lse\)": "the LSE is another tensor",
        r"aiter.(ck|asm) .*\(window_size_right\): one more": "with a causal mask it is set to 0",
        r"aiter.asm .*\(min_seqlen_q\)": "CK's kernels alone read it (csrc/cpp_itfs/mha_fwd.cu:288)",
        r"aiter.asm .*\(how_v3_bf16_cvt\)": "how fp32 is rounded to bf16 (csrc/cpp_itfs/mha_fwd.cu:52)",
    },
    # What engines give is asked for in tests/kernels/mla_decode/test_engine_arguments.py.
    "mla_decode": {
        r" get_num_kv_splits_triton\(": SPLITS,
        r"(sglang.triton|aiter.triton_split) .*\(\w+\): other index type": "Triton reads either type",
        r"sglang.triton .*\((has_mla|use_pdl|uneven_batch|num_kv_splits)\)": "only the order of work changes",
        r"sglang.triton .*\(v_buffer\): another order$": "with has_mla values are read out of k_buffer",
        r"\((attn_logits|attn_lse|lse)\): another order": "it is only written, or before it is read",
        r"aiter.triton_split (?!.*kv=fp8).*\([kv]_scale\)": "a cache in bf16 has no scale",
        r"aiter.triton .*\(max_seqlen_kv\)": SPLITS,
        r"aiter.gluon .*\(min_kv_seq_len\)": SPLITS,
        r"flashinfer.* get_trtllm_gen_multi_ctas_kv_counter_bytes\(": ROOM,
        r"flashinfer.*\(qk_nope_head_dim\)": "the library reads it nowhere",
        r"flashinfer.* autotune\(": "whichever kernel is chosen is right",
        # FlashMLA 9241ae3, flash_mla_interface.py: get_mla_metadata gives an empty schedule.
        r"flashmla sm_90 (sgl_)?flash_mla: .* get_mla_metadata\(": "it is filled by the first decode call",
        # FlashMLA 9241ae3: csrc/sm90/decode/dense/splitkv_mla.cuh:1020, a block takes the row of its number,
        # which says where it begins and ends.
        r" get_mla_(decoding_)?metadata(_dense_fp8)?\([12]\): one more": "over how many SMs work is divided",
        r"mla_with_kvcache(_fp8)?\(tile_scheduler_metadata\): another order": "any SM can take a row",
        r" get_mla_metadata_info_v1\((batch_size|is_sparse|fast_mode|intra_batch_mode|num_kv_splits)\)": ROOM,
        r" get_mla_metadata_v1\((seqlens_qo_indptr|is_causal|kv_last_page_lens|page_size)\)": ONE,
        r"aiter.*@sglang .*\((fast_mode|max_split_per_batch|num_kv_splits)\)": SPLITS,
        r"aiter.*\(intra_batch_mode\)": SPLITS,
        r"aiter.asm_persistent.* mla_decode_fwd\((qo|kv)_indptr\): (one|an)": "the schedule says it",
        r"aiter.*@sglang gfx942 .*\(q_scale\)": "q is in bf16",
        # vLLM csrc: cutlass_sm100_mla/device/sm100_mla.hpp at 0855644 and 1051220, set_split_kv, has one
        # split for this batch, and kernel/sm100_fmha_mla_tma_warpspecialized.hpp at 236e0fe,
        # to_underlying_arguments, takes the workspace for several.
        r"cutlass_mla .* sm100_cutlass_mla_get_workspace_size\(": "one split needs no workspace",
        r"cutlass_mla .* sm100_cutlass_mla_decode\(9\): one more": "0 and less: set_split_kv chooses",
        # vLLM's fork 617264c hopper/: seqused_k says how far keys are read (seqlen.h:57, paged_kv.h:148); of
        # 4 blocks or fewer there is one split (flash_api.cpp:514, heuristics.h:47), as in the schedule.
        r"fa3@vllm .*flash_attn_varlen_func\(max_seqlen_k\): none": "4 blocks or fewer are not split",
        r"fa3@vllm .*flash_attn_varlen_func\(num_splits\): none": SPLITS,
        # tokenspeed-mla 2.0.4 mla_decode.py:710 and 1042: seq_lens.to(torch.int32); mla_decode_fp8.py:1403,
        # 1464: a kernel that is launched early waits.
        r"tokenspeed_mla_decode\(seq_lens\): other index type": "it is converted",
        r"tokenspeed_mla_decode\(enable_pdl\)": "when a kernel is launched, not what it reads",
        # FA3 0251105 hopper/flash_attn_interface.py:102; sgl_kernel/flash_attn.py of sglang-kernel 0.4.10.
        r"flash_attn.fa3.* flash_attn_with_kvcache\(page_table\): other strides": "it is made contiguous",
        r"flash_attn.fa4 .*\(page_table\): other strides": "it is made contiguous (cute/interface.py:752)",
        # hopper/ of FA3 0251105 and of vLLM's fork 617264c: heuristics.h splits no keys of 4 blocks or fewer;
        # tile_scheduler.hpp rounds rows up to tiles, and 16 heads are one tile of each size.
        r"flash_attn.fa3.* get_scheduler_metadata\((max_seqlen_k|head\w+|cache_seqlens|page_size)\)": SORTED,
        r"flash_attn.fa3.* get_scheduler_metadata\(num_heads_(kv|q)\): one more": "one tile of rows",
        r"flash_attn.fa3@vllm .*\(scheduler_metadata\): one less": "one tile of rows, of one split",
    },
}
"""Breaks that are right all the same: op -> pattern of contract, case and break -> the reason."""

UNNOTICED = (
    # FlashInfer fb28d72 include/flashinfer/trtllm/fmha/kernelParams.h:186: it goes into the parameters of
    # cubins, whatever the type of the output.
    r"flashinfer.trtllm .*deepseek\(o_sf_scale\)",
    # AITER e404860 csrc/kernels/mla/metadata/v1_2_host.cuh:119: of a plan without a mask the further works
    # are of keys that the causal kernel hides from all rows, and of these the assembly alone tells.
    r"aiter.fp8_ps .* get_ps_metadata_v1\(is_causal\)",
    # AITER e404860 csrc/py_itfs_cu/asm_fmoe.cu:182: it goes into the parameters of the assembly; a grid is
    # made of it for flat kernels alone (:196), which nobody chooses (:268).
    r"fmoe_fp8_blockscale_g1u1\(topk\)",
)
"""Breaks that no double notices, and that nobody can see to be harmless in the library's source: compiled
code that is not published, or assembly, alone reads the argument. Patterns likewise."""


def is_known(text: str) -> bool:
    """Of a contract, its case and a break of it."""
    patterns = [f"^{op} .*(?:{p})" for op, reasons in HARMLESS.items() for p in reasons]
    return any(re.search(pattern, text) for pattern in (*patterns, *UNNOTICED))


def survivors(contract: Contract, text: str) -> list[str]:
    """Breaks that neither the double nor the judge noticed."""
    with listed() as breaks:
        contract.keep(text)
    assert breaks, "no call of it is bound"
    return [str(way) for way in breaks if not noticed(contract, text, way)]


def noticed(contract: Contract, text: str, way: Break) -> bool:
    with broken(way), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what overflows then
        try:
            contract.keep(text)
        except Exception:
            return True
    return False
