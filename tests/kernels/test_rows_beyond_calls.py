"""What rows of libraries do beyond what is recorded of their calls (test_recorded_calls.py)."""

import gc
import sys
import weakref
from contextlib import nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.nn.attention.bias  # which imports what a test replaces
from torch.nn.attention import SDPBackend

import kernels
from kernels.block_scale_gemm.providers import flashinfer
from kernels.compose import bind
from kernels.interfaces import signatures
from kernels.mha_prefill.providers import aiter, cudnn, torch_eager
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import Platform
from shapes.case import parse
from tests.support.answers import ANSWERS, VALUES
from tests.support.composed import innermost
from tests.support.gemm_moe_rows import EP, MANY, RAGGED
from tests.support.judging import judged
from tests.support.recorded import Case, record
from tests.support.recorded_rows import CASES
from tests.support.stand_ins import Answer, Arguments

GEMM, MOE, MHA, MLA = kernels.OPS

# AITER


CK = {"libtype": "ck", "kernelName": "a8w8_1x128x128", "splitK": 2}


@pytest.mark.parametrize("boundary", kernels.OPS[GEMM].boundaries)
@pytest.mark.parametrize(("name", "row", "told"), [
    ("aiter.dispatch", CK, "tuned: ck a8w8_1x128x128 splitK=2"),
    ("aiter.dispatch_preshuffled", {"libtype": "asm"}, "tuned: asm splitK=0"),
    ("aiter.dispatch", None, "default: the tuned table has no row for these sizes"),
    ("aiter.ck", CK, ""),
])  # fmt: skip
def test_aiter_tells_what_its_table_picked(name, row, told, boundary):
    asked = {}
    tables = SimpleNamespace(
        AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE="plain",
        AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE="shuffled",
    )
    ops = "aiter.ops.gemm_op_a8w8"
    places = {f"{ops}.get_CKGEMM_config": "(M, N, K, tuned_file=None)", f"{ops}.AITER_CONFIGS": ""}
    how = {"also": {"aiter": places}, "values": {f"{ops}.AITER_CONFIGS": tables}}
    answers = {"aiter.get_CKGEMM_config": lambda a: asked.update(a) or row}
    case = Case(GEMM, name, "gfx942", ("aiter",), RAGGED, boundary)
    with case.prepared(answers, **how) as call:
        assert call.picked() == told
    table = "shuffled" if "preshuffled" in name else "plain"
    assert asked == ({"M": 33, "N": 384, "K": 640, "tuned_file": table} if told else {})


def test_an_aiter_without_that_table_tells_nothing():
    with Case(GEMM, "aiter.dispatch", "gfx942", ("aiter 0.1.5",), RAGGED).prepared() as call:
        assert call.picked() == ""


@pytest.mark.parametrize(("said", "raised"), [("not supported", Unsupported), ("HIP error", RuntimeError)])
def test_what_ck_does_not_take_is_unsupported(said, raised):
    def refuse(a: Any) -> None:
        raise RuntimeError(f"This GEMM is\n{said}!")

    case = Case(GEMM, "aiter.ck", "gfx942", ("aiter",), RAGGED)
    with case.prepared({"aiter.gemm_a8w8_blockscale_ck": refuse}) as call, pytest.raises(raised) as error:
        call.call()
    assert type(error.value) is raised
    if raised is Unsupported:
        assert str(error.value) == "gemm_a8w8_blockscale_ck: This GEMM is not supported!"


# Other versions, other kernels


