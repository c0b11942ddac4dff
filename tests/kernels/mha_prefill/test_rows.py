"""What rows of MHA prefill say where their library refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernels.mha_prefill.providers import aiter, cudnn
from kernels.op import Unsupported
from tests.support.answers import ANSWERS, VALUES
from tests.support.recorded import Case, record
from tests.support.stand_ins import Answer, Arguments


def prepared(name: str, arch: str, library: str, **answers: Answer) -> None:
    """On a library of which some functions answer otherwise."""
    case = Case("mha_prefill", name, arch, (library,), "batch=2 new=1..9 prefix=0..5 heads=2")
    record(case, {**ANSWERS, **{f"{library}.{function}": answer for function, answer in answers.items()}})


def raising(error: Exception) -> Answer:
    def answer(arguments: Arguments) -> None:
        raise error

    return answer


@pytest.mark.parametrize("raised", [TypeError, AttributeError, ValueError])
def test_an_api_break_of_cudnn_is_an_error(raised):
    with pytest.raises(raised, match="another interface"):
        prepared("cudnn", "sm_100", "cudnn", build_plans=raising(raised("another interface")))


@pytest.mark.parametrize("step", ["validate", "build_plans"])
def test_what_cudnn_does_not_take_is_unsupported(step):
    refused = VALUES["cudnn.cudnnGraphNotSupportedError"]("no such engine\nat a line")
    with pytest.raises(Unsupported, match=r"^cudnn \S+ with cuDNN \d+: no such engine$"):
        prepared("cudnn", "sm_100", "cudnn", **{step: raising(refused)})


@pytest.mark.parametrize(
    ("graph", "picked"),
    [
        (SimpleNamespace(), ""),
        (SimpleNamespace(selected_engine=None), "cuDNN"),
        (SimpleNamespace(selected_engine=SimpleNamespace(name="sdpa_fwd_prefill_sm100")),
         "sdpa_fwd_prefill_sm100"),
    ],
)  # fmt: skip
def test_which_engine_of_cudnn_ran_is_told(graph, picked):
    prepared = cudnn._Graph.__new__(cudnn._Graph)
    prepared.graph = graph
    assert prepared.picked() == picked


def test_aiter_that_imports_flydsl_needs_it(monkeypatch):
    class Absent:
        def find(self) -> None:
            raise Unsupported("aiter 0.1.20 cannot be imported: No module named 'flydsl'")

    monkeypatch.setattr(aiter, "FLYDSL", Absent())
    with pytest.raises(Unsupported, match="flydsl"):
        prepared("aiter.dispatch", "gfx950", "aiter")
