"""What the compiled MoE kernels behind moe_op.py do with their pointers. Not a module of AITER."""

import re

import torch

from .._kernel import as_fp8, cdiv, fp8, packed, quantise, raw, rows_scaled, tiles_scaled, unshuffle
from ..jit.utils.chip_info import get_gfx
from .enum import ActivationType, QuantType

# hsa/ARCH/fmoe/{silu,gelu}/fmoe_bf16_blockscale{Fp8,Bf16}_g1u1_*.csv, rows with vskip 1 and flat 0: rows per
# block to tiles of inter_dim. The input is FP8, or bf16 and quantised inside.
ONE_STAGE = {
    ("gfx942", "fp8"): {32: (128, 256), 64: (256,)},
    ("gfx942", "bf16"): {16: (128, 256)},  # silu alone
    ("gfx950", "fp8"): {16: (128, 256), 32: (128, 256, 384), 64: (128, 256, 384)},
    ("gfx950", "bf16"): {16: (128, 256), 32: (128, 256)},
}
# Some of the names in those tables that are on both architectures.
ONE_STAGE_NAMED = {
    "_ZN5aiter47fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256E": 32,
    "_ZN5aiter50fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256E": 32,
    "_ZN5aiter49fmoe_bf16_blockscaleFp8_g1u1_novs_silu_1tg_32x256E": 32,
}
# hsa/ARCH/fmoe_2stages/fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1.csv, some of it: tile_m, tile_n
ASM_STAGE1_NAMED = {
    "_ZN5aiter59fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_16x128_4tg_pf2E": (16, 128),
    "_ZN5aiter59fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_32x256_2tg_pf2E": (32, 256),
}
# csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py:184 and :309, named as in :66
CK_NAMED = re.compile(r"moe_ck2stages_gemm[12]_\d+x(16|32|64)x128x(128|256)_.*blkscale")


