"""The double of FlashInfer's FP8 block-scale MoE against plain torch, and what it must not take."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.doubles import lent
from tests.support.block_scaled import FP8, activations, alike, weights

EXPERTS, HIDDEN, TOP_K = 8, 256, 2


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hopper() -> ModuleType:
    with lent("cuda", "sm_90", "flashinfer_gemm_moe"):
        import flashinfer

        yield flashinfer


@pytest.fixture
def blackwell() -> ModuleType:
    with lent("cuda", "sm_100", "flashinfer_gemm_moe"):
        import flashinfer

        yield flashinfer


def moe(tokens: int, inter: int, local: int = EXPERTS) -> dict:
    """Weights, [up, gate] first, with their scales and products, and routing logits of all experts."""
    (w1, s1, full1), (w2, s2, full2) = weights(local, 2 * inter, HIDDEN), weights(local, HIDDEN, inter)
    s1, full1, s2, full2 = s1 / 16, full1 / 16, s2 / 16, full2 / 16
    logits = torch.randn(tokens, EXPERTS)
    return {"w1": w1, "s1": s1, "w2": w2, "s2": s2, "full1": full1, "full2": full2, "logits": logits}


def reference(x, given, chosen, shares, offset=0) -> torch.Tensor:
    result = torch.zeros(x.shape[0], HIDDEN)
    for token in range(x.shape[0]):
        for expert, share in zip(chosen[token].tolist(), shares[token].tolist(), strict=True):
            if 0 <= expert - offset < given["w1"].shape[0]:
                up, gate = (given["full1"][expert - offset] @ x[token]).chunk(2)
                acted = torch.nn.functional.silu(gate) * up
                result[token] += share * (given["full2"][expert - offset] @ acted)
    return result


def selected(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = logits.softmax(-1).topk(TOP_K, -1)
    return top.indices.int(), top.values


@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize("inter", [128, 256])
def test_cutlass(hopper, tokens, inter):
    given = moe(tokens, inter)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    chosen, shares = selected(given["logits"])
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
    call = {"quant_scales": [given["s1"], given["s2"]], "use_deepseek_fp8_block_scale": True}
    args = (x, chosen, shares, given["w1"], given["w2"], torch.bfloat16)
    assert hopper.fused_moe.cutlass_fused_moe(*args, output=out, **call) is out
    assert alike(out, reference(x.float(), given, chosen, shares))


def test_cutlass_expert_parallel(hopper):
    given = moe(9, 128, local=4)
    x = torch.randn(9, HIDDEN).bfloat16()
    chosen, shares = selected(given["logits"])
    args = (x, chosen, shares, given["w1"], given["w2"], torch.bfloat16, [given["s1"], given["s2"]])
    got = hopper.cutlass_fused_moe(*args, ep_size=2, ep_rank=1, use_deepseek_fp8_block_scale=True)
    assert alike(got, reference(x.float(), given, chosen, shares, offset=4))
    with pytest.raises(RuntimeError, match="not there"):
        hopper.cutlass_fused_moe(*args, use_deepseek_fp8_block_scale=True)


def _swap(t: torch.Tensor) -> torch.Tensor:
    return (
        torch.cat(t.view(torch.uint8).chunk(2, 1)[::-1], 1).view(t.dtype)
        if t.dtype == FP8
        else torch.cat(t.chunk(2, 1)[::-1], 1)
    )


def test_cutlass_wants_up_before_gate_and_scales_in_order(hopper):
    given = moe(17, 256)
    x = torch.randn(17, HIDDEN).bfloat16()
    chosen, shares = selected(given["logits"])
    wanted = reference(x.float(), given, chosen, shares)
    for w1, s1 in (
        (_swap(given["w1"]), _swap(given["s1"])),
        (given["w1"], _swap(given["s1"])),
        (given["w1"], given["s1"].mT.contiguous()),
    ):
        args = (x, chosen, shares, w1, given["w2"], torch.bfloat16, [s1, given["s2"]])
        assert not alike(hopper.cutlass_fused_moe(*args, use_deepseek_fp8_block_scale=True), wanted)


WRONG_CUTLASS = {
    "FP8 activations": lambda c: c | {"input": c["input"].to(FP8)},
    "float16 activations": lambda c: c | {"input": c["input"].half()},
    "int64 experts": lambda c: c | {"token_selected_experts": c["token_selected_experts"].long()},
    "bfloat16 shares": lambda c: c | {"token_final_scales": c["token_final_scales"].bfloat16()},
    "shares of one expert": lambda c: c | {"token_final_scales": c["token_final_scales"][:, :1]},
    "float16 output": lambda c: c | {"output_dtype": torch.float16},
    "an output of another dtype": lambda c: c | {"output": torch.empty(5, HIDDEN)},
    "one half of fc1": lambda c: c | {"fc1_expert_weights": c["fc1_expert_weights"][:, :128].contiguous()},
    "fc2 as [inter, hidden]": lambda c: c | {"fc2_expert_weights": c["fc2_expert_weights"].mT.contiguous()},
    "weights with strides": lambda c: c | {"fc2_expert_weights": c["fc2_expert_weights"].mT.contiguous().mT},
    "scales of fc1 alone": lambda c: c | {"quant_scales": c["quant_scales"][:1]},
    "too few scales": lambda c: c | {"quant_scales": [s[:4].clone() for s in c["quant_scales"]]},
    "without the flag": lambda c: c | {"use_deepseek_fp8_block_scale": False},
    "tokens of another number": lambda c: c | {"input": c["input"][:4]},
    "min latency": lambda c: c | {"min_latency_mode": True},
}


@pytest.mark.parametrize("wrong", WRONG_CUTLASS)
def test_refused_cutlass(hopper, wrong):
    given = moe(5, 128)
    chosen, shares = selected(given["logits"])
    call = {
        "input": torch.randn(5, HIDDEN).bfloat16(),
        "token_selected_experts": chosen,
        "token_final_scales": shares,
        "fc1_expert_weights": given["w1"],
        "fc2_expert_weights": given["w2"],
        "output_dtype": torch.bfloat16,
        "quant_scales": [given["s1"], given["s2"]],
        "use_deepseek_fp8_block_scale": True,
    }
    hopper.cutlass_fused_moe(**call)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        hopper.cutlass_fused_moe(**WRONG_CUTLASS[wrong](call))


def test_cutlass_is_for_hopper(blackwell):
    given = moe(5, 128)
    x = torch.randn(5, HIDDEN).bfloat16()
    args = (
        x,
        *selected(given["logits"]),
        given["w1"],
        given["w2"],
        torch.bfloat16,
        [given["s1"], given["s2"]],
    )
    with pytest.raises(NotImplementedError, match="Blackwell"):
        blackwell.cutlass_fused_moe(*args, use_deepseek_fp8_block_scale=True)


def blackwell_call(given: dict, x: torch.Tensor, scale: torch.Tensor, inter: int, **more) -> dict:
    return {
        "routing_logits": given["logits"],
        "routing_bias": torch.zeros(EXPERTS),
        "hidden_states": x,
        "hidden_states_scale": scale.T.contiguous(),
        "gemm1_weights": given["w1"],
        "gemm1_weights_scale": given["s1"],
        "gemm2_weights": given["w2"],
        "gemm2_weights_scale": given["s2"],
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "n_group": 4,
        "topk_group": 2,
        "intermediate_size": inter,
        "local_expert_offset": 0,
        "local_num_experts": EXPERTS,
        "routed_scaling_factor": 2.5,
        "routing_method_type": 2,
    } | more


def deepseek(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """4 groups of 2 experts, the best 2 groups, then the best 2 experts; shares sum to 2.5."""
    scores = torch.sigmoid(logits)
    chosen, shares = [], []
    for row in scores:
        best = (row + bias).view(4, 2).sum(1).topk(2).indices.tolist()
        allowed = [e for group in best for e in (2 * group, 2 * group + 1)]
        two = sorted(allowed, key=lambda e: -(row[e] + bias[e]))[:2]
        chosen.append(two)
        shares.append([2.5 * float(row[e] / row[two].sum()) for e in two])
    return torch.tensor(chosen), torch.tensor(shares)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("inter", [128, 256])
def test_trtllm(blackwell, tokens, inter):
    given, bias = moe(tokens, inter), torch.randn(EXPERTS)
    x, scale, full = activations(tokens, HIDDEN)
    wanted = reference(full, given, *deepseek(given["logits"], bias))
    call = blackwell_call(given, x, scale, inter, routing_bias=bias)
    assert alike(blackwell.fused_moe.trtllm_fp8_block_scale_moe(**call), wanted)
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
    shuffled = {name: torch.stack([blackwell.shuffle_matrix_a(w, 64) for w in given[of].view(torch.uint8)])
                for name, of in (("gemm1_weights", "w1"), ("gemm2_weights", "w2"))}  # fmt: skip
    blocked = {
        name: torch.stack([blackwell.fused_moe.convert_to_block_layout(m, 128) for m in w])
        for name, w in shuffled.items()
    }
    for layout, both in ((0, shuffled), (2, blocked)):
        both = {name: w.view(FP8) for name, w in both.items()}
        blackwell.trtllm_fp8_block_scale_moe(
            **call | both, use_shuffled_weight=True, weight_layout=layout, output=out
        )
        assert alike(out, wanted)
    assert not alike(blackwell.trtllm_fp8_block_scale_moe(**call, use_shuffled_weight=True), wanted)


def test_trtllm_local_experts_and_layouts(blackwell):
    given, bias = moe(17, 128, local=4), torch.zeros(EXPERTS)
    x, scale, full = activations(17, HIDDEN)
    wanted = reference(full, given, *deepseek(given["logits"], bias), offset=4)
    call = blackwell_call(given, x, scale, 128, local_expert_offset=4, local_num_experts=4)
    assert alike(blackwell.trtllm_fp8_block_scale_moe(**call), wanted)
    turned = call | {"hidden_states_scale": scale.T}  # a view: its storage is [tokens, hidden / 128]
    assert not alike(blackwell.trtllm_fp8_block_scale_moe(**turned), wanted)
    gate_first = call | {"gemm1_weights": _swap(given["w1"]), "gemm1_weights_scale": _swap(given["s1"])}
    assert not alike(blackwell.trtllm_fp8_block_scale_moe(**gate_first), wanted)


WRONG_TRTLLM = {
    "scales as [tokens, hidden / 128]": lambda c: c | {"hidden_states_scale": c["hidden_states_scale"].T},
    "bfloat16 activations": lambda c: c | {"hidden_states": c["hidden_states"].bfloat16()},
    "no groups": lambda c: c | {"n_group": None, "topk_group": None},
    "groups of another method": lambda c: c | {"routing_method_type": 1},
    "too many groups": lambda c: c | {"topk_group": 5},
    "too few experts in the groups": lambda c: c | {"topk_group": 1},
    "float16 logits": lambda c: c | {"routing_logits": c["routing_logits"].half()},
    "logits of fewer experts": lambda c: c | {"routing_logits": c["routing_logits"][:, :4]},
    "a bias of two dimensions": lambda c: c | {"routing_bias": c["routing_bias"][None]},
    "another intermediate size": lambda c: c | {"intermediate_size": 256},
    "blocks without a shuffle": lambda c: c | {"weight_layout": 2},
    "MajorMn": lambda c: c | {"weight_layout": 1, "use_shuffled_weight": True},
    "GeGLU": lambda c: c | {"activation_type": 4},
    "scales of another expert count": lambda c: c | {"local_num_experts": 4},
    "weights with strides": lambda c: c | {"gemm2_weights": c["gemm2_weights"].mT.contiguous().mT},
    "a float32 output": lambda c: c | {"output": torch.empty(5, HIDDEN)},
}


@pytest.mark.parametrize("wrong", WRONG_TRTLLM)
def test_refused_trtllm(blackwell, wrong):
    x, scale, _ = activations(5, HIDDEN)
    call = blackwell_call(moe(5, 128), x, scale, 128)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        blackwell.trtllm_fp8_block_scale_moe(**WRONG_TRTLLM[wrong](call))


def test_trtllm_is_for_blackwell(hopper):
    x, scale, _ = activations(5, HIDDEN)
    with pytest.raises(RuntimeError, match="SM100"):
        hopper.trtllm_fp8_block_scale_moe(**blackwell_call(moe(5, 128), x, scale, 128))
