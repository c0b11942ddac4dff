"""An op that no model's step calls: serving leaves it alone, and asks for it where a model has it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kernels
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.inverse import needs
from harness.serving.link.model import link
from harness.serving.replay.replay import BASE
from harness.serving.replay.request import read_arms
from harness.serving.trace.classify import UNKNOWN
from harness.serving.trace.steps import Rows, _by_sampling
from kernels.platform import Platform

OP = SimpleNamespace(boundaries=("core",), baseline={}, engine_like="")


@pytest.fixture(autouse=True)
def rms_norm(monkeypatch):
    monkeypatch.setitem(kernels.OPS, "rms_norm", OP)


def test_a_replay_chooses_for_the_ops_that_a_step_calls():
    gpu = {"block_scale_gemm": "triton.split_k", "fused_moe": "triton.grouped", "mha_prefill": "torch.sdpa",
           "mla_decode": "triton.split_kv"}  # fmt: skip
    assert read_arms(Platform("cuda", "sm_90"), [], [])[BASE] == gpu
    for kind, arch in (("cpu", "x86-avx512"), ("rocm", "gfx942")):
        assert read_arms(Platform(kind, arch), [], [])[BASE].keys() == gpu.keys()


def test_the_inverse_question_is_asked_of_every_op_that_the_model_has(monkeypatch):
    load = ClosedLoop(isl=1024, osl=1024, concurrency=32)
    four = ("block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill")
    assert [need.ops for need in needs(link(), load, None)][-1] == four
    monkeypatch.setitem(kernels.OPS, "bf16_gemm", OP)
    assert ("bf16_gemm",) in [need.ops for need in needs(link(), load, None)]


def test_a_step_of_a_trace_may_begin_with_it():
    classes = ("bf16_gemm", "sampling", "rms_norm")
    rules = [replace(UNKNOWN, op_class=name, sampling=name == "sampling") for name in classes]
    zeros = np.zeros(4, int)
    rows = Rows(rules=rules, rule=np.array([0, 1, 2, 1]), device=zeros, start=np.arange(4), at=np.arange(4),
                process=zeros, graph=np.zeros(4, bool))  # fmt: skip
    of, names, _ = _by_sampling(rows)
    assert of.tolist() == [0, 0, 1, 1] and len(names) == 2
