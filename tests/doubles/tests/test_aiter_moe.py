"""The double of AITER's MoE entry points against plain torch, and what it refuses or gets wrong with."""

import functools

import pytest
import torch

from tests.doubles import lent
from tests.support.aiter_quantised import close, plain, weights


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request):
    with lent("rocm", request.param, "aiter_gemm_moe"):
        yield request.param


@pytest.fixture
def gfx942():
    with lent("rocm", "gfx942", "aiter_gemm_moe"):
        yield "gfx942"


def layer(arch, tokens, hidden=256, inter=256, experts=8, topk=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    x *= 2.0 ** (torch.arange(tokens) % 3)[:, None]
    (w1, s1), (w2, s2) = (
        weights((experts, 2 * inter, hidden), arch, 20),
        weights((experts, hidden, inter), arch, 30),
    )
    routed, ids = torch.rand(tokens, experts, generator=generator).topk(topk)
    return x, w1, w2, s1, s2, routed, ids.int()


def reference(x, w1, w2, s1, s2, routed, ids, keep=None, act=torch.nn.functional.silu):
    w1, w2, out = plain(w1, s1), plain(w2, s2), torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for weight, expert in zip(routed[t], ids[t].tolist(), strict=True):
            if keep is not None and expert not in keep:
                continue
            e = expert if keep is None else keep.index(expert)
            gate, value = (w1[e] @ x[t].float()).chunk(2)
            out[t] += weight * (w2[e] @ (act(gate) * value))
    return out


def shuffled(*tensors):
    from aiter.ops.shuffle import shuffle_weight

    return [shuffle_weight(t, (16, 16)) for t in tensors]


def run(x, w1, w2, s1, s2, routed, ids, shuffle=True, **more):
    from aiter import ActivationType, QuantType
    from aiter.fused_moe import fused_moe

    w1, w2 = shuffled(w1, w2) if shuffle else (w1, w2)
    arguments = {"activation": ActivationType.Silu, "quant_type": QuantType.per_128x128} | more
    return fused_moe(x, w1, w2, routed, ids, w1_scale=s1, w2_scale=s2, **arguments)


# Rounding of activations to FP8, twice.
MOE = 0.06


@pytest.mark.parametrize("tokens", [1, 3, 5, 9, 17, 40])
@pytest.mark.parametrize("inter", [128, 256])
def test_fused_moe(arch, tokens, inter):
    """On gfx942 the table has rows for 4, 8 and 16 tokens of the larger size; 40 runs in one stage."""
    case = layer(arch, tokens, inter=inter)
    right = reference(*case)
    out = run(*case)
    assert out.dtype == torch.bfloat16 and close(out, right, MOE)
    assert not close(run(*case, shuffle=False), right, 0.5)
    x, w1, w2, s1, s2, routed, ids = case
    flat = run(x, w1, w2, s1.flatten(1), s2.flatten(1), routed, ids)
    assert torch.equal(flat, out)
    turned = s1.transpose(1, 2).contiguous().view(s1.shape)
    assert not close(run(x, w1, w2, turned, s2, routed, ids), right, 0.1)


def test_fused_moe_splits(gfx942):
    """One token: stage 1 over halves of K (get_ksplit), finished by silu_and_mul."""
    from aiter import ActivationType, QuantType, dtypes
    from aiter.fused_moe import ck_moe_stage1, get_2stage_cfgs

    found = get_2stage_cfgs(
        1,
        512,
        128,
        8,
        2,
        torch.bfloat16,
        dtypes.fp8,
        dtypes.fp8,
        QuantType.per_1x128,
        True,
        ActivationType.Silu,
        False,
        0,
        0,
    )
    assert found.stage1.func is ck_moe_stage1 and found.ksplit == 2 and found.block_m == 16
    case = layer(gfx942, 1, hidden=512, inter=128)
    assert close(run(*case), reference(*case), MOE)


def test_fused_moe_picks(gfx942):
    from aiter import ActivationType, QuantType, dtypes
    from aiter.fused_moe import asm_stage1, fused_moe_1stage, get_2stage_cfgs, get_padded_M

    look = functools.partial(get_2stage_cfgs, model_dim=256, inter_dim=256, expert=8, dtype=torch.bfloat16)
    look = functools.partial(look, q_dtype_a=dtypes.fp8, q_dtype_w=dtypes.fp8, q_type=QuantType.per_1x128)
    look = functools.partial(look, use_g1u1=True, activation=ActivationType.Silu, doweight_stage1=False)
    look = functools.partial(look, hidden_pad=0, intermediate_pad=0)
    assert look(get_padded_M(5), topk=2).run_1stage
    assert "32x256" in look(8, topk=2).stage1.keywords["kernelName"]
    assert look(8, topk=3, is_ep=True).run_1stage  # one place of three is a masked one
    assert not look(8, topk=3).run_1stage
    assert look(16, topk=2).stage1.func is asm_stage1
    plain_one = look(64, topk=2)
    assert plain_one.stage1.func is fused_moe_1stage and plain_one.block_m == 32
    assert look(32, topk=2).block_m == 16 and look(32, topk=2).stage1.keywords["kernelName"] == ""


@pytest.mark.parametrize("tokens", [6, 40])
def test_fused_moe_expert_parallel(gfx942, tokens):
    """This rank holds experts 2..5 of 8; a ninth, always masked, fills places."""
    x, w1, w2, s1, s2, routed, ids = layer(gfx942, tokens)
    keep = [2, 3, 4, 5]
    mask = torch.zeros(9, dtype=torch.int32)
    mask[keep] = 1
    here = (w1[2:6], w2[2:6], s1[2:6], s2[2:6])
    routed = torch.cat([routed, torch.zeros(tokens, 1)], 1)
    ids = torch.cat([ids, torch.full((tokens, 1), 8, dtype=torch.int32)], 1)
    right = reference(x, *here, routed, ids, keep=keep)
    assert close(run(x, *here, routed, ids, expert_mask=mask), right, MOE)
    with pytest.raises(RuntimeError):
        run(x, *here, routed, ids, expert_mask=mask.bool())
    with pytest.raises(RuntimeError):
        run(x, *here, routed, ids)  # without the mask, experts that are not here


def test_fused_moe_quantised_input(gfx942):
    import aiter

    for tokens in (6, 40):
        x, *rest = case = layer(gfx942, tokens, inter=128)
        q, s = aiter.get_hip_quant(aiter.QuantType.per_1x128)(x, quant_dtype=aiter.dtypes.fp8)
        count = torch.tensor([tokens], dtype=torch.int32)
        out = run(q, *rest, a1_scale=s, dtype=torch.bfloat16, num_local_tokens=count)
        assert close(out, reference(*case), MOE)
        with pytest.raises(AssertionError):
            run(q, *rest, a1_scale=s)  # the output would be FP8
        if tokens == 40:  # in one stage
            with pytest.raises(TypeError, match="num_rows"):
                run(q, *rest, a1_scale=s, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c | {"ids": c["ids"].long()},
        lambda c: c | {"routed": c["routed"].bfloat16()},
        lambda c: c | {"ids": c["ids"].masked_fill(c["ids"] == c["ids"][0, 0], -1)},
        lambda c: c | {"ids": c["ids"] + 7},
        lambda c: c | {"ids": c["ids"][:, :1].expand(-1, 2).contiguous()},
        lambda c: c | {"ids": c["ids"].t().contiguous().t()},
        lambda c: c | {"s1": c["s1"].bfloat16()},
        lambda c: c | {"s1": c["s1"][:, :1].contiguous()},
        lambda c: c | {"w1": c["w1"].float().to(torch.float8_e4m3fn)},
        lambda c: c | {"x": c["x"].float()},
    ],
)
@pytest.mark.parametrize("tokens", [6, 40])
def test_fused_moe_refuses(gfx942, change, tokens):
    names = ("x", "w1", "w2", "s1", "s2", "routed", "ids")
    case = change(dict(zip(names, layer(gfx942, tokens, inter=128), strict=True)))
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        run(*case.values())


