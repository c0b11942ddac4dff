"""Kernels' names, as the libraries have them, and the classes that they belong to."""

from __future__ import annotations

import re

import pytest

from harness.serving.op_classes import OP_CLASSES
from harness.serving.trace.classify import (
    DECODE_ATTENTION,
    annotated_phase,
    attention_class,
    kernel_rules,
    marks_step,
    rule_of,
)

NAMES = {
    "block_scale_gemm": [
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 2112u, 7168u, 1u, 64u, 96u, 128u, "
        "(deep_gemm::GemmType)0>(float*, int*)",
        "void deep_gemm::fp8_gemm_kernel<7168u, 2304u, 128u, 128u, 128u, 1u, 5u, (deep_gemm::GemmType)0>(x)",
        "void deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl<0u, 24576u, 1536u, (deep_gemm::GemmType)0>(x)",
        "_w8a8_block_fp8_matmul",
        "_w8a8_triton_block_scaled_mm",
        "_gemm_a8w8_blockscale_kernel",
        "_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_128x128E",
        "_ZN2ck27kernel_gemm_xdl_cshuffle_v3INS_39GridwiseGemmMultiD_ABScale_xdl_cshuffle_v3I",
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(x)",
        "_C::fp8_scaled_mm_cpu",
    ],
    "fused_moe": [
        "fused_moe_kernel",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 32u, 64u, (deep_gemm::GemmType)2>(x)",
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 32u, (deep_gemm::GemmType)1>(x)",
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::m_grouped_fp8_ptp128c::GemmKernel>(x)",
        "_ZN5aiter56fmoe_bf16_pertokenFp8_blockscale_g1u1_vs_silu_1tg_ps_32x256E",
        "_ZN5aiter50fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_32x128E",
        "void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemm<ck::tensor_layout::gemm::RowMajor>>(x)",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_transOut_schedP2x1x2x3_swiGlu_dynBatch_sm100f",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
        "_C::fused_experts_cpu",
        "_silu_mul_fp8_quant_deep_gemm",
    ],
    "mla_decode": [
        "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8, 512>>(x)",
        "void flash_fwd_mla_combine_kernel<float, cutlass::bfloat16_t, long, 512, 32>(Flash_fwd_mla_params)",
        "get_mla_metadata_kernel(Mla_metadata_params)",
        "void flashinfer::mla::BatchMLAPagedAttentionKernel<x>(x)",
        "_ZN5aiter39mla_a8w8_qh16_qseqlen1_gqaratio16_lse_psE",
        "_ZN5aiter37mla_dec_stage1_bf16_a16w16_subQ16_mqa16E",
        "void kn_mla_reduce_v1_ps<MlaReduceKernelV1Traits<512, 16>>(x)",
        "_C::mla_decode_kvcache",
        "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKvDenseP64VarSeqQ16Kv128Static",
    ],
    "mha_decode": [
        "void vllm::paged_attention_v2_kernel<__nv_bfloat16, __nv_bfloat16, 128, 16, 128>(x)",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0, "
        "ck_tile::ComposedAttention<0u>>(x)",
        "_ZN5aiter32pa_bf16_pertokenFp8_gqa8_2tg_4wE",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<x>(x)",
        "kernel_mha",
    ],
    "mha_prefill": [
        "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>(x)",
        "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelI",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelI",
        "_ZN5aiter36fmha_fwd_hd192_hd128_bf16_causal_rtneE",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<x>(x)",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "_fwd_kernel",
        "attn_fwd",
        "_ZN5aiter33mla_pfl_qh192_vh128_m32x8_n128x1E",
    ],
    "attention": [
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>(x)",
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(x)",
        "kernel_unified_attention_3d",
        "reduce_segments",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<x>(x)",
    ],
    DECODE_ATTENTION: ["_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"],
    "absorbed_bmm": [
        "_batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant_kernel",
        "aten::bmm",
    ],
    "scaled_gemm": [
        "nvjet_qqtst_128x64_128x6_2x1_v_bz_TNT",
        "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_96x640E",
        "Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x128_MI16x16x1",
        "_gemm_afp4wfp4_kernel",
        "void marlin::Marlin<__nv_bfloat16, 256, 1, 8>(x)",
        "aten::_scaled_mm",
    ],
    "bf16_gemm": [
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "sm90_xmma_gemm_bf16f32_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1_cublas",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)",
        "void router_gemm_kernel_float_output<__nv_bfloat16, 128, 8, 1, 256, 7168>(float*)",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(x)",
        "_C::weight_packed_linear",
    ],
    "moe_routing": [
        "void vllm::moe::topkGatingSoftmax<8, 256, 4, 16, 32, int>(x)",
        "void moe_fused_gate_kernel<float, 8, 256>(x)",
        "void vllm::moe::grouped_topk_fused_kernel<float, float, int>(x)",
        "void moe_align_block_size_kernel<int>(x)",
        "void count_and_sort_expert_tokens_kernel<int>(x)",
        "_ZN7ck_tile6kentryILi1ENS_16MoeSortingKernelI",
        "void moe::dev::routing::routingIndicesHistogramKernel<x>(x)",
        "_fwd_kernel_ep_scatter_1",
        "aten::topk",
    ],
    "quantise": [
        "void per_token_group_quant_8bit_kernel<__nv_bfloat16, __nv_fp8_e4m3, true>(x)",
        "_per_token_group_quant_fp8_colmajor",
        "void aiter::dynamic_per_group_scaled_quant_kernel<__hip_bfloat16>(x)",
        "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>(x)",
        "void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128, false>(x)",
    ],
    "norm": [
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x)",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8E",
        "_fused_rms_fp8_group_quant_kernel",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
    ],
    "rope_kv": [
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(x)",
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, 0>(x)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)",
        "set_mla_kv_buffer_kernel",
        "void kn_entry_2c_sbhd_cached_indirect_inplace<aiter::OpCachedFwd>(x)",
        "_fused_qk_rope_cat_and_cache_mla_kernel",
    ],
    "activation": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(x)",
        "_act_mul_and_dynamic_fp8_group_quant_kernel",
        "triton_poi_fused_mul_silu_slice_1",
    ],
    "all_reduce": [
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(x)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(x)",
        "void aiter::local_device_load_rmsnorm_naive<__hip_bfloat16>(x)",
    ],
    "all_to_all": [
        "void deep_ep::internode_ll::dispatch<true, false, 7168>(x)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(x)",
        "void dpsk::ep::internode::cached_notify<false>(x)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "void mori::moe::EpDispatchInterNodeV1KernelLowLatency<x>(x)",
    ],
    "sampling": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<x, at::native::ArgMaxOps<float>>>(x)",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(x)",
        "_C::fused_gumbel_argmax",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "__amd_rocclr_fillBufferAligned",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::Tensor)>(x)",
        "triton_poi_fused__to_copy_1",
        "aten::copy_",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(x)",
        "triton_poi_fused_add_bitwise_and_ge_lt_mul_sub_0",
        "aten::add",
    ],
    "unknown": ["igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32", "my_own_kernel", "aten::conv2d", ""],
}  # fmt: skip