def _blocks(ids, experts, valid, weights, block, count):
    """Per block of `block` sorted slots: its expert, tokens, places in top-k, and routed weights. Slots past
    the valid part are not run."""
    end = int(valid[0])
    for tensor in (ids, experts, valid):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise RuntimeError("sorted ids would be misread: they must be contiguous int32")
    if not 0 <= end <= cdiv(len(ids), block) * block:
        raise RuntimeError("memory access fault: more valid ids than there are")
    for start in range(0, end, block):
        expert = int(experts[start // block])
        if not 0 <= expert < count:
            raise RuntimeError(f"memory access fault: expert {expert} of {count}")
        slots = ids[start : min(start + block, end)].long()
        w = None if weights is None else weights[start : min(start + block, end)].float()
        yield expert, slots & 0xFFFFFF, slots >> 24, w


def _weights(w, n, k):
    if w.shape[1:] != (n, k) or not w.is_contiguous():
        raise RuntimeError(f"weights {tuple(w.shape)} would be misread as [*, {n}, {k}]")
    return unshuffle(as_fp8(w, "weights"))


def _activate(product, activation):
    gate, up = product.chunk(2, -1)
    act = ActivationType(int(activation))
    if act not in (ActivationType.Silu, ActivationType.Gelu):
        raise RuntimeError(f"Unsupported activation: {act}")
    gated = torch.nn.functional.silu(gate) if act is ActivationType.Silu else torch.nn.functional.gelu(gate)
    return gated * up


def _requantised(x):
    values, scale = quantise(x.reshape(x.shape[0], -1, 128))
    return rows_scaled(values.reshape(x.shape), scale)


def one_stage(
    out,
    x,
    w1,
    w2,
    sorted_ids,
    sorted_weights,
    sorted_experts,
    valid,
    x_scale,
    w1_scale,
    w2_scale,
    name,
    blkn,
    blkk,
    smooth,
    activation,
    block,
):
    """csrc/py_itfs_cu/asm_fmoe.cu:894. Adds to `out`, which the sort has set to zero. x_scale is read
    column-major, [K/128, tokens]; an expert's weight scales begin stride(0) apart (:134)."""
    tokens, dim, inter = out.shape[0], w2.shape[1], w2.shape[2]
    if out.dtype != torch.bfloat16 or inter % 128 or (blkn, blkk) != (128, 128):
        raise RuntimeError("Unsupported the type for fmoe_fp8_blockscale_g1u1")
    if ActivationType(int(activation)) not in (ActivationType.Silu, ActivationType.Gelu):
        raise RuntimeError("Unsupported activation type for fmoe_fp8_blockscale_g1u1")
    kind = "bf16" if x.dtype == torch.bfloat16 else "fp8"
    table = ONE_STAGE[get_gfx(), kind]
    if (get_gfx(), kind, int(activation)) == ("gfx942", "bf16", ActivationType.Gelu.value):
        table = {}
    if name:
        if name not in ONE_STAGE_NAMED or kind == "bf16":
            raise RuntimeError(f"get_heuristic_kernel not find kernel {name}")
        block = ONE_STAGE_NAMED[name]  # the kernel's own, whatever the sort was made for
    elif not any(inter % tile == 0 for tile in table.get(block, ())):
        raise RuntimeError(f"No suitable kernel found for inter_dim: {inter} (block_size_M {block})")
    if dim % 128 or x.shape[1] != dim or x.stride(1) != 1 or not out.is_contiguous() or smooth is not None:
        raise RuntimeError(f"input {tuple(x.shape)}, out or a smooth scale would be misread")
    if tuple(out.shape) != (tokens, dim) or x.shape[0] < tokens:
        raise RuntimeError("out or input would be overrun")
    gate_up, down = _weights(w1, 2 * inter, dim), _weights(w2, dim, inter)
    if w1_scale.dtype != torch.float32 or w2_scale.dtype != torch.float32:
        raise RuntimeError("weight scales would be misread: they must be fp32")
    count, n, k = w1.shape[0], inter // 128, dim // 128
    s1 = raw(w1_scale, (count, 2 * n, k), (w1_scale.stride(0), k, 1))
    s2 = raw(w2_scale, (count, k, n), (w2_scale.stride(0), n, 1))
    if kind == "bf16":
        a = _requantised(x[:tokens].float())
    else:
        if x_scale.dtype != torch.float32:
            raise RuntimeError("input_scale would be misread: it must be fp32")
        a = rows_scaled(as_fp8(x, "input")[:tokens], packed(x_scale, k, tokens).T)
    total = out.float()
    for expert, token, _, weight in _blocks(sorted_ids, sorted_experts, valid, sorted_weights, block, count):
        kept = token < tokens
        token, weight = token[kept], weight[kept]
        hidden = _activate(a[token] @ tiles_scaled(gate_up[expert], s1[expert]).T, activation)
        if len(token):
            product = _requantised(hidden) @ tiles_scaled(down[expert], s2[expert]).T
            total.index_add_(0, token, product * weight[:, None])
    out.copy_(total)


def _ck_block(name, block, depth_of_16):
    """gen_instances.py:339 and :738: rows per block and K per tile, by the name or by block_m."""
    if named := CK_NAMED.match(name or ""):  # any other name is logged as not found and ignored
        return int(named[1]), int(named[2])
    if block not in (16, 32, 64):
        raise RuntimeError(f"Unsupported block_m value for moe heuristic dispatch: {block}")
    return block, depth_of_16 if block == 16 else 128


def _ck_checked(quant_type, *scales):
    if int(quant_type) != QuantType.per_1x128.value:  # no kernel of per_128x128's number is generated
        raise RuntimeError("Unsupported kernel config for moe heuristic dispatch")
    if any(s is None or s.dtype != torch.float32 for s in scales):
        raise RuntimeError("scales would be misread: they must be given, in fp32")


def ck_stage1(
    x, w1, w2, ids, experts, valid, out, topk, name, w_scale, x_scale, block, weights, quant, act, splits
):
    """csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages.cu:69, ..._common_blockscale.cuh:26. Row-major
    scales, read as contiguous; one output row per token and place. With splits > 1 the product alone, in
    fp32."""
    dtypes = (torch.float32,) if splits > 1 else (torch.bfloat16, torch.float16)
    if out.dtype not in dtypes:
        raise RuntimeError(f"Out dtype only support {dtypes}!")
    _ck_checked(quant, w_scale, x_scale)
    block, depth = _ck_block(name, block, 256)
    (tokens, k), count, inter = x.shape, w1.shape[0], w1.shape[1] // 2
    if k % depth or inter % 128:
        raise RuntimeError(
            "wrong! device_gemm with the specified compilation parameters does not support this GEMM "
            f"problem: K={k} must be a multiple of {depth}, inter_dim={inter} of 128"
        )
    gate_up = _weights(w1, 2 * inter, k)
    a = rows_scaled(packed(as_fp8(x, "hidden_states"), tokens, k), packed(x_scale, tokens, k // 128))
    scale = packed(w_scale, count, 2 * inter // 128, k // 128)
    rows = packed(out, tokens * topk, 2 * inter if splits > 1 else inter)
    for expert, token, place, weight in _blocks(ids, experts, valid, weights, block, count):
        kept = token < tokens
        product = a[token[kept]] @ tiles_scaled(gate_up[expert], scale[expert]).T
        result = product if splits > 1 else _activate(product, act)
        if weight is not None:
            result = result * weight[kept][:, None]
        rows[token[kept] * topk + place[kept]] = result.to(out.dtype)


def ck_stage2(x, w1, w2, ids, experts, valid, out, topk, name, w_scale, x_scale, block, weights, quant):
    """gemm_moe_ck2stages.cu:142. Adds to `out`, which the sort has set to zero. x [tokens, top_k, inter] with
    row-major scales [tokens * top_k, inter / 128]."""
    if out.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("Out dtype only support BFloat16/Float16!")
    _ck_checked(quant, w_scale, x_scale)
    (tokens, _, k), (count, dim, _) = x.shape, w2.shape
    block, depth = _ck_block(name, block, 256 if k % 256 == 0 else 128)
    if k % depth or dim % 128:
        raise RuntimeError(
            "wrong! device_gemm with the specified compilation parameters does not support this GEMM "
            f"problem: inter_dim={k} must be a multiple of {depth}, N={dim} of 128"
        )
    down = _weights(w2, dim, k)
    values = packed(as_fp8(x, "inter_states"), tokens * topk, k)
    a = rows_scaled(values, packed(x_scale, tokens * topk, k // 128))
    scale = packed(w_scale, count, dim // 128, k // 128)
    rows = packed(out, out.shape[0], dim)
    total = rows.float()
    for expert, token, place, weight in _blocks(ids, experts, valid, weights, block, count):
        kept = token < tokens
        product = a[token[kept] * topk + place[kept]] @ tiles_scaled(down[expert], scale[expert]).T
        total.index_add_(0, token[kept], product if weight is None else product * weight[kept][:, None])
    rows.copy_(total)


def asm_stage1(
    x, w1, w2, ids, experts, valid, out, inter, name, block, splits, act, quant, x_scale, w_scale, weights
):
    """csrc/py_itfs_cu/asm_moe_2stage.cu:150, for per_1x128: FP8 in `out` [tokens and some, top_k, inter_dim],
    and its scales as fp32 right behind the tokens (fused_moe.py:3321). x_scale column-major."""
    if int(quant) != QuantType.per_1x128.value or splits or out.dtype != fp8():
        raise NotImplementedError("the double has the block-scaled kernel without split-K alone")
    if name not in ASM_STAGE1_NAMED:
        raise RuntimeError(f"moe_stage1_g1u1 not find kernel {name}")
    tile_m, tile_n = ASM_STAGE1_NAMED[name]
    if inter % tile_n:
        raise RuntimeError(f"ASM kernel {name} is not supported for inter_dim={inter}")
    if block != tile_m:
        raise RuntimeError(f"moe_stage1_g1u1 kernel: {name} need block_m == {tile_m}")
    if x_scale.dtype != torch.float32 or w_scale.dtype != torch.float32:
        raise RuntimeError("moe_stage1_g1u1 expects fp32 scales")
    (tokens, k), topk, count = x.shape, out.shape[1], w1.shape[0]
    gate_up = _weights(w1, 2 * inter, k)
    a = rows_scaled(
        raw(as_fp8(x, "input"), (tokens, k), (x.stride(0), 1)), packed(x_scale, k // 128, tokens).T
    )
    scale = raw(w_scale, (count, 2 * inter // 128, k // 128), (w_scale.stride(0), k // 128, 1))
    rows = packed(out, tokens * topk, inter)
    behind = out[tokens:].view(-1)[: tokens * topk * inter // 128 * 4].view(torch.float32)
    behind = behind.view(tokens * topk, inter // 128)
    for expert, token, place, weight in _blocks(ids, experts, valid, weights, block, count):
        kept = token < tokens
        hidden = _activate(a[token[kept]] @ tiles_scaled(gate_up[expert], scale[expert]).T, act)
        if weight is not None:
            hidden = hidden * weight[kept][:, None]
        values, s = quantise(hidden.reshape(-1, inter // 128, 128))
        slots = token[kept] * topk + place[kept]
        rows.view(torch.uint8)[slots] = values.reshape(-1, inter).view(torch.uint8)
        behind[slots] = s
