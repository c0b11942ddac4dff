"""Step replay: the step computes what the model's layers compute, arms differ in what was swapped only, and
what is measured of them is told apart from what isolated calls would have said."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

import kernels
from harness.cli.serving.replay import show
from harness.errors import OK, NothingRan, UsageError
from harness.machine.monitor.base import Blind
from harness.run import device
from harness.run.device import OwnDevice
from harness.serving.replay import glue
from harness.serving.replay.child import Rank
from harness.serving.replay.memory import fitted, needed
from harness.serving.replay.replay import ALIKE, BASE, ReplayPlan, left_out, replay, require_known
from harness.serving.replay.report import table
from harness.serving.replay.request import ReplayRequest, read_arms
from harness.serving.replay.schema import Replay
from harness.serving.replay.step import ReplayStep, calls, places
from harness.statistics.intervals import interval
from kernels.formats import dequantise_weights
from kernels.platform import detect
from shapes.attention import Parallel
from shapes.linears import linears
from shapes.models import model, read_model
from tests.support.workers_here import WorkerHere

R1 = model("deepseek-r1")
TINY = replace(
    R1, name="tiny", hidden_size=256, q_lora_rank=128, intermediate_size=256, moe_intermediate_size=128,
    n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, num_attention_heads=2,
    num_hidden_layers=3, first_k_dense_replace=1, vocab_size=64,
)  # fmt: skip
CHOSEN = {"block_scale_gemm": "torch.bf16", "fused_moe": "torch.bf16", "mla_decode": "torch.sdpa",
          "mha_prefill": "torch.sdpa"}  # fmt: skip


def step(phase="decode", **more):
    contexts = more.pop("contexts", (33, 33, 33))
    new = contexts if phase == "prefill" else ()
    return ReplayStep(TINY, Parallel(), phase, contexts, new, dense=1, moe=1, page=16, **more)


@pytest.fixture(scope="module")
def rank():
    made = Rank()
    made.hello("cpu", "cpu", 1)
    return made


def test_a_whole_step_of_r1_makes_the_calls_of_its_linears():
    parallel = Parallel(tp=8)
    decode = ReplayStep(R1, parallel, "decode", (4096,) * 4, dense=3, moe=58)
    assert left_out(decode)[0] == "122 all-reduces of TP8"
    prefill = replace(decode, phase="prefill", new=(4096,) * 4)
    for step, attention, calls_of in ((decode, "mla_decode", "decode_calls"),
                                      (prefill, "mha_prefill", "prefill_calls")):  # fmt: skip
        names = [place.name for place in places(step)]
        for linear in linears(R1, parallel):
            assert names.count(linear.name) == getattr(linear, calls_of), linear.name
        assert names.count(attention) == 61 and names.count("fused_moe") == 58
    fewer = ReplayStep(R1, parallel, "decode", (64,), dense=2, moe=4)  # which stand for all
    assert calls(fewer, "mla_decode", "") == calls(fewer, "block_scale_gemm", "qkv_a") == (6, 61)
    assert calls(fewer, "fused_moe", "") == calls(fewer, "block_scale_gemm", "shared down") == (4, 58)
    assert calls(fewer, "block_scale_gemm", "dense down") == (2, 3)


def _linear(rank, place, x):
    o = rank.operands[place]
    return x.double() @ dequantise_weights(o.b_q, o.b_scale).double().T


def _norm(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + glue.EPSILON).rsqrt()


def _gated(x):
    import torch

    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _experts(rank, place, x):
    import torch

    o = rank.operands[place]
    out = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(o.topk_ids.tolist(), o.topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            w13 = dequantise_weights(o.w13[expert], o.w13_scale[expert]).double()
            w2 = dequantise_weights(o.w2[expert], o.w2_scale[expert]).double()
            out[token] += weight * (w2 @ _gated(w13 @ x[token]))
    return out


def _attend(rank, layer, q, latent, k_rope, scale):
    """Attention in the model's own form, not absorbed: of each request's cache, or of its new tokens."""
    import torch

    given, out, start = rank.step, [], 0
    if given.phase == "prefill":
        k, v = _linear(rank, f"{layer}.kv_b", latent).view(-1, given.heads, 256).split([128, 128], -1)
    for request, new in enumerate(given.new or (1,) * given.tokens):
        rows = slice(start, start + new)
        start += new
        if given.phase == "prefill":
            keys, values, turned = k[rows], v[rows], k_rope[rows]
        else:
            o = rank.operands[f"{layer}.mla_decode"]
            cached = o.kv.view(-1, o.kv.shape[-1])[o.token_slots(request)].double()
            cached[-1] = torch.cat((latent[request], k_rope[request]))
            latents, turned = cached.split([512, 64], -1)
            w_uk, w_uv = (rank.flow.weights[layer, name].double() for name in ("w_uk", "w_uv"))
            keys = torch.einsum("hnl,sl->shn", w_uk, latents)
            values = torch.einsum("hlv,sl->shv", w_uv, latents)
        keys = torch.cat((keys, turned[:, None].expand(-1, given.heads, -1)), -1)
        scores = torch.einsum("thd,shd->hts", q[rows], keys) * scale
        scores += torch.full((new, len(keys)), -torch.inf).triu(1 + len(keys) - new)
        out.append(torch.einsum("hts,shv->thv", scores.softmax(-1), values))
    return torch.cat(out)


def expected_logits(rank):
    """The step in fp64 by the model's definition, from the rank's own weights."""
    import torch

    flow, given = rank.flow, rank.step
    ids = torch.arange(given.tokens) * 7919 % TINY.vocab_size
    residual = flow.weights[0, "embedding"][ids].double()
    spans = zip(given.contexts, given.new or (1,) * given.tokens, strict=True)
    positions = torch.tensor([i for context, new in spans for i in range(context - new, context)])
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(32).double() / 32)
    cos, sin = angles.cos(), angles.sin()
    scale = next(o.scale for o in rank.operands.values() if hasattr(o, "scale"))
    for layer in range(given.layers):
        a = _linear(rank, f"{layer}.qkv_a", _norm(residual))
        q_a, latent, k_rope = a.split([TINY.q_lora_rank, TINY.kv_lora_rank, 64], -1)
        q = _linear(rank, f"{layer}.q_b", _norm(q_a)).view(-1, given.heads, 192)
        q = torch.cat((q[..., :128], glue.rotary(q[..., 128:], cos, sin)), -1)
        k_rope = glue.rotary(k_rope[:, None], cos, sin)[:, 0]
        attended = _attend(rank, layer, q, _norm(latent), k_rope, scale)
        residual = residual + _linear(rank, f"{layer}.o_proj", attended.flatten(1))
        x = _norm(residual)
        kind = "dense" if layer < given.dense else "shared"
        down = _linear(rank, f"{layer}.{kind} down", _gated(_linear(rank, f"{layer}.{kind} gate_up", x)))
        if kind == "shared":
            down += _experts(rank, f"{layer}.fused_moe", x)
        residual = residual + down
    ends = torch.tensor(given.new or (1,) * given.tokens).cumsum(0) - 1
    return _norm(residual)[ends] @ flow.weights[given.layers, "lm_head"].double().T


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("gemm", "most"), [("torch.bf16", 0.03), ("torch.naive", 0.15)])
def test_the_step_computes_the_model(rank, phase, gemm, most):
    """`torch.naive` rounds activations to FP8."""
    rank.open(step(phase), 0, "eager")
    rank.prepare("a", CHOSEN | {"block_scale_gemm": gemm})
    wanted = expected_logits(rank)
    got = rank.flow.logits.double()
    error = (got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert got.shape == wanted.shape and error < most, float(error)


def test_arms_share_operands_and_nothing_else(rank):
    picks = ((0, 1), (2, 3), (7, 0))
    rank.open(step(picks=(picks,)), 0, "eager")
    assert tuple(map(tuple, rank.operands["1.fused_moe"].topk_ids.tolist())) == picks, "recorded routing"
    assert (rank.operands["0.qkv_a"].b_q.float() != rank.operands["1.qkv_a"].b_q.float()).any()
    rank.prepare("a", CHOSEN)
    bound = len(rank.prepared)
    rank.prepare("b", CHOSEN | {"block_scale_gemm:qkv_a": "torch.naive"})
    assert len(rank.prepared) == bound + 2
    assert set(rank.decompose("b", 1)) == {place.key for place in places(rank.step)}
    rank.prepare("a again", CHOSEN, apart=True)
    assert len(rank.prepared) == 2 * bound + 2
    assert rank.isolated("qkv_a", "torch.naive", True, 0.01) > 0


def test_a_wrong_kernel_shows_in_the_difference(rank):
    rank.open(step(), 0, "eager")
    rank.prepare("a", CHOSEN)
    other = CHOSEN | {"mla_decode": "torch.naive"}
    assert rank.difference("mla_decode", CHOSEN, other)["mla_decode"] < 0.02
    wrong = rank._bound(next(p for p in rank.places if p.name == "mla_decode"), other)
    right = wrong.call
    wrong.call = lambda: (right(), wrong.result().mul_(1.1))
    assert rank.difference("mla_decode", CHOSEN, other)["mla_decode"] > ALIKE


@pytest.fixture
def rank_here(monkeypatch):
    """Replays of a test that start no process."""
    monkeypatch.setattr("harness.serving.replay.replay.Worker", WorkerHere)
    monkeypatch.setattr("harness.serving.replay.replay.ISOLATED_S", 1e-3)


def replayed(swap, budget_s=1.0, rounds=1, decomposed=1):
    plan = ReplayPlan(step(), {BASE: CHOSEN, "x": CHOSEN | swap}, "eager", 1, budget_s, blocks=2,
                      rounds=rounds, turn_s=0.01, decomposed=decomposed)  # fmt: skip
    return replay(plan, detect("cpu"), Blind("a test"), say=lambda text: None)


def test_measured_by_the_engine_and_told_apart(rank_here, monkeypatch):
    def isolated(self, place, name, cold, at_least):
        return 1e-3 if name == CHOSEN["block_scale_gemm"] else 4e-3 if cold else 3e-3

    opened, seeds = Rank.open, []
    monkeypatch.setattr(Rank, "open", lambda *a, seed, **b: seeds.append(seed) or opened(*a, seed=seed, **b))
    monkeypatch.setattr(Rank, "isolated", isolated)
    found = replayed({"block_scale_gemm": "torch.naive"}, 60.0, rounds=3, decomposed=2)
    base, slow = found.arms[BASE], found.arms["x"]
    assert base.change is None and slow.change.low <= slow.change.ms <= slow.change.high
    assert found.rounds == len(found.samples) == 6 and seeds == [0, 1]

    def mean(of):
        return pytest.approx(interval((each["block"], 1e3 * of(each)) for each in found.samples).mean)

    assert (base.step.ms, slow.step.ms) == (mean(lambda r: r[BASE]), mean(lambda r: r["x"]))
    assert slow.change.ms == mean(lambda r: r["x"] - r[BASE])
    # Replayed: 3 calls of each layer, and 2 for its experts; the model has one more layer of experts.
    assert slow.whole.ms == pytest.approx(slow.change.ms * 15 / 10)
    assert (slow.cold, slow.warm) == pytest.approx((10 * 3.0, 10 * 2.0))
    assert set(slow.difference) == {p.name for p in places(step()) if p.op == "block_scale_gemm"}
    assert found.twin is not None and "x" in table(found)
    assert sum(base.classes.values()) == pytest.approx(sum(base.places.values()))
    assert slow.own == pytest.approx(sum(slow.places[name] - base.places[name] for name in slow.difference))


def test_an_arm_that_cannot_run_or_is_wrong_costs_itself_only(rank_here, monkeypatch):
    found = replayed({"mla_decode": "flashmla"})
    assert found.arms["x"].failed and found.arms["x"].step is None
    assert found.arms[BASE].step is not None
    monkeypatch.setattr("harness.serving.replay.replay.ALIKE", 1e-6)
    other = replayed({"mla_decode": "torch.naive"}).arms["x"]
    assert other.failed.startswith("wrong") and other.step is None and other.change is None
    monkeypatch.undo()
    monkeypatch.setattr("harness.serving.replay.replay.Worker", WorkerHere)
    monkeypatch.setattr(Rank, "difference", lambda *_, **__: {"mla_decode": math.nan})
    assert replayed({"mla_decode": "torch.naive"}).arms["x"].failed.startswith("wrong"), "NaN is none"
    monkeypatch.setitem(CHOSEN, "mla_decode", "flashmla")
    with pytest.raises(NothingRan, match="could not be replayed"):
        replayed({})


def test_the_process_that_replays_has_the_engine_s_environment(monkeypatch):
    given = []

    def worker(role, environment, log, plugins):
        given.append(environment)
        raise NothingRan("a test")

    monkeypatch.setattr("harness.serving.replay.replay.Worker", worker)
    engine = {"MALLOC_MMAP_MAX_": None, "KMP_X": "1"}
    with pytest.raises(NothingRan, match="a test"):
        replay(ReplayPlan(step(), {BASE: CHOSEN}, "eager", 1, 1.0, environment=engine), detect("cpu"), None)
    assert given[0].items() >= engine.items() and given[0]["OMP_NUM_THREADS"] == "1"


def test_layers_are_left_out_where_memory_is_short():
    whole = ReplayStep(R1, Parallel(tp=8), "decode", (4096,) * 128, dense=3, moe=58)
    arms = {BASE: dict.fromkeys(kernels.OPS, "triton.none")}
    assert 80e9 < needed(whole, arms) < 130e9
    gpu = replace(detect("cpu"), kind="cuda", memory=141 * 10**9)
    assert fitted(whole, None, arms, gpu)[0] == whole
    tight = replace(gpu, memory=round(needed(whole, arms) / 0.95))  # 8 % of it stay free
    assert fitted(whole, None, arms, tight)[0].moe < 58
    small, note = fitted(whole, None, arms, replace(gpu, memory=48 * 10**9))
    assert small.dense == 3 and 5 < small.moe < 30 and "58 MoE layers were replayed" in note[0]
    assert fitted(whole, "1,2", arms, gpu)[0].layers == 3
    with pytest.raises(UsageError, match="DENSE,MOE"):
        fitted(whole, "2", arms, gpu)
    with pytest.raises(NothingRan, match="more than the device has"):
        fitted(whole, None, arms, replace(gpu, memory=10**9))


@pytest.mark.parametrize(("swap", "said"), [
    ("mla=torch.sdpa", "unknown op 'mla'"),
    ("mla_decode", "OP=IMPL"),
    ("mla_decode=torch.none", "unknown implementation 'torch.none'"),
    ("block_scale_gemm:qkv=torch.bf16", "no place 'qkv' in this step; places:"),
    ("mla_decode=torch.sdpa", "is what the base runs.*fused_moe=torch.bf16"),
    ("block_scale_gemm:o_proj=torch.bf16", "is what the base runs.*fused_moe=torch.bf16"),
])  # fmt: skip
def test_mistakes_are_one_line(swap, said):
    with pytest.raises(UsageError, match=rf"^[^\n]*{said}[^\n]*$"):
        require_known(read_arms(detect("cpu"), [], [swap]), step())


@pytest.mark.parametrize("wrong", [
    {"contexts": ()}, {"contexts": (0,)}, {"phase": "prefill", "contexts": (8,), "new": (9,)},
    {"phase": "prefill", "contexts": (8, 8), "new": (8,)}, {"dense": 0, "moe": 0},
    {"moe": 1, "picks": (((0, 1),),)},
])  # fmt: skip
def test_a_step_that_is_none(wrong):
    with pytest.raises(ValueError):
        ReplayStep(TINY, Parallel(), **({"phase": "decode", "contexts": (8, 8)} | wrong))


def test_a_model_is_read_from_its_folder(tmp_path):
    path, left_out = tmp_path / "config.json", ("name", "source", "rope_scaling", "weight_block_size")
    config = {name: value for name, value in vars(TINY).items() if name not in left_out}
    config["dtype"] = config.pop("torch_dtype") + " by its newer name"
    config["rope_scaling"] = None
    path.write_text(json.dumps(config))
    read = read_model(tmp_path)
    assert read == read_model(path)
    assert (read.hidden_size, read.weight_block_size, read.torch_dtype) == (256, (128, 128), config["dtype"])
    del config["kv_lora_rank"]
    broken = (json.dumps(config), "'kv_lora_rank'"), ("[1", "cannot read"), ("[1]", "no JSON object")
    for text, says in broken:
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_model(tmp_path)


def test_a_step_is_read():
    request = ReplayRequest(tp=8, phase="prefill", ctx="1", new="3200", page=16)
    found = request.step(R1, 2, detect("cpu"))
    assert (found.tokens, found.layers, found.heads) == (6400, 61, 16)
    with pytest.raises(UsageError, match="--ctx takes numbers"):
        ReplayRequest(tp=8, ctx="many").step(R1, 2, detect("cpu"))
    with pytest.raises(UsageError, match="--launch graph needs a GPU"):
        list(ReplayRequest(launch="graph", layers="1,0").plans(detect("cpu")))


def test_the_command_measures_what_it_prints(rank_here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.serving.replay.request.read_rank", lambda name: TINY)
    monkeypatch.setattr(
        device, "own_device", lambda platform: nullcontext(OwnDevice(platform, Blind("a test")))
    )
    base = [f"{op}={name}" for op, name in CHOSEN.items()]
    request = ReplayRequest("tiny", batch="2", ctx="33", new="8", base=base, swap=["mla_decode=torch.naive"],
                            device="cpu", threads=1, budget="0.5s", blocks=2, seed=7)  # fmt: skip
    assert show(request, str(tmp_path)) == OK
    kept = json.loads((tmp_path / "decode-b2.json").read_text())
    assert kept["rounds"] == len(kept["samples"]) > 0
    assert kept["arms"]["mla_decode=torch.naive"]["change"]["ms"]
    assert f"{kept['rounds']} rounds" in capsys.readouterr().out
    none = Replay(**kept | {"rounds": 0, "disturbed": 9, "stopped": "disturbed"})
    monkeypatch.setattr("harness.serving.replay.replay.replay", lambda *_: none)
    with pytest.raises(NothingRan, match=r"no round counted \(disturbed\), 9 were disturbed: give a longer"):
        show(request, str(tmp_path))
