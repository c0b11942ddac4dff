"""The doubles of vLLM's and SGLang's CUTLASS GEMMs and of what both run DeepGEMM's experts with, against
plain arithmetic in fp64, and what they must not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import platform
from tests.doubles import lent

FP8 = torch.float8_e4m3fn
VLLM, SGLANG = ["sm_90", "sm_100", "sm_103", "sm_120"], ["sm_120", "sm_121"]
MOE = ["sm_90", "sm_100", "sm_103"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, expected: torch.Tensor, allowed: float = 0.005) -> bool:
    return bool((got.double() - expected.double()).norm() <= allowed * expected.double().norm())


def wide(scale: torch.Tensor, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales of (rows, 128) blocks at the size of what they scale, in fp64."""
    full = scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return full[..., : shape[-2], : shape[-1]]


def operands(m: int, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A and B [n, k] with their scales, all row-major, and the product in fp64."""
    a, b = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)
    sa, sb = torch.rand(m, -(-k // 128)) + 0.5, torch.rand(-(-n // 128), -(-k // 128)) + 0.5
    product = (a.double() * wide(sa, 1, a.shape)) @ (b.double() * wide(sb, 128, b.shape)).T
    return {"a": a, "b": b, "sa": sa, "sb": sb}, product


def columns(scale: torch.Tensor) -> torch.Tensor:
    return scale.T.contiguous().T


def vllm_gemm(o: dict[str, torch.Tensor], **changed: Any) -> torch.Tensor:
    from vllm._custom_ops import cutlass_scaled_mm

    call = {"a": o["a"], "b": o["b"].T, "scale_a": columns(o["sa"]), "scale_b": o["sb"].T}
    return cutlass_scaled_mm(**(call | {"out_dtype": torch.bfloat16} | changed))


def sglang_gemm(o: dict[str, torch.Tensor], **changed: Any) -> torch.Tensor:
    from sglang.kernels.ops.gemm.fp8_blockwise_gemm import fp8_blockwise_scaled_mm

    call = {"mat_a": o["a"], "mat_b": o["b"].T, "scales_a": columns(o["sa"]), "scales_b": o["sb"].T}
    return fp8_blockwise_scaled_mm(**(call | {"out_dtype": torch.bfloat16} | changed))


@pytest.mark.parametrize("arch", VLLM)
@pytest.mark.parametrize(("m", "n", "k"), [(4, 256, 256), (12, 192, 384), (132, 128, 640)])
def test_vllm_gemm(arch, m, n, k):
    with lent("cuda", arch, "vllm_gemm_moe"):
        o, product = operands(m, n, k)
        got = vllm_gemm(o)
        assert got.shape == (m, n) and got.dtype == torch.bfloat16 and close(got, product)
        assert close(vllm_gemm(o, out_dtype=torch.float16), product)
        assert not close(vllm_gemm(o, scale_a=o["sa"]), product)  # rows of scales are read as columns
        assert n == 128 or not close(vllm_gemm(o, scale_b=o["sb"].T.contiguous()), product)
        assert platform.version("vllm") == "0.33.0"


@pytest.mark.parametrize("arch", VLLM)
def test_vllm_gemm_of_any_m(arch):
    with lent("cuda", arch, "vllm_gemm_moe"):
        o, product = operands(7, 256, 256)
        if arch == "sm_90":
            with pytest.raises(RuntimeError, match="m must be divisible by 4"):
                vllm_gemm(o)
        else:
            assert close(vllm_gemm(o), product)


WRONG_GEMM = {
    "b row-major": lambda o: {"b": o["b"].T.contiguous()},
    "a column-major": lambda o: {"a": columns(o["a"])},
    "a not FP8": lambda o: {"a": o["a"].bfloat16()},
    "a of e5m2": lambda o: {"a": o["a"].float().to(torch.float8_e5m2)},
    "scales of bf16": lambda o: {"sa": columns(o["sa"]).bfloat16()},
    "scales packed": lambda o: {"sa": columns(o["sa"]).view(torch.int32)},
    "scales turned": lambda o: {"sa": o["sa"].T},
    "weight scales turned": lambda o: {"sb": o["sb"]},
    "scales of fewer rows": lambda o: {"sa": columns(o["sa"][:4])},
    "out of fp32": lambda o: {"out": torch.float32},
    "b of another k": lambda o: {"b": o["b"][:, :128].T},
}
VLLM_NAMES = {"a": "a", "b": "b", "sa": "scale_a", "sb": "scale_b", "out": "out_dtype"}
SGLANG_NAMES = {"a": "mat_a", "b": "mat_b", "sa": "scales_a", "sb": "scales_b", "out": "out_dtype"}


@pytest.mark.parametrize("wrong", WRONG_GEMM)
def test_refused_gemms(wrong):
    for arch, double, call, names in (
        ("sm_90", "vllm_gemm_moe", vllm_gemm, VLLM_NAMES),
        ("sm_120", "sglang_gemm", sglang_gemm, SGLANG_NAMES),
    ):
        with lent("cuda", arch, double), pytest.raises((RuntimeError, AssertionError)):
            o, _ = operands(8, 384, 256)
            call(o, **{names[name]: value for name, value in WRONG_GEMM[wrong](o).items()})


def test_a_gap_between_rows_is_not_seen():
    """Both kernels take A for packed."""
    for arch, double, call, name in (
        ("sm_100", "vllm_gemm_moe", vllm_gemm, "a"),
        ("sm_120", "sglang_gemm", sglang_gemm, "mat_a"),
    ):
        with lent("cuda", arch, double):
            o, product = operands(8, 128, 256)
            gapped = torch.randn(8, 512).to(FP8)[:, :256].copy_(o["a"])
            assert not close(call(o, **{name: gapped}), product)


def test_vllm_gemm_where_scales_are_not_of_blocks():
    with lent("cuda", "sm_90", "vllm_gemm_moe"):
        from vllm._custom_ops import cutlass_scaled_mm_supports_block_fp8

        assert cutlass_scaled_mm_supports_block_fp8(90) and not cutlass_scaled_mm_supports_block_fp8(89)
        with pytest.raises(NotImplementedError):
            vllm_gemm(operands(8, 128, 128)[0])
        with pytest.raises(NotImplementedError):
            vllm_gemm(operands(8, 136, 256)[0])
        with pytest.raises(RuntimeError, match="Bias"):
            vllm_gemm(operands(8, 256, 256)[0], bias=torch.zeros(256, dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", SGLANG)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (7, 128, 384), (260, 256, 640)])
def test_sglang_gemm(arch, m, n, k):
    with lent("cuda", arch, "sglang_gemm"):
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8_row_padded

        o, product = operands(m, n, k)
        assert close(sglang_gemm(o), product)
        assert m == 1 or not close(sglang_gemm(o, scales_a=o["sa"]), product)
        assert n == 128 or not close(sglang_gemm(o, scales_b=o["sb"].T.contiguous()), product)
        x = torch.randn(m, k)
        values, scale = sglang_per_token_group_quant_fp8_row_padded(x, 128)
        assert scale.stride() == (1, values.shape[0]) and values.shape[0] % 4 == 0
        right = o["b"].double() * wide(o["sb"], 128, (n, k))
        assert close(sglang_gemm(o, mat_a=values, scales_a=scale)[:m], x.double() @ right.T, 0.05)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx942"])
def test_sglang_gemm_is_of_sm_120(arch):
    with lent("cuda", arch, "sglang_gemm"), pytest.raises(RuntimeError, match="SM120"):
        sglang_gemm(operands(8, 256, 256)[0])


TOKENS, EXPERTS, TOPK, HIDDEN, INTER = 12, 4, 2, 512, 512


def experts() -> dict[str, torch.Tensor]:
    """A layer whose scales are powers of two, and the answer of exact arithmetic."""
    o = {"x": torch.randn(TOKENS, HIDDEN).bfloat16(), "weights": torch.rand(TOKENS, TOPK)}
    o["ids"] = torch.stack([torch.randperm(EXPERTS - 1)[:TOPK] for _ in range(TOKENS)]).int()
    for name, shape in (("w13", (EXPERTS, 2 * INTER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INTER))):
        o[name] = torch.randn(shape).to(FP8)
        o[f"s{name}"] = 2.0 ** torch.randint(-6, -3, (shape[0], shape[1] // 128, shape[2] // 128)).float()
    w13 = o["w13"].double() * wide(o["sw13"], 128, o["w13"].shape)
    w2 = o["w2"].double() * wide(o["sw2"], 128, o["w2"].shape)
    o["answer"] = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for weight, expert in zip(o["weights"][token].double(), o["ids"][token].tolist(), strict=True):
            gate, up = (w13[expert] @ o["x"][token].double()).chunk(2)
            o["answer"][token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return o


def vllm_moe(o: dict[str, torch.Tensor], arch: str, psum: bool, **changed: Any) -> torch.Tensor:
    """DeepGemmExperts.apply of vLLM."""
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
        deepgemm_moe_permute,
        deepgemm_unpermute_and_reduce,
    )
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm

    w13, w2, sw13, sw2 = fp8_utils.prepare_fp8_moe_layer_for_deepgemm(
        o["w13"].clone(), o["w2"].clone(), o["sw13"].clone(), o["sw2"].clone(), (128, 128)
    )
    assert sw13.dtype == (torch.float32 if arch == "sm_90" else torch.int32)
    a, sa = fp8_utils.per_token_group_quant_fp8(o["x"], 128)
    given = {"aq": a, "aq_scale": sa, "topk_ids": o["ids"], "local_num_experts": EXPERTS} | changed
    rows, scales, layout, places, align = deepgemm_moe_permute(
        **given, expert_map=None, expert_tokens_meta=None, use_psum_layout=psum
    )
    kwargs = {"use_psum_layout": True} if psum else {}
    with deep_gemm.mk_alignment_scope(align):
        first = torch.full((rows.shape[0], 2 * INTER), torch.nan, dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((rows, scales), (w13, sw13), first, layout, **kwargs)
        ends = {"expert_ends": layout, "expert_alignment": align} if psum else {}
        if deep_gemm.DeepGemmQuantScaleFMT.from_oracle() is deep_gemm.DeepGemmQuantScaleFMT.UE8M0:
            mid, smid = fp8_utils.silu_mul_quant_fp8_packed_triton(first, **ends)
        else:
            mid, smid = fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(first, **ends)
        second = torch.full((rows.shape[0], HIDDEN), torch.nan, dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((mid, smid), (w2, sw2), second, layout, **kwargs)
    output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    deepgemm_unpermute_and_reduce(second, o["ids"], o["weights"], places, None, output)
    return output


@pytest.mark.parametrize("arch", MOE)
def test_vllm_moe(arch):
    with lent("cuda", arch, "vllm_gemm_moe", "deep_gemm"):
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        o = experts()
        assert close(vllm_moe(o, arch, psum=True), o["answer"], 0.08)
        assert close(vllm_moe(o, arch, psum=False), o["answer"], 0.08)
        turned = o["ids"].T.contiguous().T
        assert not close(vllm_moe(o | {"ids": turned}, arch, psum=True), o["answer"], 0.08)
        _, scale = per_token_group_quant_fp8(o["x"], 128, column_major_scales=True)
        assert not close(vllm_moe(o, arch, psum=True, aq_scale=scale), o["answer"], 0.08)  # wants rows
        with pytest.raises(AssertionError):
            vllm_moe(o, arch, psum=True, topk_ids=o["ids"].to(torch.uint8))


@pytest.mark.parametrize("arch", MOE)
def test_vllm_moe_of_half_the_experts(arch):
    """Ids that the map sends to -1 are neither scattered nor gathered."""
    with lent("cuda", arch, "vllm_gemm_moe", "deep_gemm"):
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
            deepgemm_moe_permute,
            deepgemm_unpermute_and_reduce,
        )

        ids = torch.tensor([[0, 3], [2, 3], [1, -1]])
        table = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
        a, scale = torch.randn(3, 256).to(FP8), torch.rand(3, 2)
        rows, scales, layout, places, align = deepgemm_moe_permute(a, scale, ids, 2, table, None)
        assert layout[0] == 0 and layout[1] == -1 and layout[align : align + 3].tolist() == [1, 1, -1]
        assert (
            torch.equal(rows[places[1, 0]].float(), a[1].float()) and scales[places[0, 1], 1] == scale[0, 1]
        )
        output = torch.empty(3, 256, dtype=torch.bfloat16)
        weights = torch.rand(3, 2)
        deepgemm_unpermute_and_reduce(rows.bfloat16(), ids, weights, places, table, output)
        expected = torch.stack(
            (weights[0, 1] * a[0].float(), weights[1].sum() * a[1].float(), a[2].float() * 0)
        )
        assert close(output, expected)


def test_vllm_without_deep_gemm():
    with lent("cuda", "sm_90", "vllm_gemm_moe"):
        from vllm.utils import deep_gemm

        assert not deep_gemm.is_deep_gemm_supported()
        with pytest.raises(RuntimeError, match="unavailable"):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(None, None, None, None)


def sglang_weights(o: dict[str, torch.Tensor], arch: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    import deep_gemm

    def ready(name: str) -> torch.Tensor:
        if arch == "sm_90":
            return o[f"s{name}"]
        _, n, k = o[name].shape
        return deep_gemm.transform_sf_into_required_layout(
            o[f"s{name}"], n, k, (1, 128, 128), num_groups=EXPERTS, is_sfa=False
        )

    return {name: (o[name], ready(name)) for name in ("w13", "w2")}


def sglang_compact(o: dict[str, torch.Tensor], arch: str) -> torch.Tensor:
    """pre_permute_standard_to_deep_gemm, _run_contiguous_gemm and the post-permutation of SGLang."""
    from sglang.kernels.ops.activation.activation import silu_and_mul
    from sglang.kernels.ops.moe import ep_moe_kernels as moe
    from sglang.kernels.ops.moe.triton_pad_expert_counts import pad_expert_counts
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.srt.layers import deep_gemm_wrapper as wrapper

    ue8m0, weights = wrapper.DEEPGEMM_SCALE_UE8M0, sglang_weights(o, arch)
    layout = {"column_major_scales": ue8m0, "scale_tma_aligned": ue8m0, "scale_ue8m0": ue8m0}
    block = wrapper.get_contiguous_layout_alignment(TOKENS * TOPK, EXPERTS)
    tokens = block * (EXPERTS + (TOKENS * TOPK - EXPERTS) // block)
    valid, _ = moe.fused_moe_dispatch_index(o["ids"], EXPERTS, 1)
    a, sa = sglang_per_token_group_quant_fp8(o["x"], 128, **layout)
    rows = torch.full((tokens, HIDDEN), torch.nan).to(FP8)
    groups = HIDDEN // 128
    scales = (
        torch.zeros(tokens, groups) if not ue8m0 else torch.zeros(groups // 4, tokens, dtype=torch.int32).T
    )
    indices = torch.empty(tokens, dtype=torch.int32)
    places = torch.empty_like(o["ids"])
    moe.ep_scatter(
        a,
        sa,
        o["ids"],
        pad_expert_counts(valid, block, tokens),
        valid,
        torch.empty(EXPERTS, dtype=torch.int32),
        rows,
        scales,
        indices,
        places,
        scale_ue8m0=ue8m0,
        expert_alignment=block,
    )
    with wrapper.contiguous_layout_alignment_scope(block):
        first = torch.empty(tokens, 2 * INTER, dtype=torch.bfloat16)
        scales = scales if ue8m0 else moe.tma_align_input_scale(scales)
        wrapper.grouped_gemm_nt_f8f8bf16_contig((rows, scales), weights["w13"], first, indices)
        mid = torch.empty(tokens, INTER, dtype=torch.bfloat16)
        silu_and_mul(first, mid)
        mid, scales = sglang_per_token_group_quant_fp8(mid, 128, **layout)
        scales = scales if ue8m0 else moe.tma_align_input_scale(scales)
        second = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
        wrapper.grouped_gemm_nt_f8f8bf16_contig((mid, scales), weights["w2"], second, indices)
    output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    moe.post_reorder_deepgemm(second, output, places, o["ids"], o["weights"], TOPK, TOKENS, HIDDEN, 1.0)
    gathered = torch.empty_like(output)
    moe.ep_gather(second, o["ids"], o["weights"], places, gathered)
    assert torch.equal(output, gathered)
    return output


def sglang_masked(o: dict[str, torch.Tensor], arch: str, by_triton: bool = False) -> torch.Tensor:
    """moe_ep_deepgemm_preprocess, _run_masked_gemm and the post-permutation of SGLang."""
    from sglang.kernels.ops.moe import ep_moe_kernels as moe
    from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant
    from sglang.srt.layers import deep_gemm_wrapper as wrapper

    weights, ue8m0 = sglang_weights(o, arch), wrapper.DEEPGEMM_SCALE_UE8M0
    masked_m, expected_m, places, rows, scales = moe.moe_ep_deepgemm_preprocess(
        o["ids"], EXPERTS, o["x"], TOPK, [128, 128]
    )
    if not ue8m0:
        scales = wrapper.get_mn_major_tma_aligned_tensor(scales)
    first = torch.empty(EXPERTS, rows.shape[1], 2 * INTER, dtype=torch.bfloat16)
    wrapper.grouped_gemm_nt_f8f8bf16_masked((rows, scales), weights["w13"], first, masked_m, expected_m)
    if by_triton:
        mid = torch.empty(*first.shape[:2], INTER, dtype=FP8)
        shape = (EXPERTS, 1, mid.shape[1]) if ue8m0 else (EXPERTS, mid.shape[1], 4)
        scales = torch.zeros(shape, dtype=torch.int32 if ue8m0 else torch.float32)
        sizes = {"num_real_tokens": TOKENS, "topk": TOPK} if ue8m0 else {}
        moe.silu_and_mul_masked_post_quant_fwd(first, mid, scales, 128, masked_m, scale_ue8m0=ue8m0, **sizes)
        scales = scales.mT if ue8m0 else wrapper.get_mn_major_tma_aligned_tensor(scales)
    else:
        mid, scales = per_token_group_quant(
            first, scale_ue8m0=ue8m0, fuse_silu_and_mul=True, masked_m=masked_m, column_major_scales=True
        )
    second = torch.full((EXPERTS, rows.shape[1], HIDDEN), torch.nan, dtype=torch.bfloat16)
    wrapper.grouped_gemm_nt_f8f8bf16_masked((mid, scales), weights["w2"], second, masked_m, expected_m)
    output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    moe.post_reorder_deepgemm(second, output, places, o["ids"], o["weights"], TOPK, TOKENS, HIDDEN, 1.0)
    return output


@pytest.mark.parametrize("arch", MOE)
def test_sglang_moe(arch):
    with lent("cuda", arch, "sglang_moe", "deep_gemm"):
        o = experts()
        assert close(sglang_compact(o, arch), o["answer"], 0.08)
        assert close(sglang_masked(o, arch), o["answer"], 0.08)
        assert close(sglang_masked(o, arch, by_triton=True), o["answer"], 0.08)
        assert platform.version("sglang") == "0.5.23"


@pytest.mark.parametrize("arch", MOE)
def test_sglang_moe_refuses(arch):
    with lent("cuda", arch, "sglang_moe", "deep_gemm"):
        from sglang.kernels.ops.moe import ep_moe_kernels as moe
        from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

        x = torch.randn(2, 8, 512).bfloat16()
        live = torch.tensor([3, 8], dtype=torch.int32)
        values, scale = per_token_group_quant(x, masked_m=live, fuse_silu_and_mul=True)
        assert values[0, 3:].float().isnan().all() and scale[0, 3:].isnan().all()
        with pytest.raises(RuntimeError, match="int32"):
            per_token_group_quant(x, masked_m=live.long(), fuse_silu_and_mul=True)
        with pytest.raises(ValueError, match="scale_ue8m0"):
            per_token_group_quant(x, values, scale, masked_m=live, fuse_silu_and_mul=True, scale_ue8m0=True)
        scales = torch.empty(2, 8, 2)
        with pytest.raises(AssertionError):
            moe.silu_and_mul_masked_post_quant_fwd(x.mT.contiguous().mT, values, scales, 128, live)
        packed = torch.empty(2, 1, 8, dtype=torch.int32)
        with pytest.raises(AssertionError, match="UE8M0"):
            moe.silu_and_mul_masked_post_quant_fwd(x, values, packed, 128, live)
        aligned = moe.tma_align_input_scale(torch.rand(5, 3))
        assert aligned.shape == (5, 3) and aligned.stride() == (1, 8)


@pytest.mark.parametrize("arch", MOE)
def test_the_psum_layout(arch):
    """Each expert's rows start at a multiple of the alignment; what lies between is of no account."""
    with lent("cuda", arch, "deep_gemm"):
        import deep_gemm

        o = experts()
        a, layout = torch.randn(256, HIDDEN).to(FP8), torch.tensor([3, 128, 130, 256], dtype=torch.int32)
        sa = torch.full((256, 4), torch.nan)
        sa[:3], sa[128:130] = 0.5, 2.0
        d = torch.zeros(256, 2 * INTER, dtype=torch.bfloat16)
        call = {"a": (a, sa), "b": (o["w13"], o["sw13"]), "d": d, "grouped_layout": layout}
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(**call, use_psum_layout=True)
        right = o["w13"].double() * wide(o["sw13"], 128, o["w13"].shape)
        assert close(d[:3], a[:3].double() * 0.5 @ right[0].T)
        assert close(d[128:130], a[128:130].double() * 2 @ right[2].T)
        for wrong in (layout.long(), layout[:3], torch.tensor([3, 3, 130, 256], dtype=torch.int32)):
            with pytest.raises(RuntimeError):
                deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                    **(call | {"grouped_layout": wrong}), use_psum_layout=True
                )
