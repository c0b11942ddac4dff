"""What rows of libraries do beyond what is recorded of their calls (tests/kernels/test_recorded_calls.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.op import Prepared, Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from shapes.case import parse
from tests.support.answers import ANSWERS
from tests.support.gemm_moe_rows import DEEP, EP, MANY, ROUTED
from tests.support.recorded import Case
from tests.support.stand_ins import Answer

OP = kernels.OPS["fused_moe"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations(OP.name)}


@contextmanager
def prepared(case: Case, answers: Mapping[str, Answer]) -> Iterator[Prepared]:
    with case.lent(answers={**ANSWERS, **answers}):
        sizes = OP.sizes({**OP.defaults(case.arch), **parse(case.text)[0]})
        yield bind(OP, case.implementation, OP.operands(sizes, Seeds(1, 1), "cpu", case.boundary), None)


def stage(kernel: str) -> Any:
    return partial(print, kernelName=kernel)


@pytest.mark.parametrize(
    ("run_1stage", "kernels_of_stages", "told"),
    [
        (True, ("", "other"), "one stage, not tuned"),
        (False, ("", ""), "two stages, not tuned"),
        (False, ("ck_1", "ck_2"), "two stages, tuned: ck_1 ck_2"),
        (True, ("asm", ""), "one stage, tuned: asm"),
    ],
)
def test_aiter_tells_what_it_picked(run_1stage, kernels_of_stages, told):
    first, second = map(stage, kernels_of_stages)
    found, asked = SimpleNamespace(stage1=first, stage2=second, run_1stage=run_1stage), {}
    case = Case(OP.name, "aiter.dispatch", "gfx950", ("aiter",), MANY, "with_quant")
    with prepared(case, {"aiter.get_2stage_cfgs": lambda a: asked.update(a) or found}) as call:
        assert call.picked() == told
    sizes = (asked["token"], asked["model_dim"], asked["inter_dim"], asked["expert"], asked["topk"])
    assert sizes == (64, 256, 128, 9, 4) and asked["q_dtype_w"] == torch.float8_e4m3fn
    assert asked["is_shuffled"] and not asked["is_ep"] and asked["use_g1u1"]


def test_an_aiter_that_lacks_its_configurations_tells_nothing(monkeypatch):
    case = Case(OP.name, "aiter.dispatch", "gfx942", ("aiter",), MANY, "with_quant")
    with prepared(case, {}) as call:
        monkeypatch.delattr(sys.modules["aiter.fused_moe"], "get_2stage_cfgs")
        assert call.picked() == ""


def test_vllms_map_of_experts_leads_where_the_ids_do():
    given: dict[str, Any] = {}
    case = Case(OP.name, "vllm.triton", "sm_90", ("vllm",), EP, "with_quant")
    with prepared(case, {"vllm.fused_experts": lambda a: given.update(a)}) as call:
        call.call()
    ids = given["topk_ids"].long()
    assert bool((ids == given["global_num_experts"] - 1).any()), "no pick of another rank"
    assert torch.equal(given["expert_map"][ids], call.operands.topk_ids)


def test_a_flashinfer_without_a_shared_expert_says_so():
    case = Case(
        OP.name, "flashinfer.trtllm", "sm_100", ("flashinfer 0.6.3",), f"{ROUTED} shared=1", "with_routing"
    )
    with pytest.raises(Unsupported, match=r"flashinfer 0\.6\.3 fuses no shared expert"), prepared(case, {}):
        pass


@pytest.mark.parametrize(
    ("name", "arch", "text", "reason"),
    [
        ("flashinfer.trtllm", "sm_100", f"{ROUTED} ep=2 shared=1", "fuses a shared expert only where ep=1"),
        (
            "flashinfer.trtllm",
            "sm_100",
            "tokens=7 experts=30 topk=2",
            "routes to a multiple of 4 experts, not 30",
        ),
        (
            "flashinfer.trtllm",
            "sm_100",
            "tokens=7 experts=8 topk=2",
            "takes groups of 2 to 32 experts, not of 1",
        ),
        (
            "flashinfer.trtllm",
            "sm_100",
            "tokens=7 experts=512 topk=8",
            "takes groups of 2 to 32 experts, not of 64",
        ),
        ("flashinfer.trtllm", "sm_100", "tokens=7 experts=16 topk=8", "fewer than the 8 in reach, not 8"),
        ("flashinfer.trtllm@sglang", "sm_100", f"{ROUTED} shared=1", "takes no shared expert"),
        ("flashinfer.trtllm_routed@sglang", "sm_100", f"{ROUTED} shared=1", "takes no shared expert"),
        ("flashinfer.cutlass", "sm_100", ROUTED, "needs sm_90"),
        ("deepgemm.masked", "sm_120", DEEP, "needs sm_90, sm_100 or sm_103"),
        ("deepgemm@sglang", "sm_100", DEEP, "on sm_100 needs hidden to be a multiple of 512"),
        ("deepgemm@sglang", "sm_90", DEEP, ""),
        ("deepgemm@vllm", "sm_100", f"{DEEP} scales=fp32", "takes power-of-two scales (scales=ue8m0)"),
        ("deepgemm@vllm", "sm_90", f"{DEEP} scales=fp32", ""),
        ("aiter.asm", "gfx942", f"{DEEP} fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
    ],
)
def test_what_one_does_not_take(name, arch, text, reason):
    row = IMPLEMENTATIONS[name]
    case = OP.case(OP.defaults(arch) | parse(text)[0], boundary=row.boundaries[0])
    found = row.supports(case, named("rocm" if arch.startswith("gfx") else "cuda", arch))
    assert reason in found.reason and found.ok == (not reason)
