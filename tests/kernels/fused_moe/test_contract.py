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
from kernels.op import Prepared
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.answers import ANSWERS
from tests.support.gemm_moe_rows import EP, MANY
from tests.support.recorded import Case
from tests.support.stand_ins import Answer

OP = kernels.OPS["fused_moe"]


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