def test_deepgemm_1_has_other_names(monkeypatch):
    """Of the function and its arguments: deep_gemm/jit_kernels/gemm.py of 1.0.0."""
    case = Case(GEMM, "deepgemm", "sm_90", ("deep_gemm",), RAGGED)
    given = {}
    old, op = "deep_gemm.gemm_fp8_fp8_bf16_nt", kernels.OPS[GEMM]
    also = {"deep_gemm": {old: "(lhs, rhs, out)"}}
    with case.lent(also=also, answers={old: given.update}) as (here, _):
        monkeypatch.delattr(sys.modules["deep_gemm"], "fp8_gemm_nt")
        operands = op.operands(case.sizes(here), Seeds(), "cpu")
        out = op.empty_output(operands.sizes, "cpu")
        bind(op, case.implementation, operands, out).call()
        monkeypatch.undo()
    assert given["lhs"][0] is operands.a_q and given["lhs"][1].stride() == (1, 36)
    assert given["rhs"] == (operands.b_q, operands.b_scale) and given["out"] is out


def test_before_0_2_9_flashinfer_has_no_backend_to_name():
    """There a row that names one would time CUTLASS; as its `since` says."""
    old = signatures.parse(
        "(a, b, a_scale, b_scale, scale_major_mode='MN', mma_sm=1, scale_granularity_mnk=(1, 128, 128), "
        "out=None, out_dtype=None)"
    )
    assert flashinfer.CUTLASS.complaint(old) == "" and flashinfer.CUTLASS.lacks(old) == {"backend"}
    assert "backend" in flashinfer.OTHER_BACKENDS.complaint(old)


def test_where_sglangs_product_for_few_tokens_does_not_run_it_is_unsupported():
    """try_smallm_fp8_bs_linear then gives None, for SGLang to take another."""
    libraries, text = ("sglang", "aiter"), "m=5 n=4096 k=1024"
    case = Case(GEMM, "sglang.small_m", "gfx950", libraries, text, "with_quant")
    with (
        pytest.raises(Unsupported, match="few tokens does not run here"),
        case.prepared({"sglang.try_smallm_fp8_bs_linear": lambda a: None}),
    ):
        pass


# Fused MoE


def stage(kernel: str) -> Any:
    return partial(print, kernelName=kernel)


@pytest.mark.parametrize(("run_1stage", "kernels_of_stages", "told"), [
    (True, ("", "other"), "one stage, not tuned"),
    (False, ("", ""), "two stages, not tuned"),
    (False, ("ck_1", "ck_2"), "two stages, tuned: ck_1 ck_2"),
    (True, ("asm", ""), "one stage, tuned: asm"),
])  # fmt: skip
def test_aiter_tells_how_many_stages_it_picked(run_1stage, kernels_of_stages, told):
    first, second = map(stage, kernels_of_stages)
    found, asked = SimpleNamespace(stage1=first, stage2=second, run_1stage=run_1stage), {}
    case = Case(MOE, "aiter.dispatch", "gfx950", ("aiter",), MANY, "with_quant")
    with case.prepared({"aiter.get_2stage_cfgs": lambda a: asked.update(a) or found}) as call:
        assert call.picked() == told
    sizes = (asked["token"], asked["model_dim"], asked["inter_dim"], asked["expert"], asked["topk"])
    assert sizes == (64, 256, 128, 9, 4) and asked["q_dtype_w"] == torch.float8_e4m3fn
    assert asked["is_shuffled"] and not asked["is_ep"] and asked["use_g1u1"]


def test_an_aiter_that_lacks_its_configurations_tells_nothing(monkeypatch):
    case = Case(MOE, "aiter.dispatch", "gfx942", ("aiter",), MANY, "with_quant")
    with case.prepared({}) as call:
        monkeypatch.delattr(sys.modules["aiter.fused_moe"], "get_2stage_cfgs")
        assert call.picked() == ""


def test_vllms_map_of_experts_leads_where_the_ids_do():
    given: dict[str, Any] = {}
    case = Case(MOE, "vllm.triton", "sm_90", ("vllm",), EP, "with_quant")
    with case.prepared({"vllm.fused_experts": lambda a: given.update(a)}) as call:
        call.call()
    ids = given["topk_ids"].long()
    assert bool((ids == given["global_num_experts"] - 1).any()), "no pick of another rank"
    assert torch.equal(given["expert_map"][ids], call.operands.topk_ids)


