"""The double of SGLang's Triton kernels against plain torch, and what it must not take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import platform
from tests.doubles import lent

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def sglang() -> None:
    torch.manual_seed(0)
    with lent("cuda", "sm_90", "sglang"):
        yield


def close(got: torch.Tensor, expected: torch.Tensor, allowed: float = 0.02) -> bool:
    return bool((got.float() - expected).norm() <= allowed * expected.norm())


def test_what_is_installed():
    assert platform.version("sglang") == "0.5.23"


def gemm(**changed: Any) -> torch.Tensor:
    from sglang.kernels.ops.gemm.fp8_kernel import w8a8_block_fp8_matmul_triton

    arguments = {
        "A": torch.randn(3, 256).to(FP8),
        "B": torch.randn(192, 256).to(FP8),
        "As": torch.rand(3, 2),
        "Bs": torch.rand(2, 2),
        "block_size": [128, 128],
        "output_dtype": torch.bfloat16,
    } | changed
    a, b = arguments["A"].float(), arguments["B"].float()
    a = a * arguments["As"].repeat_interleave(128, 1)
    b = b * arguments["Bs"].repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    assert close(w8a8_block_fp8_matmul_triton(**arguments), a @ b.T)


def test_gemm():
    gemm()
    gemm(As=torch.rand(2, 3).T)  # the kernel gets both strides of the scales
    with pytest.raises(AssertionError):
        gemm(B=torch.randn(256, 192).to(FP8).T)
    with pytest.raises(NotImplementedError):
        gemm(Bs=torch.ones(2, 2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="dot product"):
        gemm(A=torch.randn(3, 256).to(torch.float8_e4m3fnuz))


def decode(lengths: list[int], splits: int = 3, **changed: Any) -> None:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    batch, heads = len(lengths), 16
    indptr = torch.tensor([0, *lengths]).cumsum(0).int()
    cache = torch.randn(int(indptr[-1]) + 7, 1, 576).bfloat16()
    indices = torch.randperm(len(cache))[: int(indptr[-1])]
    q = torch.randn(batch, heads, 576).bfloat16()
    out = torch.empty(batch, heads, 512, dtype=torch.bfloat16)
    decode_attention_fwd(
        **{
            "q": q,
            "k_buffer": cache,
            "v_buffer": cache[..., :512],
            "o": out,
            "kv_indptr": indptr,
            "kv_indices": indices,
            "attn_logits": torch.full((batch, heads, splits, 512), torch.nan),
            "attn_lse": torch.full((batch, heads, splits), torch.nan),
            "num_kv_splits": torch.full((batch,), splits, dtype=torch.int32),
            "max_kv_splits": splits,
            "sm_scale": 0.05,
            "k_scale": 1.0,
            "v_scale": 1.0,
            "has_mla": True,
        }
        | changed
    )
    for b in range(batch):
        kv = cache[indices[indptr[b] : indptr[b + 1]], 0].float()
        expected = torch.softmax(q[b].float() @ kv.T * 0.05, -1) @ kv[:, :512]
        assert close(out[b], expected)


def test_decode():
    decode([1, 40, 200])
    with pytest.raises(AssertionError):  # splits past the room for them are never computed
        decode([200], num_kv_splits=torch.full((1,), 5, dtype=torch.int32))
    with pytest.raises(AssertionError, match="third size"):
        decode([40], max_kv_splits=4)
    with pytest.raises(RuntimeError, match="partial results"):
        decode([40], attn_lse=torch.empty(1, 16, 3).bfloat16())
    with pytest.raises(ValueError, match="ndim=2"):
        decode([40], k_buffer=torch.randn(47, 576).bfloat16())


@pytest.mark.parametrize("prefixes", [[0, 0], [30, 0]])
def test_extend(prefixes):
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    new, heads = [5, 17], 2
    ends, cached = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor([0, *prefixes]).cumsum(0).int()
    q, k = (torch.randn(sum(new), heads, 192).bfloat16() for _ in range(2))
    v = torch.randn(sum(new), heads, 128).bfloat16()
    k_cache, v_cache = torch.randn(64, heads, 192).bfloat16(), torch.randn(64, heads, 128).bfloat16()
    indices, out = torch.randperm(64)[: sum(prefixes)], torch.zeros_like(v)
    lse = torch.zeros(sum(new), heads)
    rest = (k_cache, v_cache, ends, cached, indices, None, True, None)
    extend_attention_fwd(q, k, v, out, *rest, max(new), 1.0, 1.0, lse_extend=lse)
    for b, prefix in enumerate(prefixes):
        at, slots = slice(int(ends[b]), int(ends[b + 1])), indices[int(cached[b]) : int(cached[b + 1])]
        keys, values = torch.cat([k_cache[slots], k[at]]), torch.cat([v_cache[slots], v[at]])
        scores = torch.einsum("qhd,khd->hqk", q[at].float(), keys.float()) * 192**-0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(prefix + 1)
        scores = scores.masked_fill(later, -torch.inf)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float())
        assert close(out[at], expected) and close(lse[at], scores.logsumexp(-1).T)
    with pytest.raises(TypeError, match="k_scale"):
        extend_attention_fwd(q, k, v, out, *rest, max(new), None, 1.0)
    short = torch.full_like(v, torch.nan)
    extend_attention_fwd(q, k, v, short, *rest, 5, 1.0, 1.0)
    assert short[:10].isfinite().all() and short[10:].isnan().all()


def test_experts():
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_context, get_parallel

    x = torch.randn(5, 256).bfloat16()
    up, down = torch.randn(4, 256, 256).to(FP8), torch.randn(4, 256, 128).to(FP8)
    scales = torch.rand(4, 2, 2), torch.rand(4, 2, 1)
    weights, ids = torch.rand(5, 2), torch.stack([torch.randperm(4)[:2] for _ in range(5)]).int()
    routing = StandardTopKOutput(weights, ids, torch.empty(0))
    quantised = {"use_fp8_w8a8": True, "block_shape": [128, 128]}
    quantised |= {"w1_scale": scales[0], "w2_scale": scales[1]}
    config = MoeRunnerConfig(inplace=False, routed_scaling_factor=2.5)
    with pytest.raises(ValueError, match="not published"):
        fused_experts(x, up, down, routing, config, **quantised)
    with get_context().override_server_args():
        with pytest.raises(RuntimeError, match="tp_group"):
            fused_experts(x, up, down, routing, config, **quantised)
        with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
            got = fused_experts(x, up, down, routing, config, **quantised)
        expected = torch.zeros(5, 256)
        for token in range(5):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                w = up[expert].float() * scales[0][expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
                gate, linear = (w @ x[token].float()).chunk(2)
                w = down[expert].float() * scales[1][expert].repeat_interleave(128, 0)
                expected[token] += 2.5 * weight * (w @ (torch.nn.functional.silu(gate) * linear))
        assert close(got, expected, 0.06)
        config.inplace = True
        assert fused_experts(x, up, down, routing, config, **quantised) is x and torch.equal(x, got)
