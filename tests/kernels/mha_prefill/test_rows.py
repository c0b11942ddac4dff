"""What rows of MHA prefill do where versions of their libraries differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels.mha_prefill.providers import aiter, cudnn, flashinfer
from kernels.op import Unsupported
from kernels.operands import Seeds
from tests.doubles import lent

OP = kernels.OPS["mha_prefill"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("mha_prefill")}


@pytest.fixture
def given():
    sizes = OP.sizes({"batch": 2, "new": "1..9", "prefix": "0..5", "heads": 2})
    return OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")


@pytest.mark.parametrize("raised", [TypeError, AttributeError, ValueError])
def test_an_api_break_of_cudnn_is_an_error(raised, given, monkeypatch):
    with lent("cuda", "sm_100", "cudnn_frontend"):
        import cudnn as library

        def changed(self) -> None:
            raise raised("another interface")

        monkeypatch.setattr(library.pygraph, "build_plans", changed)
        with pytest.raises(raised, match="another interface"):
            IMPLEMENTATIONS["cudnn"].prepare(*given)


@pytest.mark.parametrize("step", ["validate", "build_plans"])
def test_what_cudnn_does_not_take_is_unsupported(step, given, monkeypatch):
    with lent("cuda", "sm_100", "cudnn_frontend"):
        import cudnn as library

        def refusing(self) -> None:
            raise library.cudnnGraphNotSupportedError("no such engine\nat a line")

        monkeypatch.setattr(library.pygraph, step, refusing)
        with pytest.raises(Unsupported, match=r"^cudnn \S+ with cuDNN \d+: no such engine$"):
            IMPLEMENTATIONS["cudnn"].prepare(*given)


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


@pytest.mark.parametrize("version", ["0.7.0", "0.7.1"])
def test_flashinfer_counts_offsets_for_cudnn_in_tokens_from_0_7_1(version, given, monkeypatch):
    operands, out = given
    with lent("cuda", "sm_100", "flashinfer_attention", "cudnn_frontend"):
        import flashinfer as library

        plans = []

        def plan(self, qo_indptr, kv_indptr, v_indptr, o_indptr, **rest) -> None:
            plans.append((qo_indptr, kv_indptr, v_indptr, o_indptr))

        def run_0_7_1(self, q, k, v, *args, out=None, lse_base="log2") -> None: ...

        run = {"0.7.0": lambda self, q, k, v, out=None: None, "0.7.1": run_0_7_1}[version]
        monkeypatch.setattr(library.BatchPrefillWithRaggedKVCacheWrapper, "plan", plan)
        monkeypatch.setattr(library.BatchPrefillWithRaggedKVCacheWrapper, "run", run)
        IMPLEMENTATIONS["flashinfer.cudnn"].prepare(operands, out)
    starts = (operands.cu_q, operands.cu_k, operands.cu_k, operands.cu_q)
    widths = (1, 1, 1, 1) if version == "0.7.1" else (2 * 192, 2 * 192, 2 * 128, 2 * 128)
    for offsets, start, width in zip(plans[0], starts, widths, strict=True):
        assert torch.equal(offsets, start * width)


@pytest.mark.parametrize("knows", [False, True])
def test_flashinfer_is_told_that_no_sequence_is_empty(knows, given, monkeypatch):
    monkeypatch.setattr(type(flashinfer.TRTLLM), "takes", lambda self, wish: knows)
    named = flashinfer.known_lengths(given[0])
    assert set(named) == ({"skip_all_rows_active_check"} if knows else {"q_seq_lens_cpu", "kv_seq_lens_cpu"})


def test_aiter_that_imports_flydsl_needs_it(given, monkeypatch):
    class Absent:
        def find(self) -> None:
            raise Unsupported("aiter 0.1.20 cannot be imported: No module named 'flydsl'")

    monkeypatch.setattr(aiter, "FLYDSL", Absent())
    with lent("rocm", "gfx950", "aiter_attention"), pytest.raises(Unsupported, match="flydsl"):
        IMPLEMENTATIONS["aiter.dispatch"].prepare(*given)


@pytest.mark.parametrize(
    ("name", "arch", "generation"),
    [("flash_attn.fa3@vllm", "sm_90", 3), ("flash_attn.fa4@vllm", "sm_100", 4)],
)
def test_vllm_is_asked_for_the_rows_generation(name, arch, generation, given):
    """Another would be right as well, and timed under this name."""
    with lent("cuda", arch, "vllm_attention"):
        prepared = IMPLEMENTATIONS[name].prepare(given[0], None)
    (call,) = [value for value in vars(prepared).values() if hasattr(value, "keywords")]
    assert call.keywords["fa_version"] == generation
