"""What functions of libraries return, where a row looks at that: shapes and dtypes, no arithmetic.

Each is the answer of all functions of that name in that library.
"""

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.gemm_moe_answers import BLOCK_SCALE_GEMM, FUSED_MOE
from tests.support.stand_ins import UNITS, Answer, Arguments, int32, numbered, write, writes

LATENT = 512


def of_latent(a: Arguments) -> torch.Tensor:
    """[..., 512], the rest as q."""
    return numbered(*(a["q"] if "q" in a else a["query"]).shape[:-1], LATENT)


def of_values(a: Arguments) -> torch.Tensor:
    """[..., the width of v], the rest as q."""
    return numbered(*a["q"].shape[:-1], a["v"].shape[-1])


def flash_mla_schedule(a: Arguments) -> tuple[object, object]:
    """Of releases whose function has no signature, an object that the first call fills, and None; before,
    two tensors (flash_mla_interface.py of 9241ae3 and of 01a2772)."""
    return (SimpleNamespace(), None) if "0" in a else two_tensors(a)


def two_tensors(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [parts, 8] and [batch + 1]."""
    return int32(UNITS, 8), int32(4)


def shapes(*tensors: tuple[tuple[int, ...], torch.dtype]) -> Answer:
    """A list of shapes and dtypes: here each is another one, so that none stands for another."""
    return lambda a: list(tensors)


def attended_or_written(a: Arguments) -> torch.Tensor | None:
    return None if a.get("out") is not None else of_values(a)


def is_itself(a: Arguments) -> Any:
    return a["self"]


def executed(a: Arguments) -> None:
    """A graph of cuDNN writes those of its tensors that hold nothing yet."""
    for tensor in a["tensor_dict"].values():
        if tensor.is_floating_point() and tensor.float().isnan().all():
            write(tensor)


MLA_DECODE: Mapping[str, Answer] = {
    "flash_mla.get_mla_metadata": flash_mla_schedule,
    "flash_mla.get_mla_decoding_metadata": two_tensors,
    "flash_mla.flash_mla_with_kvcache": lambda a: (of_latent(a), None),
    "vllm.get_mla_metadata": lambda a: (SimpleNamespace(), None),
    "vllm.get_mla_metadata_dense_fp8": two_tensors,
    "vllm.flash_mla_with_kvcache": lambda a: (of_latent(a), None),
    "vllm.flash_mla_with_kvcache_fp8": lambda a: (of_latent(a), None),
    # get_mla_metadata_info_v1 of aiter/ops/attention.py at e404860: the first holds pointers.
    "aiter.get_mla_metadata_info_v1": shapes(
        ((2,), torch.uint64), ((5,), torch.int32), ((6, 8), torch.int32), ((7,), torch.int32),
        ((3, 2), torch.int32), ((8,), torch.int32),
    ),
    "aiter.get_mla_metadata_v1": writes(
        "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map"
    ),
    "flashinfer.trtllm_batch_decode_with_kv_cache_mla": of_latent,
    "flashinfer.get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda a: 1600,
    "flashinfer.autotune": lambda a: contextlib.nullcontext(),
    "flash_attn_interface.get_scheduler_metadata": lambda a: int32(5),
    "flash_attn_interface.flash_attn_with_kvcache": of_latent,
    "vllm.get_scheduler_metadata": lambda a: int32(5),
    "sgl_kernel.flash_attn_with_kvcache": of_latent,
    "vllm.sm100_cutlass_mla_get_workspace_size": lambda a: 4096,
    "tokenspeed_mla.get_num_sm": lambda a: UNITS,
    "tokenspeed_mla.tokenspeed_mla_decode": of_latent,
    "sglang.get_num_kv_splits_triton": writes("num_kv_splits_ptr", "uneven_batch_ptr"),
}  # fmt: skip

MHA_PREFILL: Mapping[str, Answer] = {
    # get_ps_metadata_info_v1 of the same file.
    "aiter.get_ps_metadata_info_v1": shapes(
        ((2,), torch.uint64), ((5,), torch.int32), ((6, 8), torch.int32), ((7,), torch.int32),
        ((3, 2), torch.int32), ((8,), torch.int32),
    ),
    "aiter.get_ps_metadata_v1": writes(
        "work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map"
    ),
    "aiter.flash_attn_varlen_func": attended_or_written,
    "aiter.flash_attn_varlen_fp8_pertensor_func": of_values,
    "flash_attn.flash_attn_varlen_func": lambda a: (of_values(a), None),
    "flash_attn_interface.flash_attn_varlen_func": of_values,
    "vllm.flash_attn_varlen_func": of_values,
    "sgl_kernel.flash_attn_varlen_func": of_values,
    "cudnn.sdpa": lambda a: (a["self"].libraries.made("cudnn.Tensor"), None),
    "cudnn.sdpa_fp8": lambda a: tuple(a["self"].libraries.made("cudnn.Tensor") for _ in range(4)),
    "cudnn.tensor": lambda a: a["self"].libraries.made("cudnn.Tensor"),
    **{f"cudnn.set_{what}": is_itself
       for what in ("uid", "output", "dim", "stride", "data_type", "ragged_offset")},
    "cudnn.backend_version": lambda a: 92000,
    "cudnn.get_workspace_size": lambda a: 64,
    "cudnn.execute": executed,
    "cudnn.create_handle": lambda a: 7,
}  # fmt: skip

ANSWERS = {**MLA_DECODE, **MHA_PREFILL, **BLOCK_SCALE_GEMM, **FUSED_MOE}

VALUES: Mapping[str, object] = {
    "cudnn.cudnnGraphNotSupportedError": type("cudnnGraphNotSupportedError", (Exception,), {}),
    "cudnn.__version__": "1.32.0",
}

ALSO: Mapping[str, Mapping[str, str]] = {
    # flash_mla/flash_mla_interface.py of sgl-flash-mla 1.0.0.
    "flash_mla 1.0.0+sgl": {
        "flash_mla.get_mla_decoding_metadata": "(seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, "
        "is_fp8_kvcache=False, topk=None, use_legacy=False)",
    },
    "flash_attn.cute": {"flash_attn.cute.interface._mla_fwd_plan": ""},
}
"""Places that are not recorded, by release."""
