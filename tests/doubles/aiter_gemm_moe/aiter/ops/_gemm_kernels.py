"""What the compiled GEMM kernels behind gemm_op_a8w8.py do with their pointers. Not a module of AITER."""

import torch

from .._kernel import as_fp8, cdiv, packed, raw, rows_scaled, tiles_scaled, unshuffle

# csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale.cu:74, ..._bpreshuffle.cu:59, ..._cktile.cu:59
CK_DEFAULT = (
    "a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1_1x16x1x16_8_1x2_intrawave_v1"
)
CK_BPRESHUFFLE_DEFAULT = (
    "a8w8_blockscale_bpreshuffle_1x128x128_256x64x64x128_16x16_16x16_8x32x1_8x32x1_1x32x1x8_8_2x1"
    "_intrawave_v1"
)
CKTILE_DEFAULT = "a8w8_blockscale_cktile_128x128x128_1x4x1_16x16x64_intrawave_0x1x0_1"
# csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py:83 rows 5 and 10; ..._cktile_instance.py:108
CK_BUILT = (
    CK_DEFAULT,
    "a8w8_blockscale_1x128x128_256x16x128x128_8x16_16x16_1x2_16x16x1_8x32x1_1x16x1x16_8_1x2_intrawave_v1",
    "a8w8_blockscale_1x128x128_256x32x128x128_16x16_32x32_1x1_8x32x1_8x32x1_1x32x1x8_8_1x1_intrawave_v1",
)
CK_BPRESHUFFLE_BUILT = (CK_BPRESHUFFLE_DEFAULT,)
CKTILE_BUILT = (CKTILE_DEFAULT, "a8w8_blockscale_cktile_16x128x256_1x4x1_16x16x64_intrawave_0x1x0_1")
# hsa/gfx942/fp8gemm_blockscale/fp8gemm_bf16_blockscale.csv, the same on gfx950: all with split-K, bpreshuffle
# 1
ASM_BUILT = {
    f"_ZN5aiter{43 if m == 128 else 42}fp8gemm_bf16_blockscale_BpreShuffle_{m}x128E"
    for m in (32, 48, 64, 80, 96, 128)
}


def _dtypes(XQ, WQ, x_scale, w_scale, Y):
    """gemm_a8w8_blockscale.cu:87 and its siblings."""
    if XQ.dtype != WQ.dtype:
        raise RuntimeError("Weights and activations should have the same dtype!")
    if x_scale.dtype != w_scale.dtype:
        raise RuntimeError("Scales should have the same dtype!")
    if x_scale.dtype != torch.float32 or Y.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("Unsupported scales/output dtype!")


def _sizes(XQ, WQ, Y):
    """The kernels take M and K from XQ, N from WQ, and believe that the rest agrees."""
    if XQ.dim() != 2 or WQ.dim() != 2 or XQ.shape[1] != WQ.shape[1]:
        raise RuntimeError(f"XQ {tuple(XQ.shape)} and WQ {tuple(WQ.shape)} would be misread")
    if tuple(Y.shape) != (XQ.shape[0], WQ.shape[0]):
        raise RuntimeError(f"an output of {tuple(Y.shape)} would be overrun")
    return XQ.shape[0], WQ.shape[0], XQ.shape[1]


def _built(kernelName, built, default):
    if kernelName and kernelName not in built:
        raise RuntimeError(
            f"kernel '{kernelName}' is not present in the compiled registry. The tuned CSV references a "
            "kernel that was not built into aiter."
        )
    return kernelName or default