FLASHINFERS = {case.name: case for case in CASES if case.op == MOE and case.name.startswith("flashinfer")}


@pytest.mark.parametrize("case", FLASHINFERS.values(), ids=FLASHINFERS)
def test_turns_share_what_was_made_of_the_same_weights_and_of_no_others(case):
    def made(call: Any) -> dict[str, torch.Tensor]:
        return {name: it for name, it in vars(innermost(call).stationary).items() if name[0] == "w"}

    with case.prepared() as first:
        turn, cold = (
            bind(kernels.OPS[MOE], case.implementation, first.operands.turned(1, cold), first.out, first)
            for cold in (False, True)
        )
        assert {"w31", "w31_scale"} <= set(made(first))
        assert all(made(turn)[name] is it and made(cold)[name] is not it for name, it in made(first).items())


# MHA prefill


def record_of(name: str, arch: str, library: str, **answers: Answer) -> None:
    """On a library of which some functions answer otherwise."""
    case = Case(MHA, name, arch, (library,), "batch=2 new=1..9 prefix=0..5 heads=2")
    record(case, {**ANSWERS, **{f"{library}.{function}": answer for function, answer in answers.items()}})


def raising(error: Exception) -> Answer:
    def answer(arguments: Arguments) -> None:
        raise error

    return answer


@pytest.mark.parametrize("raised", [TypeError, AttributeError, ValueError])
def test_an_api_break_of_cudnn_is_an_error(raised):
    with pytest.raises(raised, match="another interface"):
        record_of("cudnn", "sm_100", "cudnn", build_plans=raising(raised("another interface")))


@pytest.mark.parametrize("step", ["validate", "build_plans"])
def test_what_cudnn_does_not_take_is_unsupported(step):
    refused = VALUES["cudnn.cudnnGraphNotSupportedError"]("no such engine\nat a line")
    with pytest.raises(Unsupported, match=r"^cudnn \S+ with cuDNN \d+: no such engine$"):
        record_of("cudnn", "sm_100", "cudnn", **{step: raising(refused)})


@pytest.mark.parametrize(("graph", "picked"), [
    (SimpleNamespace(), ""),
    (SimpleNamespace(selected_engine=None), "cuDNN"),
    (SimpleNamespace(selected_engine=SimpleNamespace(name="sdpa_fwd_prefill_sm100")),
     "sdpa_fwd_prefill_sm100"),
])  # fmt: skip
def test_which_engine_of_cudnn_ran_is_told(graph, picked):
    assert cudnn.engine_of(graph) == picked


HELD = [torch_eager.Flash(), torch_eager.Efficient(), torch_eager.Cudnn()]


def prefill(text: str = "batch=2 new=1..9 prefix=0..5 heads=2") -> tuple[Any, torch.Tensor]:
    sizes = kernels.OPS[MHA].sizes(parse(text)[0])
    return kernels.OPS[MHA].make(sizes, Seeds(1, 1), "cpu"), kernels.OPS[MHA].empty_output(sizes, "cpu")


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
@pytest.mark.parametrize("row", HELD, ids=lambda row: row.backend)
def test_torch_is_held_to_one_kernel_and_asked_whether_that_takes_each_sequence(monkeypatch, row, kind):
    asked, held = [], []
    (o, out), can_use = prefill(), f"can_use_{row.backend}_attention"
    monkeypatch.setattr(torch_eager.platforms, "of", lambda device: Platform(kind, ""))
    hold = wraps(torch.nn.attention.sdpa_kernel)(lambda kernel: held.append(kernel) or nullcontext())
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", hold)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: asked.append(given))
        patch.setattr(torch.backends.cuda, can_use, lambda params, debug: len(asked) <= len(o.sequences))
        prepared = row.prepare(o, out)
        with pytest.raises(Unsupported, match=f"this torch's {row.backend} kernel does not take"):
            row.prepare(o, out)
    prepared.call()
    assert held == [getattr(SDPBackend, f"{row.backend.upper()}_ATTENTION")]
    assert judged(kernels.OPS[MHA], row, o.sizes, o, out)["reason"] == ""
    for (q, k, v, mask, dropout, causal, _), s in zip(asked[:-1], o.sequences, strict=True):
        assert (q.shape, k.shape) == ((1, 2, s.new, 192), (1, 2, s.length, 192))
        assert v.shape == (1, 2, s.length, 192 if row.padded else 128)
        written_out = s.prefix > 0 and kind == "rocm"
        assert (mask is not None, dropout, causal) == (written_out, 0.0, s.prefix == 0)


