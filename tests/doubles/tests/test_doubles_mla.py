"""The doubles of vLLM's CUTLASS MLA and of TokenSpeed's against plain arithmetic in fp64, and what they must
not take."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import pytest
import torch

from kernels import platform
from tests.doubles import lent

FP8 = torch.float8_e4m3fn
SCALE = 0.07
LENGTHS = [1, 64, 130, 257]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def problem(page: int, dtype: torch.dtype, heads: int = 128, queries: int = 1, spare: float = 0.0) -> dict:
    """Sequences of LENGTHS in shuffled pages, `spare` in every slot that no token has; the answer in fp64."""
    per_row = -(-max(LENGTHS) // 128) * (128 // page)
    order = torch.randperm(len(LENGTHS) * per_row).int()
    o = {"table": order.view(len(LENGTHS), per_row), "lengths": torch.tensor(LENGTHS, dtype=torch.int32)}
    o["q"] = torch.randn(len(LENGTHS), queries, heads, 576).to(dtype)
    cache = torch.full((order.numel(), page, 576), spare)
    o["out"], o["lse"] = torch.zeros(*o["q"].shape[:3], 512, dtype=torch.float64), []
    for b, length in enumerate(LENGTHS):
        keys = torch.randn(length, 576).to(dtype)
        for slot in range(length):
            cache[o["table"][b, slot // page], slot % page] = keys[slot].float()
        ends = length - queries + 1 + torch.arange(queries)
        hidden = torch.arange(length)[None] >= ends[:, None]
        scores = SCALE * (o["q"][b].double() @ keys.double().T)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        o["lse"].append(scores.logsumexp(-1))
        o["out"][b] = scores.softmax(-1) @ keys.double()[:, :512]
    return o | {"cache": cache.to(dtype), "lse": torch.stack(o["lse"])}


def close(got: torch.Tensor, expected: torch.Tensor, allowed: float = 0.005) -> bool:
    return bool((got.double() - expected).norm() <= allowed * expected.norm())


def cutlass(o: dict, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm import _custom_ops as ops

    batch, q = len(LENGTHS), o["q"][:, 0]
    size = ops.sm100_cutlass_mla_get_workspace_size(128, batch, 148, num_kv_splits=-1)
    call = {
        "out": torch.full((batch, 128, 512), torch.nan, dtype=torch.bfloat16 if q.dtype == FP8 else q.dtype),
        "lse": torch.empty(batch, 128),
        "q_nope": q[..., :512],
        "q_pe": q[..., 512:],
        "kv_c_and_k_pe_cache": o["cache"],
        "seq_lens": o["lengths"],
        "page_table": o["table"],
        "workspace": torch.empty(size, dtype=torch.uint8),
        "scale": SCALE,
        "num_kv_splits": -1,
    } | changed
    out = ops.sm100_cutlass_mla_decode(*call.values())
    assert out is call["out"]
    return out, call["lse"]


@pytest.fixture(params=["sm_100", "sm_103"])
def vllm(request):
    with lent("cuda", request.param, "vllm_mla"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("page", [32, 64, 128])
def test_cutlass(vllm, page, dtype):
    o = problem(page, dtype)
    out, lse = cutlass(o)
    assert close(out, o["out"][:, 0]) and close(lse, o["lse"][:, 0], 1e-4)
    assert close(cutlass(o, lse=torch.Tensor())[0], o["out"][:, 0])
    assert platform.version("vllm") == "0.33.0"


def test_cutlass_reads_whole_tiles(vllm):
    o = problem(64, torch.bfloat16, spare=math.nan)
    out, lse = cutlass(o)
    assert out.isnan().any(-1).any(-1).tolist() == [length % 128 != 0 for length in LENGTHS]
    assert close(lse, o["lse"][:, 0], 1e-4)  # keys are masked, values are multiplied by 0
    o = problem(64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="page of the last tile"):
        cutlass(o, page_table=torch.where(torch.arange(6) < 5, o["table"], -1))
    with pytest.raises(RuntimeError, match="tiles of 128"):
        cutlass(o, page_table=o["table"][:, :5].contiguous())
    assert not close(cutlass(o, page_table=o["table"].T.contiguous().T)[0], o["out"][:, 0])


def test_cutlass_workspace(vllm):
    from vllm import _custom_ops as ops

    per_split = (512 + 1) * 4 * 128
    assert ops.sm100_cutlass_mla_get_workspace_size(1 << 17, 1, 148, num_kv_splits=-1) == 16 * per_split
    assert ops.sm100_cutlass_mla_get_workspace_size(1 << 17, 8, 148, num_kv_splits=-1) == 8 * per_split
    assert ops.sm100_cutlass_mla_get_workspace_size(200, 1, 148, num_kv_splits=-1) == 2 * per_split
    o = problem(64, torch.bfloat16)
    one = {"q_nope": o["q"][:1, 0, :, :512], "q_pe": o["q"][:1, 0, :, 512:], "page_table": o["table"][:1]}
    with pytest.raises(RuntimeError, match="workspace"):
        cutlass(o, **one, workspace=torch.empty(per_split, dtype=torch.uint8))
    cutlass(o, **one, workspace=torch.empty(3 * per_split, dtype=torch.uint8))


WRONG_CUTLASS = {
    "pages of 48": lambda o: {"kv_c_and_k_pe_cache": o["cache"].reshape(-1, 48, 576)},
    "pages of 256": lambda o: {"kv_c_and_k_pe_cache": o["cache"].reshape(-1, 256, 576)},
    "lengths of int64": lambda o: {"seq_lens": o["lengths"].long()},
    "a page table of int64": lambda o: {"page_table": o["table"].long()},
    "a cache of fp16": lambda o: {"kv_c_and_k_pe_cache": o["cache"].half()},
    "queries of fp32": lambda o: {"q_nope": o["q"][:, 0, :, :512].float()},
    "16 heads": lambda o: {"q_nope": o["q"][:, 0, :16, :512], "q_pe": o["q"][:, 0, :16, 512:]},
    "an output of fp32": lambda o: {"out": torch.empty(4, 128, 512)},
    "an output of 16 heads": lambda o: {"out": torch.empty(4, 16, 512, dtype=torch.bfloat16)},
    "rope and latent swapped": lambda o: {"q_nope": o["q"][:, 0, :, :64], "q_pe": o["q"][:, 0, :, 64:]},
    "a workspace of fp32": lambda o: {"workspace": torch.empty(1 << 20)},
    "pages of fours": lambda o: {"kv_c_and_k_pe_cache": o["cache"][:, None]},
}


@pytest.mark.parametrize("wrong", WRONG_CUTLASS)
def test_refused_cutlass(vllm, wrong):
    o = problem(64, torch.bfloat16)
    with pytest.raises(RuntimeError):
        cutlass(o, **WRONG_CUTLASS[wrong](o))


def test_cutlass_is_of_blackwell():
    with lent("cuda", "sm_90", "vllm_mla"), pytest.raises(RuntimeError, match="no kernel image"):
        cutlass(problem(64, torch.bfloat16))


def tokenspeed(o: dict, **changed: Any) -> Any:
    from tokenspeed_mla import get_num_sm, tokenspeed_mla_decode

    heads = o["q"].shape[2]
    needed = get_num_sm(o["q"].device) * heads * 8 * 513 * 4  # as vLLM has it
    call = {
        "query": o["q"],
        "kv_cache": o["cache"],
        "workspace_buffer": torch.empty(needed, dtype=torch.int8),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": o["table"],
        "seq_lens": o["lengths"],
        "max_seq_len": max(LENGTHS),
        "softmax_scale": SCALE,
        "output_scale": 1.0,
        "enable_pdl": False,
        "return_lse": True,
        "causal_mask": True,
        "min_split_kv": 1,
    }
    return tokenspeed_mla_decode(**(call | changed))


@pytest.fixture(params=["sm_100", "sm_103"])
def speed(request):
    with lent("cuda", request.param, "tokenspeed_mla"):
        yield


@pytest.mark.parametrize(("heads", "queries"), [(128, 1), (16, 1), (16, 4), (64, 2)])
@pytest.mark.parametrize(
    ("page", "dtype"), [(32, FP8), (64, FP8), (64, torch.bfloat16), (128, torch.float16)]
)
def test_tokenspeed(speed, page, dtype, heads, queries):
    o = problem(page, dtype, heads, queries)
    o["lengths"][0] = 0  # shorter than its queries: undefined
    out, lse = tokenspeed(o)
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype) and out[0].isnan().all()
    assert close(out[1:], o["out"][1:]) and close(lse[1:] * math.log(2), o["lse"][1:], 1e-4)
    doubled = tokenspeed(o, output_scale=2.0, return_lse=False, kv_cache=o["cache"][:, None])
    assert close(doubled[1:], 2 * o["out"][1:])
    assert queries == 1 or not close(tokenspeed(o, causal_mask=False)[0][1:], o["out"][1:])


def test_tokenspeed_reads_whole_tiles(speed):
    o = problem(64, FP8, spare=math.nan)
    assert tokenspeed(o)[0].isnan().any(-1).any(-1).flatten().tolist() == [n % 128 != 0 for n in LENGTHS]
    o = problem(64, FP8)
    outside = torch.where(torch.arange(6) < 5, o["table"], -1)
    assert close(tokenspeed(o, block_tables=outside)[0], o["out"])  # outside the map of the cache: zeros
    assert not close(tokenspeed(o, block_tables=o["table"].roll(1, 0))[0], o["out"])


WRONG_TOKENSPEED = {
    "queries without their number": lambda o: {"query": o["q"][:, 0]},
    "a cache of bf16": lambda o: {"kv_cache": o["cache"].bfloat16()},
    "pages of 1": lambda o: {"kv_cache": o["cache"].reshape(-1, 1, 576)},
    "pages of 256": lambda o: {"kv_cache": o["cache"].reshape(-1, 256, 576)},
    "a workspace of uint8": lambda o: {"workspace_buffer": torch.empty(1 << 28, dtype=torch.uint8)},
    "a small workspace": lambda o: {"workspace_buffer": torch.empty(1024, dtype=torch.int8)},
    "a page table of int64": lambda o: {"block_tables": o["table"].long()},
    "a page table in columns": lambda o: {"block_tables": o["table"].T.contiguous().T},
    "an output of fp32": lambda o: {"out": torch.empty(4, 1, 128, 512)},
    "an output in three dimensions": lambda o: {"out": torch.empty(4, 128, 512, dtype=torch.bfloat16)},
    "no length": lambda o: {"max_seq_len": 0},
    "another rank": lambda o: {"kv_lora_rank": 448},
    "a split of 0": lambda o: {"min_split_kv": 0},
    "too many heads": lambda o: {"query": torch.cat((o["q"], o["q"]), 2)},
}


@pytest.mark.parametrize("wrong", WRONG_TOKENSPEED)
def test_refused_tokenspeed(speed, wrong):
    o = problem(64, FP8)
    with pytest.raises((ValueError, AssertionError)):
        tokenspeed(o, **WRONG_TOKENSPEED[wrong](o))


def test_tokenspeed_is_of_blackwell():
    with lent("cuda", "sm_90", "tokenspeed_mla"), pytest.raises(ValueError, match="SM100"):
        tokenspeed(problem(64, FP8))


def test_what_is_installed(speed):
    assert version("tokenspeed-mla") == "2.0.4"