def _ck_supported(name, n, k, splits):
    """CK's CheckValidity (gridwise_gemm_xdl_cshuffle_v3_multi_d_ab_scale.hpp) with the padding that
    csrc/ck_gemm_a8w8_blockscale/gen_instances.py:94 and ..._bpreshuffle/gen_instances.py:68 choose: what the
    tile does not divide is padded, so K need only be whole vectors, and N whole stores."""
    fields = name.split("_")
    block_k = int(next(f for f in fields if f.count("x") == 3).split("x")[3])
    vectors = [int(v) for v in fields[fields.index("1x128x128") + 2].split("x")]
    store, version = int(fields[-4]), fields[-1]
    ok = all(k % v == 0 for v in vectors) and n % store == 0
    if k % block_k == 0:
        ok = ok and k % (splits * block_k) == 0
    else:
        ok = ok and cdiv(k, splits * max(vectors)) * max(vectors) * (splits - 1) < k
    if version != "v1":  # pipelines that prefetch two tiles need more
        ok = ok and cdiv(k, splits * block_k) > 2
    if not ok:
        raise RuntimeError("This GEMM is not supported!")


def ck(XQ, WQ, x_scale, w_scale, Y, splitK, kernelName):
    """gemm_a8w8_blockscale_common.cuh:123: row strides of XQ and WQ are honoured, their inner stride is taken
    to be 1; scales are read and Y is written as contiguous row-major, whatever their strides."""
    _dtypes(XQ, WQ, x_scale, w_scale, Y)
    if not 0 <= splitK <= 30:
        raise RuntimeError(f"splitK must be in the range [0, 30], got {splitK}")
    m, n, k = _sizes(XQ, WQ, Y)
    _ck_supported(_built(kernelName, CK_BUILT, CK_DEFAULT), n, k, 1 << splitK)
    a = raw(as_fp8(XQ, "XQ"), (m, k), (XQ.stride(0), 1))
    b = raw(as_fp8(WQ, "WQ"), (n, k), (WQ.stride(0), 1))
    x_scale, w_scale = packed(x_scale, m, cdiv(k, 128)), packed(w_scale, cdiv(n, 128), cdiv(k, 128))
    packed(Y, m, n).copy_(rows_scaled(a, x_scale) @ tiles_scaled(b, w_scale).T)
    return Y


def _shuffled_weight(WQ, n, k, depth):
    """The kernel walks tiles of 16 rows and `depth` of K: what they do not divide would be misread."""
    if n % 16 or k % depth:
        raise RuntimeError(f"a preshuffled weight of N={n} K={k} would be misread: N % 16, K % {depth}")
    return unshuffle(packed(as_fp8(WQ, "WQ"), n, k))


def ck_bpreshuffle(XQ, WQ, x_scale, w_scale, Y, kernelName):
    """gemm_a8w8_blockscale_bpreshuffle_common.cuh:118. x_scale is read as column-major storage, whatever its
    strides (both forms in op_tests/test_gemm_a8w8_blockscale.py:113-139 are right)."""
    _dtypes(XQ, WQ, x_scale, w_scale, Y)
    m, n, k = _sizes(XQ, WQ, Y)
    _ck_supported(_built(kernelName, CK_BPRESHUFFLE_BUILT, CK_BPRESHUFFLE_DEFAULT), n, k, 1)
    a = raw(as_fp8(XQ, "XQ"), (m, k), (XQ.stride(0), 1))
    b = _shuffled_weight(WQ, n, k, 64)  # 4 K-lanes of 16 bytes: the 16x16 MFMA of every instance in the list
    x_scale, w_scale = packed(x_scale, cdiv(k, 128), m).T, packed(w_scale, cdiv(n, 128), cdiv(k, 128))
    packed(Y, m, n).copy_(rows_scaled(a, x_scale) @ tiles_scaled(b, w_scale).T)
    return Y


