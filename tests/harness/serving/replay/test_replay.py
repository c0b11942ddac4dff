"""Step replay: the step computes what the model's layers compute, arms differ in what was swapped only, and
what is measured of them is told apart from what the swapped calls alone would have said."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import kernels
from harness.cli.serving.replay import replay_command
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.machine.monitor.base import Blind
from harness.page.serving.replay import replay_section, replays
from harness.report.terminal import plain_text
from harness.run import device
from harness.run.device import OwnDevice
from harness.serving.replay import replay as replaying
from harness.serving.replay.child import EPSILON, Rank, rotary
from harness.serving.replay.replay import (
    BASE,
    Replay,
    ReplayArm,
    ReplayPlan,
    Timed,
    fitted,
    needed,
    plans,
    read_arms,
    replay,
    with_layers,
)
from harness.serving.replay.step import OP_CLASS, ReplayStep, StepPlace
from harness.statistics.intervals import interval
from harness.workers.child.timers import Sample
from kernels.formats import dequantise_weights
from kernels.platform import Platform, detect
from shapes.attention import Parallel
from shapes.linears import linears
from shapes.models import model
from tests.support.paths import ROOT
from tests.support.workers_here import WorkerHere

R1 = model("deepseek-r1")
TINY = replace(
    R1, name="tiny", hidden_size=256, q_lora_rank=128, intermediate_size=256, moe_intermediate_size=128,
    n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, num_attention_heads=2,
    num_hidden_layers=3, first_k_dense_replace=1, vocab_size=64,
)  # fmt: skip
CHOSEN = {"block_scale_gemm": "torch.bf16", "fused_moe": "torch.bf16", "mla_decode": "torch.sdpa"}
STEP = ReplayStep(TINY, Parallel(), batch=3, ctx=33, dense=1, moe=1, page=16)


@pytest.fixture(scope="module")
def rank():
    made = Rank()
    made.hello("cpu", "cpu", 1)
    return made


def test_a_whole_step_of_r1_makes_the_calls_of_its_linears():
    parallel = Parallel(tp=8)
    whole = ReplayStep(R1, parallel, 4, 4096, dense=3, moe=58)
    names = [place.name for place in whole.places()]
    for linear in linears(R1, parallel):
        assert names.count(linear.name) == linear.decode_calls, linear.name
    assert names.count("mla_decode") == 61 and names.count("fused_moe") == 58
    assert whole.all_reduces == ["122 all-reduces of TP8"] and not STEP.all_reduces
    fewer = ReplayStep(R1, parallel, 1, 64, dense=2, moe=4)  # which stand for all
    assert fewer.calls("mla_decode") == fewer.calls("qkv_a") == (6, 61)
    assert fewer.calls("fused_moe") == fewer.calls("shared down") == (4, 58)
    assert fewer.calls("dense down") == (2, 3)


def _linear(rank, place, x):
    o = rank.operands[place]
    return x.double() @ dequantise_weights(o.b_q, o.b_scale).double().T


def _norm(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()


def _gated(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _experts(rank, place, x):
    o = rank.operands[place]
    out = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(o.topk_ids.tolist(), o.topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            w13 = dequantise_weights(o.w13[expert], o.w13_scale[expert]).double()
            w2 = dequantise_weights(o.w2[expert], o.w2_scale[expert]).double()
            out[token] += weight * (w2 @ _gated(w13 @ x[token]))
    return out


def _attend(rank, layer, q, latent, k_rope, scale):
    """Attention in the model's own form, not absorbed, over each request's cache."""
    out, o = [], rank.operands[f"{layer}.mla_decode"]
    w_uk, w_uv = (rank.flow.weights[name, layer].double() for name in ("w_uk", "w_uv"))
    for request in range(rank.step.batch):
        cached = o.kv.view(-1, o.kv.shape[-1])[o.token_slots(request)].double()
        cached[-1] = torch.cat((latent[request], k_rope[request]))
        latents, turned = cached.split([512, 64], -1)
        keys = torch.einsum("hnl,sl->shn", w_uk, latents)
        values = torch.einsum("hlv,sl->shv", w_uv, latents)
        keys = torch.cat((keys, turned[:, None].expand(-1, rank.step.heads, -1)), -1)
        scores = torch.einsum("hd,shd->hs", q[request], keys) * scale
        out.append(torch.einsum("hs,shv->hv", scores.softmax(-1), values))
    return torch.stack(out)


def expected_logits(rank):
    """The step in fp64 by the model's definition, from the rank's own weights."""
    flow, given = rank.flow, rank.step
    residual = flow.embedded.double()
    angles = (given.ctx - 1) * 10000.0 ** (-torch.arange(32).double() / 32)
    cos, sin = angles.cos(), angles.sin()
    scale = next(o.scale for o in rank.operands.values() if hasattr(o, "scale"))
    for layer in range(given.layers):
        a = _linear(rank, f"{layer}.qkv_a", _norm(residual))
        q_a, latent, k_rope = a.split([TINY.q_lora_rank, TINY.kv_lora_rank, 64], -1)
        q = _linear(rank, f"{layer}.q_b", _norm(q_a)).view(-1, given.heads, 192)
        q = torch.cat((q[..., :128], rotary(q[..., 128:], cos, sin)), -1)
        k_rope = rotary(k_rope[:, None], cos, sin)[:, 0]
        attended = _attend(rank, layer, q, _norm(latent), k_rope, scale)
        residual = residual + _linear(rank, f"{layer}.o_proj", attended.flatten(1))
        x = _norm(residual)
        kind = "dense" if layer < given.dense else "shared"
        down = _linear(rank, f"{layer}.{kind} down", _gated(_linear(rank, f"{layer}.{kind} gate_up", x)))
        if kind == "shared":
            down += _experts(rank, f"{layer}.fused_moe", x)
        residual = residual + down
    return _norm(residual) @ flow.weights["lm_head", 0].double().T


@pytest.mark.parametrize(("gemm", "most"), [("torch.bf16", 0.03), ("torch.naive", 0.15)])
def test_the_step_computes_the_model(rank, gemm, most):
    """`torch.naive` rounds activations to FP8."""
    rank.open(STEP, 0, "eager")
    rank.prepare("a", CHOSEN | {"block_scale_gemm": gemm})
    wanted = expected_logits(rank)
    got = rank.flow.logits.double()
    error = (got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert got.shape == wanted.shape and error < most, float(error)


def test_arms_share_operands_and_nothing_else(rank):
    rank.open(STEP, 0, "eager")
    assert (rank.operands["0.qkv_a"].b_q.float() != rank.operands["1.qkv_a"].b_q.float()).any()
    rank.prepare("a", CHOSEN)
    bound = len(rank.prepared)
    rank.prepare("b", CHOSEN | {"block_scale_gemm:qkv_a": "torch.naive"})
    assert len(rank.prepared) == bound + 2


def test_a_place_alone_is_its_calls_of_all_layers(rank, monkeypatch):
    rank.open(STEP, 0, "eager")
    rank.prepare("a", CHOSEN)
    programs, seconds = [], iter([1.0, 9.0, 2.0, 0.5])

    class Timer:
        def program(self, calls):
            programs.append(len(calls))

        def sample(self, program, at_least):
            return Sample(next(seconds), 1)

    monkeypatch.setattr(rank, "timer", Timer())
    assert rank.alone("qkv_a", ["a"], 3, 0.1) == {"a": 2 * 2.0}, "two layers, the median turn"
    assert rank.alone("fused_moe", ["a"], 1, 0.1) == {"a": 0.5} and programs == [2, 1]


def test_a_wrong_kernel_shows_in_the_difference(rank):
    rank.open(STEP, 0, "eager")
    rank.prepare("a", CHOSEN)
    other = CHOSEN | {"mla_decode": "torch.naive"}
    assert rank.difference(CHOSEN, other).keys() == {"mla_decode"}
    assert rank.difference(CHOSEN, other)["mla_decode"] < 0.02
    wrong = rank._bound(StepPlace(0, "mla_decode"), other)
    right = wrong.call
    wrong.call = lambda: (right(), wrong.result().mul_(1.1))
    assert rank.difference(CHOSEN, other)["mla_decode"] > replaying.ALIKE
    wrong.call = lambda: wrong.result().fill_(math.nan)
    with pytest.raises(ArithmeticError, match="not all finite"):
        rank.prepare("b", other)


@pytest.fixture
def here(monkeypatch):
    """Replays of a test start no process, and their samples are short."""
    monkeypatch.setattr(replaying, "WorkerProcess", WorkerHere)
    small = {"SAMPLE_S": 1e-3, "ALONE_S": 1e-4, "ALONE_SAMPLES": 1, "BLOCKS": 2, "ROUNDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(replaying, name, value)
    monkeypatch.setattr(replaying, "default_threads", lambda: 1)


def replayed(swap, budget_s=60.0):
    plan = ReplayPlan(STEP, {BASE: CHOSEN, "x": CHOSEN | swap}, budget_s, ["a note"])
    return replay(plan, detect("cpu"), Blind("a test"))


def test_measured_in_the_step_and_alone(here, monkeypatch):
    def alone(self, place, arms, samples, at_least):
        took = {name: 1e-3 if name == BASE else 4e-3 for name in arms}
        return took if place != "mla_decode" else dict.fromkeys(arms, 70e-3)

    opened, seeds = Rank.open, []
    monkeypatch.setattr(Rank, "open", lambda *a, seed, **b: seeds.append(seed) or opened(*a, seed=seed, **b))
    monkeypatch.setattr(Rank, "alone", alone)
    monkeypatch.setattr(replaying, "ROUNDS", 3)
    found = replayed({"block_scale_gemm": "torch.naive"})
    base, slow = found.arms[BASE], found.arms["x"]
    assert base.change is None and slow.change.low <= slow.change.ms <= slow.change.high
    assert found.rounds == len(found.samples) == 6 and seeds == [0, 1]

    def mean(of):
        return pytest.approx(interval((each["block"], 1e3 * of(each)) for each in found.samples).mean)

    assert (base.step.ms, slow.step.ms) == (mean(lambda r: r[BASE]), mean(lambda r: r["x"]))
    assert slow.change.ms == mean(lambda r: r["x"] - r[BASE])
    # Replayed: 3 calls of each layer, and 2 for its experts; the model has one more layer of experts.
    assert slow.whole.ms == pytest.approx(slow.change.ms * 15 / 10)
    gemms = {name for name, op_class in OP_CLASS.items() if op_class == "block_scale_gemm"}
    assert set(slow.difference) == set(slow.places_alone) == gemms
    assert slow.alone == pytest.approx(len(gemms) * 3.0) and base.alone is None
    assert base.places_alone.keys() == OP_CLASS.keys()
    assert list(base.classes_alone())[:2] == ["mla_decode", "block_scale_gemm"], "the longest first"
    text = " ".join(plain_text(found.table()).split())
    assert "base block_scale_gemm=torch.bf16, fused_moe" in text and "note a note" in text
    assert f"block_scale_gemm {len(gemms)} (" in text


def test_an_arm_that_cannot_run_or_is_wrong_costs_itself_only(here, monkeypatch):
    found = replayed({"mla_decode": "flashmla"})
    assert found.arms["x"].failed and found.arms["x"].unsupported and found.arms["x"].step is None
    assert found.arms[BASE].step is not None
    monkeypatch.setattr(Rank, "alone", lambda *_, **__: 1 / 0)
    found = replayed({"mla_decode": "torch.naive"})
    assert found.arms["x"].change is not None and found.arms["x"].alone is None
    note = r"embedding could not be timed alone: test_replay.py:\d+ in .*: ZeroDivisionError: .*"
    assert any(re.fullmatch(note, each) for each in found.notes)
    for difference in (0.06, math.nan):
        monkeypatch.setattr(Rank, "difference", lambda *_, d=difference, **__: {"mla_decode": d})
        wrong = replayed({"mla_decode": "torch.naive"}).arms["x"]
        assert wrong.failed.startswith("wrong") and wrong.step is None and wrong.change is None
        assert not wrong.unsupported
    monkeypatch.setitem(CHOSEN, "mla_decode", "flashmla")
    with pytest.raises(NothingRan, match="could not be replayed"):
        replayed({})


@pytest.mark.parametrize(("change", "alone", "said"), [
    ((-3, -2), -4, "faster; outputs"), ((2, 3), -1, "faster alone, slower in the step; "),
    ((-1, 1), -2, "no change seen; "), ((-3, -2), 1, "slower alone, faster in the step; "),
    ((2, 3), 1, "slower; "),
])  # fmt: skip
def test_faster_alone_is_not_faster_in_the_step(change, alone, said):
    timed = Timed(ms=sum(change) / 2, low=change[0], high=change[1])
    assert ReplayArm(chosen={}, change=timed, alone=alone).verdict().startswith(said)


def test_layers_are_left_out_where_memory_is_short():
    whole = ReplayStep(R1, Parallel(tp=8), 128, 4096, dense=3, moe=58)
    arms = {BASE: dict.fromkeys(kernels.OPS, "triton.none")}
    assert 80e9 < needed(whole, arms) < 130e9
    gpu = replace(detect("cpu"), kind="cuda", memory=141 * 10**9)
    assert fitted(whole, arms, gpu) == whole
    tight = replace(gpu, memory=round(needed(whole, arms) / 0.95))  # 8 % of it stay free
    assert fitted(whole, arms, tight).moe < 58
    small = fitted(whole, arms, replace(gpu, memory=48 * 10**9))
    assert small.dense == 3 and 5 < small.moe < 30
    assert with_layers(whole, "1,2").layers == 3
    for layers, said in (("2", "two numbers"), ("-1,2", "two numbers"), ("0,0", "one layer")):
        with pytest.raises(UsageError, match=f"DENSE,MOE.*{said}"):
            with_layers(whole, layers)
    wide = replace(whole, parallel=Parallel(), batch=4)
    with pytest.raises(NothingRan, match=r"1 MoE layers of --tp 1 takes .* free: --tp 2 fits"):
        fitted(wide, arms, replace(gpu, memory=round(0.9 * needed(replace(wide, moe=1), arms))))
    with pytest.raises(NothingRan, match=r"1 MoE layers of --tp 8 takes .* free: take fewer"):
        fitted(whole, arms, replace(gpu, memory=10**9))


@pytest.mark.parametrize(("swap", "said"), [
    ("mla=torch.sdpa", "calls no 'mla'; it calls: .*mla_decode"),
    ("mha_prefill=torch.sdpa", "calls no 'mha_prefill'"),
    ("mla_decode", "OP=IMPL"),
    ("mla_decode=torch.none", "unknown implementation 'torch.none'"),
    ("block_scale_gemm:qkv=torch.bf16", "calls no 'block_scale_gemm:qkv'; .*block_scale_gemm:qkv_a"),
    ("mla_decode=torch.sdpa", "is what the base runs.*fused_moe=torch.bf16"),
    ("block_scale_gemm:o_proj=torch.bf16", "is what the base runs.*fused_moe=torch.bf16"),
])  # fmt: skip
def test_mistakes_are_one_line(swap, said):
    with pytest.raises(UsageError, match=rf"^[^\n]*{said}[^\n]*$"):
        read_arms(STEP, detect("cpu"), [], [swap])


def test_what_cannot_run_here_is_said_before_memory_is_counted():
    cpu = detect("cpu")
    with pytest.raises(NothingRan, match=r"^flashmla needs cuda"):
        read_arms(STEP, cpu, [], ["mla_decode=flashmla", "mla_decode=flashmla,fused_moe=torch.naive"])
    assert len(read_arms(STEP, cpu, [], ["mla_decode=flashmla", "mla_decode=torch.naive"])) == 3


@pytest.mark.parametrize(("kind", "arch"), [("cpu", "x86-avx512"), ("cuda", "sm_90"), ("rocm", "gfx942")])
def test_a_base_is_chosen_for_the_ops_that_a_step_calls(kind, arch):
    assert read_arms(STEP, Platform(kind, arch), [], [])[BASE].keys() == CHOSEN.keys()


@pytest.mark.parametrize(("options", "said"), [
    ({"batch": "4,many"}, "--batch"), ({"batch": "0"}, "at least one request"), ({"model": "llama"}, "llama"),
    ({"case": "pages=4"}, "--case takes one page=NUMBER, kv=DTYPE, routing=NAME each"),
    ({"case": "page=1,16"}, "--case"),
    ({"case": "page=x"}, "--case"), ({"case": "kv=int8"}, "int8"), ({"case": "routing=none"}, "none"),
    ({"tp": 7}, "7"), ({"budget": "soon"}, "--budget"),
])  # fmt: skip
def test_a_mistake_of_an_option_is_one_line(options, said):
    with pytest.raises(UsageError, match=rf"^[^\n]*{said}[^\n]*$"):
        list(plans(detect("cpu"), **{"layers": "1,0"} | options))


def test_a_step_is_read():
    case = "page=1 kv=fp8 routing=zipf:0.8"
    made = [*plans(Platform("rocm", "gfx942"), tp=8, batch="2,4", ctx=3200, layers="1,2", case=case)]
    steps = [plan.step for plan in made]
    assert "1 of 3 dense and 2 of 58 MoE layers were replayed" in made[0].notes[0]
    assert [(s.batch, s.ctx, s.heads, s.layers) for s in steps] == [(2, 3200, 16, 3), (4, 3200, 16, 3)]
    assert (steps[0].page, steps[0].kv, steps[0].routing) == (1, "fp8", "zipf:0.8")


def test_the_command_measures_what_it_prints(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replaying, "named_model", lambda name: TINY)
    blind = Blind("a test")
    monkeypatch.setattr(device, "own_device", lambda platform: nullcontext(OwnDevice(platform, blind)))
    words = ["--model", "tiny", "--batch", "2", "--ctx", "33", "--device", "cpu"]
    words += ["--base", ",".join(f"{op}={name}" for op, name in CHOSEN.items())]
    words += ["--swap", "mla_decode=torch.naive"]
    with pytest.raises(SystemExit) as done:
        replay_command.main([*words, "--json", str(tmp_path / "a.json")], standalone_mode=False)
    assert done.value.code == OK
    (kept,) = json.loads((tmp_path / "a.json").read_text())
    assert kept["rounds"] == len(kept["samples"]) > 0
    assert kept["arms"]["mla_decode=torch.naive"]["change"]["ms"]
    assert f"rounds: {kept['rounds']}, " in capsys.readouterr().out
    (arm,) = [name for name in kept["arms"] if name != BASE]
    for unsupported, code in ((True, OK), (False, FAILED)):
        failed = {"chosen": {}, "failed": "why", "unsupported": unsupported}
        one_failed = Replay(**kept | {"arms": kept["arms"] | {arm: failed}})
        monkeypatch.setattr(replaying, "replay", lambda *_, made=one_failed: made)
        with pytest.raises(SystemExit) as done:
            replay_command.main(words, standalone_mode=False)
        assert done.value.code == code
    none = Replay(**kept | {"rounds": 0, "disturbed": 9, "stopped": "disturbed"})
    monkeypatch.setattr(replaying, "replay", lambda *_: none)
    with pytest.raises(NothingRan, match=r"no round counted \(disturbed\), 9 were disturbed: give a longer"):
        replay_command.main(words, standalone_mode=False)


def test_a_replay_of_november_2026_still_loads():
    """Of an H200, with a way more to time calls, of which the page shows what means the same today."""
    file = ROOT / "results/h200/replay/decode-b64.json"
    (found,) = replays(json.loads(file.read_text()), file.name)
    arm = found.arms["mla_decode=flashmla"]
    assert arm.verdict() == "slower; outputs 1.3e-03 apart"
    assert (arm.alone, arm.whole.ms) == pytest.approx((0.132053, 0.728354), rel=1e-5)
    section = replay_section([found], "a").sections[0]
    assert section.title == "decode step of deepseek-r1, 64 requests"
    assert [chart.title for chart in section.charts] == ["What each arm changes"]
    assert "mla_decode=flashmla: +0.2746 (+0.2689 to +0.2804) ms" in section.headline
