"""Times from data sheets: against AITER's own, and against serving that nobody fitted anything to."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import UsageError
from harness.paths import PUBLISHED
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from harness.serving.link.predictions import outlook
from harness.serving.link.times.assumed_times import DEVIATION, SOURCE, AssumedTables
from harness.serving.link.times.interpolation import Surface, TimeEstimate
from harness.serving.link.times.kernel_identity import words
from harness.serving.link.times.measured_times import MeasuredTimes
from harness.serving.link.times.tables import Tables, bundled, read_tables
from harness.serving.link.validation import validated
from harness.serving.names import engine_name, hardware_name
from tests.support.serving_link_tables import written

BASE = read_tables(bundled()["h200", "sglang"])
LOAD = ClosedLoop(1024, 1024, 16)


def test_aiters_own_times_lie_where_they_should():
    inside = []
    for figure in json.loads((PUBLISHED / "aiter-tuned.json").read_text())["figures"]:
        # Tuned kernels of AITER's, not those that SGLang 0.5.9 runs.
        tables, sizes = AssumedTables.of(figure["device"].lower(), "vllm", BASE), figure["sizes"]
        if figure["op"] == "block_scale_gemm":
            assumed = tables.gemm("fp8_block", sizes["m"], sizes["n"], sizes["k"]).us
        elif figure["op"] == "fused_moe" and sizes["experts"] == 256:
            assumed = tables.moe(sizes["tokens"], 2048 // sizes["inter"], 1, "balanced").us
        else:
            continue
        inside.append(abs(math.log(figure["time_us"] / assumed)) <= 1.645 * DEVIATION)
    assert len(inside) == 31 and sum(inside) >= 0.85 * len(inside)


def test_what_bounds_a_kernel_scales_it():
    """H200: 989.5 and 1979 TFLOPS, 4.8 TB/s; MI355X: 2516.6 and 5033.2, 8.0."""
    tables = AssumedTables.of("mi355x", "sglang", BASE)

    def factor(of_tables: Callable[[Tables], TimeEstimate]) -> float:
        return of_tables(tables).us / of_tables(BASE).us

    # 3 us of launching; the cache is 302 MB, 8 experts of 256 are 44 MB.
    computes = factor(lambda t: t.gemm("bfloat16", 65536, 7168, 2048))
    assert computes == pytest.approx(989.5 / 2516.6, rel=0.01)
    moves = factor(lambda t: t.mla_decode(64, 4096, 16, "bfloat16"))
    assert moves == pytest.approx((3 + 302 / 8.0) / (3 + 302 / 4.8), rel=0.01)
    few = factor(lambda t: t.moe(1, 8, 1, "balanced"))
    assert few == pytest.approx((3 + 44 / 8.0) / (3 + 44 / 4.8), rel=0.01)


@pytest.mark.parametrize("hardware, points", [("MI355X", 13), ("B200", 11)])
def test_public_points_lie_in_their_intervals(hardware, points):
    """InferenceX with SGLang 0.5.9. MI325X's points set two constants of AMD's, the others none."""
    validations = [
        summary
        for summary, _ in validated(link(hardware, "sglang", assumed=True, kv="fp8"))
        if summary.series.startswith("inferencex")
    ]
    assert len(validations) == 3 and sum(summary.points for summary in validations) == points
    assert sum(summary.tpot.covered for summary in validations) == points
    assert all(summary.tpot.mean <= 0.15 for summary in validations)


def test_what_is_assumed_is_said_and_gives_way_to_what_is_measured():
    with pytest.raises(UsageError, match="--assumed"):
        link("mi300x")
    assumed = link("mi300x", assumed=True)
    assert any("assumed: times of block_scale_gemm, absorbed_bmm, " in note for note in assumed.notes)
    assert {term.origin for term in assumed.structure.decode} == {"assumed"}

    own = MeasuredTimes("AMD Instinct MI300X", "runs", {("mla_decode", (16, "bf16")): attention(40.0)})
    measured = link("mi300x", assumed=True, measured_times=own)
    origins = {term.op: term.origin for term in measured.structure.decode}
    assert origins["mla_decode"] == "measured" and origins["absorbed_bmm"] == "assumed"
    slower = MeasuredTimes("AMD Instinct MI300X", "runs", {("mla_decode", (16, "bf16")): attention(80.0)})
    faster, slow = (
        outlook(m, LOAD).tpot.value for m in (measured, link("mi300x", assumed=True, measured_times=slower))
    )
    assert slow > faster


def attention(us: float) -> Surface:
    return Surface([((1.0, b, c), us) for b in (1.0, 64.0) for c in (512.0, 4096.0)])


@pytest.mark.parametrize(
    "lacks", [["mla_bmm_perf"], ["custom_allreduce_perf", "mla_bmm_perf"], ["gemm_perf"]]
)
def test_what_tables_lack_is_filled_beside_skewed_routing(lacks):
    rows = {name: many for name, many in BASE.rows.items() if name not in lacks}
    part = replace(BASE, where=f"without {lacks}", rows=rows)
    with pytest.raises(UsageError, match="--assumed takes what is missing"):
        link(tables=part)
    filled = link(tables=part, assumed=True)
    assert filled.skewed is not None
    whole = {term.name: term for term in link().structure.decode}
    assert {term.name for term in filled.structure.decode} == whole.keys()
    assumed = {term.op for term in filled.structure.decode if term.source == SOURCE}
    assert assumed and "fused_moe" not in assumed and "mla_decode" not in assumed


def test_a_machine_without_a_data_sheet_is_refused():
    with pytest.raises(UsageError, match="no data sheet of abacus"):
        link("abacus", assumed=True)


def test_an_engine_that_does_not_run_there_is_refused():
    with pytest.raises(UsageError, match="TensorRT-LLM does not run on mi300x"):
        link("MI300X", "TensorRT-LLM", assumed=True)


# Whose times they are: of which machine, which engine, which kernel. What is another's is refused


TRITON, TRTLLM = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The H200's tables, as a user might have them."""
    folder = tmp_path_factory.mktemp("tables") / "mine"
    shutil.copytree(bundled()["h200", "sglang"], folder)
    return read_tables(folder)


@pytest.mark.parametrize("name", ["h20", "h", "nvidia", "200", "gh200", "h2000", "h20-3e", "h100", "x"])
def test_a_part_of_a_name_is_no_name(mine, name):
    with pytest.raises(UsageError, match="are of NVIDIA H200, not "):
        link(name, tables=mine)


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", None])
def test_the_same_machine_keeps_its_calibration(mine, name):
    assert link(name, tables=mine).calibration == link().calibration != ()


@pytest.mark.parametrize(
    ("engine", "says"), [("trtllm", "not trtllm"), ("vllm", "not vllm"), ("TensorRT-LLM", "not trtllm")]
)
def test_another_engines_tables_are_refused(mine, engine, says):
    with pytest.raises(
        UsageError, match=f"are of kernels as SGLang calls them, {says}: give --engine sglang"
    ):
        link("h200", engine, tables=mine)


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
