"""aiter/fused_moe.py: a whole MoE layer after routing, for FP8 with one scale per 128x128 of the weights."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

import aiter
from aiter import ActivationType, QuantType, dtypes
from aiter import get_hip_quant as get_quant
from aiter.jit.core import AITER_CONFIGS
from aiter.jit.utils.chip_info import get_cu_num, get_gfx, get_gfx_runtime, gfx_from_cu_num
from aiter.jit.utils.torch_guard import torch_compile_guard

BLOCK_SIZE_M = 32  # fused_moe.py:51

kernel_bench_callable = None  # fused_moe.py:77: a list here collects (stage, callable)


class GateMode(Enum):
    """aiter/ops/flydsl/moe_common.py."""

    SEPARATED = "separated"
    INTERLEAVE = "interleave"


def moe_sorting(
    topk_ids,
    topk_weights,
    num_experts,
    model_dim,
    moebuf_dtype,
    block_size=BLOCK_SIZE_M,
    expert_mask=None,
    num_local_tokens=None,
    dispatch_policy=0,
    return_local_topk_ids=False,
    accumulate=True,
    flat=False,
    output_aux=False,
):
    """fused_moe.py:341: sorted_ids, sorted_weights, sorted_expert_ids, num_valid_ids, and an output buffer
    set to zero. accumulate since v0.1.17, output_aux since v0.1.19. num_experts counts all ranks' with a
    mask. sglang 0.5.23 puts its own in place of `_moe_sorting_impl`, so that is what is called."""
    if flat:
        raise NotImplementedError("the double has no kernel that routes by itself")
    return _moe_sorting_impl(
        topk_ids,
        topk_weights,
        num_experts,
        model_dim,
        moebuf_dtype,
        block_size,
        expert_mask,
        num_local_tokens,
        dispatch_policy,
        use_opus=os.environ.get("AITER_USE_CK_MOE_SORTING", "0") != "1",
        return_local_topk_ids=return_local_topk_ids,
        accumulate=accumulate,
        output_aux=output_aux,
    )


def _moe_sorting_impl(
    topk_ids,
    topk_weights,
    num_experts,
    model_dim,
    moebuf_dtype,
    block_size,
    expert_mask,
    num_local_tokens,
    dispatch_policy,
    use_opus,
    return_local_topk_ids=False,
    accumulate=True,
    output_aux=False,
):
    """fused_moe.py:175."""
    if return_local_topk_ids or output_aux:
        raise NotImplementedError("the double sorts without the extras")
    M, topk = topk_ids.shape
    device = topk_ids.device
    padded = int(topk_ids.numel() + num_experts * block_size - topk)
    blocks = int((padded + block_size - 1) // block_size)
    poison = torch.iinfo(torch.int32).min // 2  # the real ones are torch.empty
    ids = torch.full((padded,), poison, dtype=dtypes.i32, device=device)
    weights = torch.full((padded,), float("nan"), dtype=dtypes.fp32, device=device)
    experts = torch.full((blocks,), poison, dtype=dtypes.i32, device=device)
    valid = torch.empty(2, dtype=dtypes.i32, device=device)
    shape = (M, model_dim) if expert_mask is not None or accumulate else (0, 0)
    moe_buf = torch.full(shape, float("nan"), dtype=moebuf_dtype, device=device)
    arguments = (topk_ids, topk_weights, ids, weights, experts, valid, moe_buf, num_experts, int(block_size))
    arguments += (expert_mask, num_local_tokens)
    if use_opus:
        size = aiter.moe_sorting_opus_get_workspace_size(M, num_experts, topk, dispatch_policy)
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size > 0 else None
        aiter.moe_sorting_opus_fwd(*arguments, workspace, dispatch_policy, None, None, None)
    else:
        aiter.moe_sorting_fwd(*arguments, dispatch_policy)
    return ids, weights, experts, valid, moe_buf


def fused_dynamic_mxfp8_quant_moe_sort(*args, **kwargs):
    """fused_moe.py:21 imports it; sglang 0.5.23 replaces it too."""
    raise NotImplementedError("the double has no MXFP8")


@functools.lru_cache(maxsize=2048)
def get_inter_dim(w1_shape, w2_shape):
    """fused_moe.py:449: experts, model_dim, inter_dim."""
    _, _, model_dim = w1_shape
    experts, model_dim, inter_dim = w2_shape
    return experts, model_dim, inter_dim * (model_dim // w1_shape[-1])


def fused_moe(
    hidden_states,
    w1,  # [expert(local_expert:EP), inter_dim*2, dim] N,K
    w2,  # [expert(local_expert:EP), dim, inter_dim]
    topk_weight,
    topk_ids,
    expert_mask: torch.Tensor | None = None,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    doweight_stage1=False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M=None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy=0,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    splitk=0,
    swiglu_limit=None,
    beta=None,
    linear_beta=None,
    gate_mode: str | None = GateMode.SEPARATED.value,
    shared_w1: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w1_scale: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter=None,
):
    """fused_moe.py:458. Since when: moe_sorting_dispatch_policy v0.1.5; pads and biases v0.1.7; splitk
    v0.1.9; swiglu_limit, gate_mode v0.1.15; beta v0.1.19; shared_* v0.1.20; stage2_scatter after v0.1.20."""
    if stage2_scatter is not None or any(s is not None for s in (shared_w1, shared_w2, shared_w1_scale)):
        raise NotImplementedError("the double has no heterogeneous shared expert and no scatter")
    return fused_moe_(
        hidden_states=hidden_states,
        w1=w1,
        w2=w2,
        topk_weight=topk_weight,
        topk_ids=topk_ids,
        expert_mask=expert_mask,
        activation=activation.value,
        quant_type=quant_type.value,
        doweight_stage1=doweight_stage1,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        block_size_M=block_size_M or -1,
        num_local_tokens=num_local_tokens,
        moe_sorting_dispatch_policy=moe_sorting_dispatch_policy,
        dtype=dtype,
        hidden_pad=hidden_pad,
        intermediate_pad=intermediate_pad,
        bias1=bias1,
        bias2=bias2,
        swiglu_limit=swiglu_limit,
        beta=beta,
        linear_beta=linear_beta,
        gate_mode=gate_mode,
    )


@torch_compile_guard()
def fused_moe_(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: int = ActivationType.Silu.value,
    quant_type: int = QuantType.No.value,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int = -1,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = GateMode.SEPARATED.value,
) -> torch.Tensor:
    """fused_moe.py:623 and _fused_moe_impl :698."""
    activation, quant_type, gate_mode = ActivationType(activation), QuantType(quant_type), GateMode(gate_mode)
    M, topk = topk_ids.shape
    E, model_dim, inter_dim = get_inter_dim(w1.shape, w2.shape)
    assert w1.shape[1] in [inter_dim, inter_dim * 2], f"Invalid MoE weight: {w1.shape=} {w2.shape=}"
    isG1U1 = inter_dim != w1.shape[1]
    # A Python attribute of the tensor: a copy, a view or an nn.Parameter of it has none.
    isShuffled = getattr(w1, "is_shuffled", False) or getattr(w2, "is_shuffled", False)
    global_E = E if expert_mask is None else expert_mask.numel()
    dtype = hidden_states.dtype if dtype is None else dtype
    assert dtype in [dtypes.fp16, dtypes.bf16], f"Fused_moe unsupported out dtype: {dtype}"
    quant_type = quant_remap.get(quant_type, quant_type)
    if quant_type != QuantType.per_1x128 or not isG1U1 or gate_mode != GateMode.SEPARATED:
        raise NotImplementedError("the double has gated block-scaled FP8 alone")
    if a2_scale is not None or bias1 is not None or bias2 is not None or hidden_pad or intermediate_pad:
        raise RuntimeError("a2_scale is refused by the quantiser; biases and pads would be ignored silently")
    if hidden_states.shape != (M, model_dim) or topk_weight.shape != topk_ids.shape:
        raise RuntimeError("hidden_states or topk_weight would be misread")
    lookup = functools.partial(
        get_2stage_cfgs,
        get_padded_M(M),
        model_dim,
        inter_dim,
        E,
        topk,
        dtype,
        w1.dtype,
        w1.dtype,
        quant_type,
        isG1U1,
        activation,
        doweight_stage1,
        hidden_pad,
        intermediate_pad,
        isShuffled,
        gate_mode,
        is_ep=expert_mask is not None,
    )
    metadata = lookup()
    block_size_M = int(metadata.block_m if block_size_M == -1 else block_size_M)
    sorted_ids, sorted_weights, sorted_expert_ids, num_valid_ids, moe_buf = moe_sorting(
        topk_ids,
        topk_weight,
        global_E,
        model_dim,
        dtype,
        block_size_M,
        expert_mask,
        num_local_tokens,
        moe_sorting_dispatch_policy,
    )
    sort = (sorted_ids, sorted_weights, sorted_expert_ids, num_valid_ids, moe_buf)
    run = metadata.stage1 if metadata.run_1stage else functools.partial(_two_stages, metadata)
    call = functools.partial(
        run,
        hidden_states,
        w1,
        w2,
        topk,
        *sort,
        isG1U1,
        block_size_M,
        q_dtype_a=w1.dtype,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        num_local_tokens=num_local_tokens,
        doweight_stage1=doweight_stage1,
    )
    if kernel_bench_callable is not None and metadata.run_1stage:
        kernel_bench_callable.append(("stage1", call))
    return call()


def fused_moe_1stage(
    hidden_states,
    w1,
    w2,
    topk,
    sorted_ids,
    sorted_weights,
    sorted_expert_ids,
    num_valid_ids,
    moe_buf,
    isG1U1,
    block_size_M=32,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    xbf16=False,
    kernelName: str = "",
    q_dtype_a=None,
    q_dtype_w=None,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    num_local_tokens: torch.Tensor | None = None,
    M: int | None = None,
    device=None,
    doweight_stage1: bool | None = None,
    flat: int = 0,
):
    """fused_moe.py:1065. Activations that come quantised must come with num_local_tokens: partial_transpose
    takes no None (:1155)."""
    if xbf16:
        a1, a1_scale = hidden_states, torch.empty(0)
    elif hidden_states.dtype != q_dtype_a:
        a1, a1_scale = get_quant(quant_type)(
            hidden_states,
            scale=a1_scale,
            quant_dtype=q_dtype_a,
            num_rows=num_local_tokens,
            transpose_scale=True,
        )
    else:
        assert a1_scale is not None, "a1_scale must be provided for quantized input for fused_moe"
        a1, scale_t = hidden_states, torch.empty_like(a1_scale)
        aiter.partial_transpose(scale_t, a1_scale, num_rows=num_local_tokens)
        a1_scale = scale_t
    aiter.fmoe_fp8_blockscale_g1u1(
        moe_buf,
        a1,
        w1,
        w2,
        sorted_ids,
        sorted_weights,
        sorted_expert_ids,
        num_valid_ids,
        topk,
        a1_scale,
        w1_scale,
        w2_scale,
        kernelName,
        fc_scale_blkn=128,
        fc_scale_blkk=128,
        fc2_smooth_scale=None,
        activation=activation.value,
        block_size_M=block_size_M,
    )
    return moe_buf


def _two_stages(
    metadata,
    hidden_states,
    w1,
    w2,
    topk,
    sorted_ids,
    sorted_weights,
    sorted_expert_ids,
    num_valid_ids,
    moe_out,
    isG1U1,
    block_size_M,
    q_dtype_a,
    w1_scale,
    w2_scale,
    a1_scale,
    num_local_tokens,
    doweight_stage1,
):
    """fused_moe.py:2979 fused_moe_2stages."""
    quant = get_quant(QuantType.per_1x128)
    token_num, inter_dim = hidden_states.shape[0], w2.shape[2]
    in_asm = metadata.stage1.func is asm_stage1
    if hidden_states.dtype != q_dtype_a:
        a1, a1_scale = quant(
            hidden_states,
            scale=a1_scale,
            quant_dtype=q_dtype_a,
            num_rows=num_local_tokens,
            transpose_scale=in_asm,
        )
    else:
        assert a1_scale is not None, "a1_scale must be provided for quantized input for fused_moe"
        a1 = hidden_states
    behind = (token_num * 4 + 127) // 128 if in_asm else 0
    a2 = torch.full((token_num + behind, topk, inter_dim), float("nan"), dtype=torch.float32)
    a2 = a2.to(q_dtype_a if in_asm else moe_out.dtype)  # what is not written is not zero: poison
    stage1 = functools.partial(
        metadata.stage1,
        a1,
        w1,
        w2,
        sorted_ids,
        sorted_expert_ids,
        num_valid_ids,
        a2,
        topk,
        block_m=block_size_M,
        a1_scale=a1_scale,
        w1_scale=w1_scale,
        sorted_weights=sorted_weights if doweight_stage1 else None,
    )
    if kernel_bench_callable is not None:
        kernel_bench_callable.append(("stage1", stage1))
    a2 = stage1()
    if in_asm:
        packed = a2[token_num:].view(-1)[: token_num * topk * inter_dim * 4 // 128]
        a2, a2_scale = a2[:token_num], packed.view(dtypes.fp32).view(token_num, -1)
    else:
        a2, a2_scale = quant(
            a2, scale=None, quant_dtype=q_dtype_a, num_rows=num_local_tokens, num_rows_factor=topk
        )
        a2 = a2.view(token_num, topk, inter_dim)
    stage2 = functools.partial(
        metadata.stage2,
        a2,
        w1,
        w2,
        sorted_ids,
        sorted_expert_ids,
        num_valid_ids,
        moe_out,
        topk,
        w2_scale=w2_scale,
        a2_scale=a2_scale,
        block_m=block_size_M,
        sorted_weights=None if doweight_stage1 else sorted_weights,
    )
    if kernel_bench_callable is not None:
        kernel_bench_callable.append(("stage2", stage2))
    stage2()
    return moe_out


def asm_stage1(
    input,
    w1,
    w2,
    sorted_ids,
    sorted_expert_ids,
    num_valid_ids,
    out,
    topk,
    block_m: int,
    kernelName: str = "",
    ksplit: int = 0,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    a1_scale=None,
    w1_scale=None,
    sorted_weights=None,
):
    """fused_moe.py:3379."""
    aiter.moe_stage1_g1u1(
        input,
        w1,
        w2,
        sorted_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        w2.shape[2],
        kernelName,
        block_m,
        ksplit=ksplit,
        activation=activation.value,
        quant_type=quant_type.value,
        a1_scale=a1_scale,
        w1_scale=w1_scale,
        sorted_weights=sorted_weights,
    )
    return out


def ck_moe_stage1(
    hidden_states,
    w1,
    w2,
    sorted_token_ids,
    sorted_expert_ids,
    num_valid_ids,
    out,
    topk,
    block_m,
    a1_scale,
    w1_scale,
    kernelName="",
    sorted_weights=None,
    quant_type=QuantType.No,
    activation=ActivationType.Gelu,
    splitk=1,
    use_non_temporal_load=False,
    dtype=None,
):
    """fused_moe.py:3814."""
    token_num = hidden_states.shape[0]
    is_splitk = quant_type == QuantType.per_1x128 and splitk > 1
    tmp_out = out
    if is_splitk:
        rows = min(token_num * topk * block_m, sorted_token_ids.shape[0])
        tmp_out = torch.zeros((rows, w1.shape[1]), dtype=dtypes.fp32, device=out.device)
    aiter.ck_moe_stage1_fwd(
        hidden_states,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        tmp_out,
        topk,
        kernelName,
        w1_scale,
        a1_scale,
        block_m,
        sorted_weights,
        quant_type,
        activation,
        splitk if is_splitk else 0,
        use_non_temporal_load,
        out.dtype,
    )
    if is_splitk:  # aiter.silu_and_mul or gelu_and_mul
        gate, up = tmp_out[: token_num * topk].chunk(2, -1)
        act = torch.nn.functional.silu if activation == ActivationType.Silu else torch.nn.functional.gelu
        out.view(-1, w1.shape[1] // 2).copy_(act(gate) * up)
    return out


@functools.lru_cache(maxsize=2048)
def get_ksplit(token, topk, expert, inter_dim, model_dim):
    """fused_moe.py:1252."""
    if forced := int(os.environ.get("AITER_KSPLIT", "0")):
        return forced
    if token * topk > expert:
        return 0
    groups, cu_num = -(-inter_dim // 128) * token * topk, get_cu_num()
    if groups >= cu_num:
        return 0
    for split in reversed(range(2, (cu_num + groups - 1) // groups + 1)):
        if model_dim % split == 0 and (model_dim // split) % 256 == 0:
            return split
    return 0


def use_nt(token, topk, e):
    """fused_moe.py:1244."""
    forced = int(os.environ.get("AITER_USE_NT", "-1"))
    return bool(forced) if forced != -1 else (token * topk // e) < 64


# fused_moe.py:1281: what may run in one stage. Only these keys are doubled; for 1x128 the function stored
# there is not the one that runs (fused_moe_1stage takes fmoe_fp8_blockscale_g1u1, :1178).
_BLOCK_SCALED = (QuantType.per_1x128, dtypes.bf16, dtypes.fp8, dtypes.fp8, True, False)
fused_moe_1stage_dict = {
    "gfx942": {(ActivationType.Silu, *_BLOCK_SCALED): "fmoe_g1u1"},
    "gfx950": {
        (ActivationType.Silu, *_BLOCK_SCALED): aiter.fmoe_fp8_blockscale_g1u1,
        (ActivationType.Gelu, *_BLOCK_SCALED): aiter.fmoe_fp8_blockscale_g1u1,
    },
}

quant_remap = {QuantType.per_128x128: QuantType.per_1x128}

_PADDED_M_TIERS = [32768, 131072]


def nextPow2(n):
    return 1 if n <= 1 else 1 << (n - 1).bit_length()


def get_padded_M(M):
    """fused_moe.py:1340: the token count that tables are keyed by."""
    if M < _PADDED_M_TIERS[0]:
        return nextPow2(M)
    return max(tier for tier in _PADDED_M_TIERS if tier <= M)


@dataclass
class MOEMetadata:
    """fused_moe.py:1350. stage1 and stage2 are partials: `.func`, and `.keywords["kernelName"]` ("" is a
    kernel's own choice)."""

    stage1: Callable | None
    stage2: Callable | None
    block_m: int
    ksplit: int
    run_1stage: bool = False
    has_bias: bool = False
    use_non_temporal_load: bool = True
    fuse_quant: str = ""
    stage2_has_bias: bool = False
    flat: bool = False
    output_aux: bool = False
    prequant: bool = True
    skip_inter_quant: bool = False
    route_bucket: str = ""
    expected_sorted_blocks: int | None = None
    min_sorted_blocks: int | None = None
    max_sorted_blocks: int | None = None


def _tuned_row(key):
    """fused_moe.py:2172 get_cfg_2stages and :2289 _lookup_cfg: act_type does not matter, as the enum never
    equals the table's text and the second lookup is without it; larger counts fall back to the smaller
    tier."""
    import pandas as pd

    table = pd.read_csv(AITER_CONFIGS.AITER_CONFIG_FMOE_FILE)
    if "gfx" not in table.columns:
        table["gfx"] = table["cu_num"].map(gfx_from_cu_num)
    columns = [
        "gfx",
        "cu_num",
        "token",
        "model_dim",
        "inter_dim",
        "expert",
        "topk",
        "dtype",
        "q_dtype_a",
        "q_dtype_w",
        "q_type",
    ]
    columns += ["use_g1u1", "doweight_stage1"]
    rows = table.drop_duplicates(columns).set_index(columns).to_dict("index")
    row = rows.get(key)
    if row is None and key[2] == _PADDED_M_TIERS[1]:
        row = rows.get((*key[:2], _PADDED_M_TIERS[0], *key[3:]))
    return row


@functools.lru_cache(maxsize=2048)
def get_2stage_cfgs(
    token,
    model_dim,
    inter_dim,
    expert,
    topk,
    dtype,
    q_dtype_a,
    q_dtype_w,
    q_type,
    use_g1u1,
    activation,
    doweight_stage1,
    hidden_pad,
    intermediate_pad,
    is_shuffled=True,
    gate_mode=GateMode.SEPARATED.value,
    is_ep=False,
    has_stage2_bias=False,
    opus_weights_shuffled=None,
    config_file=None,
):
    """fused_moe.py:2110: what will run. `token` is get_padded_M's, q_type already per_1x128, `expert` the
    local count, and with is_ep top-k counts one masked slot more than is routed (:2230). hidden_pad and
    intermediate_pad since v0.1.7 (with biases until v0.1.9), is_shuffled v0.1.13, gate_mode v0.1.15, is_ep
    v0.1.17. That a row was found shows only in kernel names that are not empty."""
    GateMode(gate_mode)
    if q_type != QuantType.per_1x128 or not use_g1u1 or q_dtype_w != dtypes.fp8 or config_file is not None:
        raise NotImplementedError("the double has gated block-scaled FP8 alone")
    topk -= int(is_ep)
    key = (get_gfx_runtime(), get_cu_num(), token, model_dim, inter_dim, expert, topk, str(dtype))
    key += (str(q_dtype_a), str(q_dtype_w), str(q_type), use_g1u1, doweight_stage1)
    cfg = _tuned_row(key)
    bypass = int(os.environ.get("AITER_BYPASS_TUNE_CONFIG", "0"))
    nt = False
    if cfg is None or bypass:
        may = (activation, q_type, dtype, q_dtype_a, q_dtype_w, use_g1u1, doweight_stage1)
        run_1stage = may in fused_moe_1stage_dict[get_gfx()] and token > 32 and inter_dim % 128 == 0
        xbf16 = run_1stage and get_gfx() == "gfx950" and int(os.environ.get("AITER_XBFLOAT16", "0")) == 1
        block_m = BLOCK_SIZE_M if run_1stage else 64 if token > 32 else 16
        ksplit = 0 if run_1stage else get_ksplit(token, topk, expert, inter_dim, model_dim)
        kernel1 = kernel2 = ""
        nt = use_nt(token, topk, expert)
    else:
        block_m, kernel1, kernel2 = cfg["block_m"], cfg["kernelName1"], cfg["kernelName2"]
        ksplit = cfg["ksplit"] if int(os.environ.get("AITER_KSPLIT", "0")) != -1 else 0
        run_1stage = cfg.get("run_1stage", False)
        xbf16 = run_1stage and "blockscaleBf16" in str(kernel1)
    if run_1stage:
        first = functools.partial(
            fused_moe_1stage,
            kernelName=kernel1,
            activation=activation,
            quant_type=q_type,
            xbf16=xbf16,
            flat=0,
        )
        return MOEMetadata(first, None, block_m, ksplit, run_1stage, flat=0)
    second = functools.partial(
        aiter.ck_moe_stage2_fwd,
        kernelName=kernel2,
        activation=activation,
        quant_type=q_type,
        use_non_temporal_load=nt,
    )
    if not kernel1 or "ck2stages" in kernel1:
        first = functools.partial(
            ck_moe_stage1,
            kernelName=kernel1,
            activation=activation,
            quant_type=q_type,
            dtype=dtype,
            splitk=int(ksplit),
            use_non_temporal_load=nt,
        )
    else:
        first = functools.partial(asm_stage1, kernelName=kernel1, activation=activation, quant_type=q_type)
    return MOEMetadata(first, second, block_m, int(ksplit), run_1stage)