@pytest.mark.parametrize("op_class", NAMES)
def test_names_of_a_class(op_class: str) -> None:
    found = {
        name: rule_of(name, name if "::" in name and "(" not in name else "").op_class
        for name in NAMES[op_class]
    }
    assert found == dict.fromkeys(NAMES[op_class], op_class)


def test_every_rule_has_a_class_and_a_library() -> None:
    for rule in kernel_rules():
        assert rule.op_class in (*OP_CLASSES, DECODE_ATTENTION)
        assert rule.library
        assert not rule.pattern.search(""), "a rule that fits anything hides what is unknown"


def test_a_product_that_bmm_launched_is_the_absorbed_one() -> None:
    name = "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_TNT"
    assert rule_of(name, "aten::bmm").op_class == "absorbed_bmm"
    assert rule_of(name, "aten::mm").op_class == "bf16_gemm"


@pytest.mark.parametrize(
    ("annotation", "phase"),
    [
        ("execute_context_1(2)_generation_0(0)", "prefill"),
        ("execute_context_0(0)_generation_31(31)", "decode"),
        ("execute_context_2(512)_generation_30(30)", "mixed"),
        ("execute_context_0(0)_generation_0(0)", "other"),
        ("execute_8192_context_9(sq8155sk8430sqsq7475785)_generation_37(sq37sk34489)", "mixed"),
        ("execute_context_1(888_788544)_generation_0(0)", "prefill"),
        ("step[EXTEND bs=15 toks=15360]", "prefill"),
        ("step[DECODE bs=64]", "decode"),
        ("step[TARGET_VERIFY bs=4]", "decode"),
        ("step[MIXED bs=5 c=2 g=3]", "mixed"),
        ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", "prefill"),
        ("decode[bs=117/128 tok=117 d=117]", "decode"),
        ("[Executor] _forward_step 12: 0 ctx reqs, 0 ctx tkns, 8 gen reqs", "decode"),
        ("[Executor] _forward_step: 1 ctx reqs, 8 gen reqs", "mixed"),
        ("execute_new_1_cached_3", None),
        ("ProfilerStep#3", None),
    ],
)  # fmt: skip
def test_annotations(annotation: str, phase: str | None) -> None:
    assert marks_step(annotation)
    assert annotated_phase(annotation) == phase


@pytest.mark.parametrize(
    "annotation", ["attn(F)", "nccl:all_reduce", "gpu_model_runner: forward", "## Call x ##"]
)
def test_other_annotations_mark_no_step(annotation: str) -> None:
    assert not marks_step(annotation)


def test_attention_for_both_is_told_by_the_step_and_the_model() -> None:
    assert attention_class("attention", "decode", latent=False) == "mha_decode"
    assert attention_class("attention", "decode", latent=True) == "mla_decode"
    assert attention_class("attention", "prefill", latent=True) == "mha_prefill"
    assert attention_class("attention", "mixed", latent=True) == "attention"
    assert attention_class(DECODE_ATTENTION, "mixed", latent=True) == "mla_decode"
    assert attention_class("norm", "decode", latent=True) == "norm"


def test_the_patterns_are_of_names_not_of_one_character() -> None:
    for rule in kernel_rules():
        assert not re.search(r"^\W?.?\W?$", rule.pattern.pattern)