OLDER, NEWER = (
    lambda q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False: None,
    lambda q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1): None,
)


@pytest.mark.parametrize(
    ("version", "options"),
    [(OLDER, {"is_causal": True}), (NEWER, {"window_size": (-1, 0), "scale": 0.25})],
)
def test_torchs_call_on_all_sequences_is_given_what_its_version_takes(monkeypatch, version, options):
    o, out = prefill()
    o = o.replaced(scale=options.get("scale", o.scale))
    attend = create_autospec(version, side_effect=lambda q, *rest, **more: q + 1)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=attend))
    prepared = torch_eager.varlen().prepare(o, out)
    prepared.call()
    ((q, k, v, *lengths), given), at = attend.call_args, [(s.new, s.length) for s in o.sequences]
    assert q is o.q and k is o.k and torch.equal(v[..., :128], o.v) and not v[..., 128:].any()
    assert lengths[0] is o.cu_q and lengths[1] is o.cu_k
    assert lengths[2:] == [max(new for new, _ in at), max(length for _, length in at)] and given == options
    assert torch.equal(out, (o.q + 1)[..., :128])


def test_aiter_that_imports_flydsl_needs_it(monkeypatch):
    class Absent:
        def find(self) -> None:
            raise Unsupported("aiter 0.1.20 cannot be imported: No module named 'flydsl'")

    monkeypatch.setattr(aiter, "FLYDSL", Absent())
    with pytest.raises(Unsupported, match="flydsl"):
        record_of("aiter.dispatch", "gfx950", "aiter")


BY_OUR_TRITON = {"deepgemm.masked", "deepgemm.contiguous", "aiter.triton", "vllm.triton"}
"""Rows of GEMM and MoE that launch a Triton kernel of the suite, which needs a GPU or the interpreter."""

ONE_OF_EACH_ROW = {
    f"{case.op} {case.name}": case
    for case in reversed(CASES)
    if case.op in (MLA, MHA) or case.name not in BY_OUR_TRITON
}


@pytest.mark.parametrize("case", ONE_OF_EACH_ROW.values(), ids=ONE_OF_EACH_ROW)
def test_what_was_prepared_is_freed_at_once(case):
    """A call that refers to the object that holds it keeps a device's memory until Python collects cycles."""
    if "triton" in case.implementation.also:
        pytest.importorskip("triton")
    gc.disable()
    try:
        with case.prepared() as prepared:
            held = weakref.ref(innermost(prepared))
            del prepared
        assert held() is None
    finally:
        gc.enable()


def test_aiters_output_is_the_rows_own_in_each_call():
    """Where AITER folds heads it gives the tensor other memory, which a graph would keep after it is free."""
    places: list[int] = []

    def fold(a: Any) -> None:
        places.append(a["o"].data_ptr())
        a["o"].set_(torch.full_like(a["o"], len(places)))

    case = Case(MLA, "aiter.asm_persistent", "gfx942", ("aiter",), "batch=2 q=2 ctx=9 heads=32 kv=bf16")
    with case.prepared({"aiter.mla_decode_fwd": fold}) as call:
        for number in (1, 2):
            call.call()
            assert bool((call.result() == number).all())
    assert places[0] == places[1]