def cktile(XQ, WQ, x_scale, w_scale, Y, preshuffled, splitK, kernelName):
    """gemm_a8w8_blockscale_cktile_common.cuh:276-423. Leading strides of all five tensors are honoured.
    Neither kernel here has eight waves, so a column-major x_scale of a preshuffled call is transposed through
    `.view` (line 353), which takes the contiguous form alone."""
    _dtypes(XQ, WQ, x_scale, w_scale, Y)
    if not 0 <= splitK <= 30:
        raise RuntimeError(f"splitK must be in the range [0, 30], got {splitK}")
    m, n, k = _sizes(XQ, WQ, Y)
    for what, tensor in (("XQ", XQ), ("WQ", WQ), ("Y", Y)):
        if tensor.stride(-1) != 1:
            raise RuntimeError(f"CKTile blockscale GEMM: {what} inner dim must be contiguous")
    block_k = int(_built(kernelName, CKTILE_BUILT, CKTILE_DEFAULT).split("_")[3].split("x")[2])
    splits = 1 << splitK
    # CK's QuantGemmKernel::IsSupportedArgument: pad_k is chosen by K % 128 alone (line 255)
    if k % 16 or (k % 128 == 0 and k % (splits * block_k)) or n % 8:
        raise RuntimeError("Wrong! Arguments not supported! Skipping gemm!\n")
    stride = x_scale.stride(0)
    if preshuffled:
        x_scale = x_scale.view(x_scale.size(1), x_scale.size(0)).transpose(0, 1).contiguous()
        b = _shuffled_weight(WQ, n, k, 64)
    else:
        b = raw(as_fp8(WQ, "WQ"), (n, k), (WQ.stride(0), 1))
    a = raw(as_fp8(XQ, "XQ"), (m, k), (XQ.stride(0), 1))
    x_scale = raw(x_scale, (m, cdiv(k, 128)), (stride, 1))
    w_scale = raw(w_scale, (cdiv(n, 128), cdiv(k, 128)), (w_scale.stride(0), 1))
    raw(Y, (m, n), (Y.stride(0), 1)).copy_(rows_scaled(a, x_scale) @ tiles_scaled(b, w_scale).T)
    return Y


def asm_bpreshuffle(A, B, out, A_scale, B_scale, bias, splitK, kernelName, bpreshuffle):
    """asm_a8w8_blockscale_bpreshuffle.cu:61 validate_inputs, :266 entry. splitK counts splits here (1 is
    none), where CK's is a power of two."""
    if out.dtype != torch.bfloat16:
        raise RuntimeError("MI308 A8W8 blockscale asm only support BFloat16 output now!")
    for what, tensor in (("A", A), ("B", B)):
        if as_fp8(tensor, what).dtype != tensor.dtype:
            raise RuntimeError("MI308 A8W8 blockscale asm requires FP8 input tensors!")
    m, n, k = _sizes(A, B, out)
    if n % 128 or k % 128:
        raise RuntimeError("MI308 A8W8 blockscale asm only support 128nx128k tile now!")
    if A_scale.dtype != torch.float32 or B_scale.dtype != torch.float32:
        raise RuntimeError("scales would be misread: they must be fp32")
    if not bpreshuffle:
        raise RuntimeError("get_heuristic_fp8_kernel: cannot get heuristic kernel!")
    if kernelName and kernelName not in ASM_BUILT:
        raise RuntimeError(f"gemm_a8w8_blockscale_bpreshuffle_asm not find kernel {kernelName}")
    splits = splitK if splitK > 0 else 1
    if splitK >= 0 and cdiv(k, cdiv(cdiv(k, splits), 128) * 128) != splits:  # lines 315-330
        raise RuntimeError(f"Kdim alignment check failed for splitK! Kdim={k}, selectedsplitK={splits}")
    if A.stride(1) != 1 or out.stride(1) != 1:
        raise RuntimeError("inner strides are taken to be 1: A or out would be misread")
    if not B.is_contiguous():
        raise RuntimeError("a preshuffled B that is not contiguous would be misread")
    a = raw(A, (m, k), (A.stride(0), 1))
    x_scale, w_scale = packed(A_scale, k // 128, m).T, packed(B_scale, n // 128, k // 128)
    result = rows_scaled(a, x_scale) @ tiles_scaled(_shuffled_weight(B, n, k, 32), w_scale).T
    if bias is not None:  # [1, N] fp32
        result = result + packed(bias.float(), 1, n)
    raw(out, (m, n), (out.stride(0), 1)).copy_(result)
