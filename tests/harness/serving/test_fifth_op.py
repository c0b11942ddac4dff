"""An op that no model's step calls: serving leaves it alone, and asks for it where a model has it."""

from types import SimpleNamespace

import pytest

import kernels
from harness.serving.link.load import Load
from harness.serving.link.model import link
from harness.serving.link.predictions import needs

OP = SimpleNamespace(boundaries=("core",), baseline={}, engine_like="")


@pytest.fixture(autouse=True)
def rms_norm(monkeypatch):
    monkeypatch.setitem(kernels.OPS, "rms_norm", OP)


def test_the_inverse_question_is_asked_of_every_op_that_the_model_has(monkeypatch):
    load = Load(isl=1024, osl=1024, concurrency=32)
    four = ("block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill")
    assert [need.ops for need in needs(link(), load)][-1] == four
    monkeypatch.setitem(kernels.OPS, "bf16_gemm", OP)
    assert ("bf16_gemm",) in [need.ops for need in needs(link(), load)]
