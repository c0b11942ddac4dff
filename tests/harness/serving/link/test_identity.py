"""Whose times they are: of which machine, which engine, which kernel. What is another's is refused."""

from __future__ import annotations

import shutil

import pytest

from harness.errors import UsageError
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from harness.serving.link.predictions import outlook
from harness.serving.link.times.kernel_identity import words
from harness.serving.link.times.tables import bundled, read_tables
from harness.serving.names import engine_name, hardware_name
from tests.support.serving_link_tables import written

LOAD = ClosedLoop(1024, 1024, 16)
TRITON, TRTLLM = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    """The H200's tables, as a user might have them."""
    folder = tmp_path_factory.mktemp("tables") / "mine"
    shutil.copytree(bundled()["h200", "sglang"], folder)
    return read_tables(folder)


@pytest.mark.parametrize("name", ["h20", "h", "nvidia", "200", "gh200", "h2000", "h20-3e", "h100", "x"])
def test_a_part_of_a_name_is_no_name(h200, name):
    with pytest.raises(UsageError, match="are of NVIDIA H200, not "):
        link(name, tables=h200)


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", None])
def test_the_same_machine_keeps_its_calibration(h200, name):
    assert link(name, tables=h200).calibration == link().calibration != ()


@pytest.mark.parametrize(
    ("engine", "says"), [("trtllm", "not trtllm"), ("vllm", "not vllm"), ("TensorRT-LLM", "not trtllm")]
)
def test_another_engines_tables_are_refused(h200, engine, says):
    with pytest.raises(
        UsageError, match=f"are of kernels as SGLang calls them, {says}: give --engine sglang"
    ):
        link("h200", engine, tables=h200)


def test_tables_say_whose_they_are(tmp_path):
    found = link(
        tables=read_tables(written(tmp_path, device="NVIDIA B200", framework="TRTLLM", moe=["moe_x"]))
    )
    assert (found.hardware, found.engine) == ("b200", "trtllm")
    assert not found.calibration and any("no serving of b200 with trtllm" in note for note in found.notes)


def test_spellings():
    assert {hardware_name(t) for t in ("NVIDIA-H200", "nvidia h200 SXM", "h200")} == {"h200"}
    assert hardware_name("AMD-Instinct-MI300X-OAM") == "mi300x" and hardware_name("AMD EPYC") == "epyc"
    assert {engine_name(t) for t in ("TensorRT-LLM", "tensorrt_llm", "trtllm", "TRT-LLM")} == {"trtllm"}
    assert words("sglang_flashinfer_trtllm_moe") == words("flashinfer.trtllm@sglang") == {"trtllm"}
    assert words("flash_attention") == words("flash_attn.fa3@sglang") and not words("default")


def b200(tmp_path, *moe, **how):
    return link(tables=read_tables(written(tmp_path, device="NVIDIA B200", moe=moe)), **how)


def test_times_of_another_kernel_are_refused_or_wide(tmp_path):
    with pytest.raises(
        UsageError,
        match=f"fused_moe is timed as {TRITON}, the engine runs flashinfer.trtllm_routed@sglang or "
        "flashinfer.trtllm@sglang: .* off by 54%; "
        "give .* or --any-kernel",
    ):
        b200(tmp_path / "refused", TRITON)
    right = outlook(b200(tmp_path / "right", TRTLLM), LOAD).tpot
    other = b200(tmp_path / "wide", TRITON, any_kernel=True)
    wide = outlook(other, LOAD).tpot
    assert wide.value == pytest.approx(right.value)  # the same times
    assert wide.high / wide.low > 1.4 * right.high / right.low
    assert wide.low < right.value / 1.3 and right.value * 1.5 < wide.high
    assert any(TRITON in note for note in other.notes)


def test_of_several_kernels_the_engines_own_is_read(tmp_path):
    alone = outlook(b200(tmp_path / "alone", TRTLLM), LOAD).tpot
    first = outlook(b200(tmp_path / "first", TRTLLM, TRITON), LOAD).tpot
    assert first == alone
    second = outlook(b200(tmp_path / "second", TRITON, TRTLLM), LOAD).tpot
    assert second.value > alone.value  # it is the slower one there


def test_one_row_without_a_telling_name_does_not_vouch_for_the_others(tmp_path):
    with pytest.raises(UsageError, match="fused_moe is timed as"):
        b200(tmp_path, TRITON, "default")


def test_what_is_left_out_and_what_cannot_be_told_is_said(tmp_path):
    mixed = b200(tmp_path / "mixed", TRTLLM, TRITON)
    assert any(f"are of {TRITON}, which sglang does not run: left out" in note for note in mixed.notes)
    tables = read_tables(written(tmp_path / "trt", device="NVIDIA B200", framework="TRTLLM", moe=["moe_x"]))
    assert any(
        "which kernel trtllm runs of fused_moe is not known" in note for note in link(tables=tables).notes
    )
