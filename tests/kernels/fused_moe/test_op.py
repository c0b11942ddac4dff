"""The fused MoE op: its sizes, operands, routing, work and reference."""

import math
from collections import Counter

import pytest
import torch

import kernels
from kernels.formats import FORMATS, dequantise_activations, dequantise_weights
from kernels.fp8_to_fp32 import fp8_to_bf16, fp8_to_fp32
from kernels.fused_moe.operands import SCALING, FusedMoeSizes
from kernels.fused_moe.providers.torch_eager import bf16
from kernels.fused_moe.reference import routing
from kernels.operands import Seeds
from shapes.case import parse

OP = kernels.OPS["fused_moe"]
SMALL = "experts=16 topk=4 hidden=256 inter=128"
ROUTED = [
    "tokens=40 hidden=128 inter=128",
    "tokens=33 hidden=128 inter=128 ep=8 shared=1",
    "tokens=40 hidden=128 inter=128 routing=zipf:1.2",
    f"tokens=7 {SMALL} shared=1",
    "tokens=9 experts=20 topk=3 hidden=128 inter=128 routing=uniform",
]


def sizes_of(text: str) -> FusedMoeSizes:
    return OP.sizes(parse(text)[0])


@pytest.mark.parametrize("text", ROUTED)
@pytest.mark.parametrize("seeds", [Seeds(), Seeds(3, 5), Seeds(1, 2, 3)], ids=str)
def test_logits_lead_to_the_picks_that_the_routing_names(text, seeds):
    """Computed in plain Python. Every choice is clear by the margin that the operands promise."""
    sizes = sizes_of(text)
    o = OP.make(sizes, seeds, "cpu", "with_routing")
    groups, limit = sizes.group_limit
    experts_of_group = sizes.experts // groups
    named_picks = sizes.routed.global_picks(seeds.live, seeds.turn)
    bias = o.bias.tolist()
    ids, weights = routing(o)
    for token, logits in enumerate(o.logits.tolist()):
        picks = named_picks[token]
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        biased = [score + offset for score, offset in zip(scores, bias, strict=True)]
        sums = []
        for first in range(0, sizes.experts, experts_of_group):
            ascending = sorted(biased[first : first + experts_of_group])
            sums.append(sum(ascending[-2:]))
        best_groups = sorted(range(groups), key=lambda group: -sums[group])
        picked_groups = {expert // experts_of_group for expert in picks}
        assert picked_groups <= set(best_groups[:limit])
        if limit < groups:
            assert min(sums[group] for group in picked_groups) - sums[best_groups[limit]] > 0.03
        in_reach = [e for e in range(sizes.experts) if e // experts_of_group in best_groups[:limit]]
        best_experts = sorted(in_reach, key=lambda expert: -biased[expert])
        assert set(best_experts[: sizes.topk]) == set(picks)
        assert biased[best_experts[sizes.topk - 1]] - biased[best_experts[sizes.topk]] > 0.03
        total = sum(scores[expert] for expert in picks)
        right = {expert: scores[expert] / total * SCALING for expert in picks if expert < sizes.routed.local}
        if sizes.shared:
            right[sizes.routed.local] = 1.0
        weight_of = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        weight_of.pop(-1, None)
        assert weight_of == pytest.approx(right, rel=1e-5)


def test_some_tokens_need_the_limit_of_groups_and_the_bias():
    o = OP.operands(sizes_of("tokens=64 hidden=128 inter=128"), Seeds(), "cpu", "with_routing")
    scores = o.logits.double().sigmoid()
    ids = routing(o)[0].sort().values
    without_groups = (scores + o.bias.double()).topk(8).indices.sort().values
    assert (without_groups != ids).any(-1).float().mean() > 0.5
    without_both = scores.topk(8).indices.sort().values
    assert (without_both != ids).any(-1).float().mean() > 0.9
    inner = o.narrowed()
    OP.step(o, inner.live_tensors())()
    assert torch.equal(inner.topk_ids.sort().values, ids), "the suite's own routing uses both"


@pytest.mark.parametrize("text", [*ROUTED, f"tokens=5 {SMALL} routing=one fp8=e4m3fnuz scales=ue8m0"])
def test_work_counts_what_is_there(text):
    sizes = sizes_of(text)
    for boundary in OP.boundaries:
        o = OP.operands(sizes, Seeds(2, 3), "cpu", boundary)
        counts = Counter(routing(o)[0].flatten().tolist())
        del counts[-1]
        work = OP.work(sizes, boundary)
        assert work.flops == counts.total() * 2 * 3 * sizes.inter * sizes.hidden
        expert_bytes = sum(getattr(o, name)[0].nbytes for name in o.streamed)
        live = sum(t.nbytes for name, t in o.tensors().items() if name not in o.streamed)
        assert work.bytes == len(counts) * expert_bytes + live + OP.output_bytes(sizes)
        bias = 0 if o.bias is None else o.bias.nbytes  # which operand_bytes leaves out
        assert OP.operand_bytes(sizes) >= sum(t.nbytes for t in o.tensors().values()) - bias
        touched: set[int] = set()
        for turn in range(3):
            touched.update(routing(o.turned(turn))[0].flatten().tolist())
        assert OP.streamed_bytes(sizes, 3) == len(touched - {-1}) * expert_bytes


@pytest.mark.parametrize("scales", ["fp32", "ue8m0"])
def test_neighbouring_scales_differ_and_experts_do(scales):
    text = f"tokens=1 experts=6 topk=1 hidden=512 inter=256 scales={scales}"
    o = OP.operands(sizes_of(text), Seeds(), "cpu")
    for q, scale in ((o.w13, o.w13_scale), (o.w2, o.w2_scale)):
        for dim in range(3):
            assert scale.log2().diff(dim=dim).abs().min() >= 1
        if scales == "ue8m0":
            assert torch.equal(scale.log2(), scale.log2().round())
        else:
            assert scale.unique().numel() == scale.numel()
        rows = q.view(torch.uint8).flatten(0, 1)
        assert rows.unique(dim=0).shape == rows.shape
        assert torch.isfinite(q.float()).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_widened_is_dequantised(fmt):
    all_values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float().nan_to_num(0.0)
    q, scale = all_values.to(fmt.dtype).repeat(128, 1), torch.tensor([[0.3, 2.0**-100]])
    wide = dequantise_weights(q, scale)
    assert torch.equal(fp8_to_fp32(q, scale), wide)
    assert torch.equal(fp8_to_bf16(q, scale), wide.bfloat16())
    many, scales = torch.cat([q[:, :100]] * 9), scale[:, :1].repeat(9, 1)
    assert torch.equal(fp8_to_bf16(many, scales), dequantise_weights(many, scales).bfloat16())


def test_turns_share_what_they_stream_and_touch_other_experts():
    o = OP.operands(sizes_of("tokens=4 hidden=128 inter=128"), Seeds(), "cpu")
    other, out = o.turned(1), OP.empty_output(o.sizes, "cpu")
    assert other.w13 is o.w13 and other.x_q is o.x_q
    assert not set(o.topk_ids.flatten().tolist()) & set(other.topk_ids.flatten().tolist())

    def w13_in_bf16(operands):
        return bf16().prepare(operands, out).stationary[0]

    assert w13_in_bf16(o) is w13_in_bf16(other), "calls that share weights share one copy in bf16"
    assert w13_in_bf16(o) is not w13_in_bf16(o.turned(1, cold=True))


def test_a_step_writes_all_tensors_that_the_inner_call_has_for_itself():
    for boundary in ("with_quant", "with_routing"):
        o = OP.operands(sizes_of(ROUTED[3]), Seeds(), "cpu", boundary)
        own = {name: torch.zeros_like(tensor) for name, tensor in o.narrowed().live_tensors().items()}
        OP.step(o, own)()
        assert all(tensor.float().ne(0).any() for tensor in own.values()), boundary


def test_the_reference_is_what_plain_loops_give():
    sizes = sizes_of("tokens=3 experts=4 topk=2 hidden=128 inter=128 ep=2 shared=1")
    o = OP.operands(sizes, Seeds(1, 1), "cpu")
    assert set(OP.row_groups(o).of.flatten().tolist()) == {-1, 0, 1}, "the routed experts of this rank"
    x = dequantise_activations(o.x_q, o.x_scale, torch.float64)
    right = torch.zeros(3, 128, dtype=torch.float64)
    for token in range(3):
        picks = zip(o.topk_ids[token].tolist(), o.topk_weights[token].tolist(), strict=True)
        for expert, weight in picks:
            if expert < 0:
                continue
            w13 = dequantise_weights(o.w13[expert], o.w13_scale[expert], torch.float64)
            gate, up = w13[:128] @ x[token], w13[128:] @ x[token]
            h = gate / (1 + (-gate).exp()) * up
            w2 = dequantise_weights(o.w2[expert], o.w2_scale[expert], torch.float64)
            right[token] += weight * (w2 @ h)
    assert torch.allclose(OP.reference(o).value, right, rtol=1e-4, atol=1e-4 * float(right.abs().mean()))


@pytest.mark.parametrize(
    ("rows_of_scales", "factor"),
    [(slice(1, 2), 1024.0), (slice(1), 0.0), (slice(2), 0.0)],
    ids=["up times 1024", "gate zero", "both zero"],
)
def test_deviations_have_every_factor_of_up_and_of_gate(rows_of_scales, factor):
    """The layer is linear in up, and zero where gate is zero. So are its deviations."""
    sizes = sizes_of("tokens=3 experts=4 topk=2 hidden=256 inter=128")
    o = OP.operands(sizes, Seeds(1, 1), "cpu", "with_quant")
    scale = o.w13_scale.clone()
    scale[:, rows_of_scales] *= factor
    before, after = OP.reference(o), OP.reference(o.replaced(w13_scale=scale))
    for name in ("value", "sigma", "sigma_fp8"):
        right = factor * getattr(before, name)
        torch.testing.assert_close(getattr(after, name), right, rtol=1e-5, atol=1e-30)


def test_adversarial_operands_have_larger_and_smaller_tokens():
    sizes = sizes_of("tokens=6 experts=8 topk=2 hidden=256 inter=128")
    usual = OP.operands(sizes, Seeds(), "cpu", "with_quant")
    adversarial = OP.operands(sizes, Seeds(adversarial=True), "cpu", "with_quant")
    factors = adversarial.x.float().norm(dim=1) / usual.x.float().norm(dim=1)
    assert factors.tolist() == pytest.approx([1, 2.0**7, 2.0**-7] * 2)
    assert torch.equal(adversarial.topk_ids, usual.topk_ids)