def test_sizes_of_moe_kernels(gfx942):
    with pytest.raises(RuntimeError, match="multiple of 256"):  # hidden 384 in tiles of 256
        run(*layer(gfx942, 4, hidden=384, inter=128))
    case = layer(gfx942, 40, hidden=384, inter=128)
    assert close(run(*case), reference(*case), MOE)
    with pytest.raises(RuntimeError, match="of 128"):
        run(*layer(gfx942, 4, inter=192))


def test_sorting(gfx942):
    """The example in csrc/include/moe_sorting_opus.h:284."""
    from aiter.fused_moe import moe_sorting

    ids = torch.tensor([[0, 3, 5], [2, 3, 5], [1, 3, 5], [1, 2, 3], [1, 3, 5]], dtype=torch.int32)
    routed = torch.arange(1.0, 16.0).view(5, 3)
    tokens, weight, experts, valid, buf = moe_sorting(ids, routed, 6, 128, torch.bfloat16, block_size=4)
    assert valid.tolist() == [24, 5] and experts[:6].tolist() == [0, 1, 2, 3, 3, 5]
    sorted_tokens = [0, 5, 5, 5, 2, 3, 4, 5, 1, 3, 5, 5, 0, 1, 2, 3, 4, 5, 5, 5, 0, 1, 2, 4]
    assert (tokens[:24] & 0xFFFFFF).tolist() == sorted_tokens
    assert (tokens[:5] >> 24).tolist() == [0, 3, 3, 3, 0]  # the place in top-k; of padding, top-k itself
    assert weight[:12].tolist() == [1.0, 0, 0, 0, 7.0, 10.0, 13.0, 0, 4.0, 11.0, 0, 0]
    assert buf.shape == (5, 128) and not buf.any() and len(tokens) == 15 + 6 * 4 - 3
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32)
    _, _, experts, valid, _ = moe_sorting(ids, routed, 6, 128, torch.bfloat16, block_size=4, expert_mask=mask)
    assert valid[0] == 20 and experts[:5].tolist() == [0, 1, 2, 2, 3]
    with pytest.raises(RuntimeError, match="FP32"):
        moe_sorting(ids, routed.half(), 6, 128, torch.bfloat16)


def test_one_stage_kernel(arch):
    import aiter
    from aiter.fused_moe import moe_sorting

    x, w1, w2, s1, s2, routed, ids = case = layer(arch, 9)
    q, s = aiter.get_hip_quant(aiter.QuantType.per_1x128)(x, quant_dtype=aiter.dtypes.fp8)
    right = reference(*case)
    shuffled_weights = shuffled(w1, w2)

    def call(scale=None, block=32, out=None, **more):
        sort = moe_sorting(ids, routed, 8, 256, torch.bfloat16, block_size=block)
        out = sort[4] if out is None else out
        scale = s.t().contiguous() if scale is None else scale
        aiter.fmoe_fp8_blockscale_g1u1(
            out, q, *shuffled_weights, *sort[:4], 2, scale, s1, s2, "", 128, 128, None, **more
        )
        return out

    assert close(call(), right, MOE)
    assert close(call(block=64, block_size_M=64), right, MOE)
    assert not close(call(scale=s), right, 0.1)
    assert close(call(out=right.bfloat16()), 2 * right, MOE)  # it adds to what is there
    assert not close(call(block=16), right, 0.1)  # sorted for other blocks than the kernel's 32
    with pytest.raises(RuntimeError):
        call(block=48, block_size_M=48)
    with pytest.raises(RuntimeError):
        call(out=torch.zeros(9, 256, dtype=torch.float16))


@pytest.mark.parametrize("tokens", [1, 17])
def test_triton_moe(arch, tokens):
    triton = pytest.importorskip("triton.language")
    import aiter
    from aiter.ops.triton.moe.moe_align_block_size import moe_align_block_size_triton
    from aiter.ops.triton.moe.moe_op import fused_moe
    from aiter.ops.triton.utils.moe_config_utils import get_optimal_moe_config_func

    x, w1, w2, s1, s2, routed, ids = case = layer(arch, tokens)
    config = get_optimal_moe_config_func(x.dtype, use_fp8_w8a8=True)(M=tokens)
    block, slots = config["BLOCK_SIZE_M"], ids.numel()
    sorted_ids = torch.full((slots + 8 * block,), slots, dtype=torch.int32)
    experts, total = torch.zeros(slots + 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    moe_align_block_size_triton(ids, 8, block, sorted_ids, experts, total)
    quant = functools.partial(aiter.get_hip_quant(aiter.QuantType.per_1x128), quant_dtype=aiter.dtypes.fp8)

    def gemm(a, w, s, topk, weighted):
        q, scale = quant(a)
        c = torch.zeros(tokens, 2, w.shape[1], dtype=torch.bfloat16)
        last = (False, False, [128, 128], config)
        arguments = (q, w, c, scale, s, None, routed, ids, sorted_ids, experts, total)
        fused_moe(*arguments, weighted, topk, triton.bfloat16, True, *last)
        return c

    gate, value = gemm(x, w1, s1, 2, False).view(slots, -1).chunk(2, -1)
    hidden = (torch.nn.functional.silu(gate.float()) * value.float()).bfloat16()
    out = gemm(hidden, w2, s2, 1, True).float().sum(1)
    assert close(out, reference(*case), MOE)
    with pytest.raises(TypeError):
        config = None
        gemm(x, w1, s1, 2, False)
