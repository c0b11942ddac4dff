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
    assumed = link("mi300x", assumed=True)
    assert any("assumed: times of block_scale_gemm, absorbed_bmm, " in note for note in assumed.notes)
    assert {term.origin for term in assumed.structure.decode} == {"assumed"}
    measured, slow = (
        link("mi300x", assumed=True, measured_times=MeasuredTimes(
            "AMD Instinct MI300X", "runs", {("mla_decode", (16, "bf16")): attention(us)}))
        for us in (40.0, 80.0)
    )  # fmt: skip
    origins = {term.op: term.origin for term in measured.structure.decode}
    assert origins["mla_decode"] == "measured" and origins["absorbed_bmm"] == "assumed"
    assert outlook(slow, LOAD).tpot.value > outlook(measured, LOAD).tpot.value


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
    assert {t.name for t in filled.structure.decode} == {t.name for t in link().structure.decode}
    assumed = {term.op for term in filled.structure.decode if term.source == SOURCE}
    assert assumed and "fused_moe" not in assumed and "mla_decode" not in assumed


# Whose times they are: of which machine, which engine, which kernel. What is another's is refused


TRITON, TRTLLM = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The H200's tables, as a user might have them."""
    folder = tmp_path_factory.mktemp("tables") / "mine"
    shutil.copytree(bundled()["h200", "sglang"], folder)
    return read_tables(folder)


@pytest.mark.parametrize(("hardware", "engine", "says"), [
    *[(part, None, "are of NVIDIA H200, not ") for part in ("h20", "200", "gh200", "h20-3e", "h100")],
    *[("h200", engine, f"are of kernels as SGLang calls them, {says}: give --engine sglang")
      for engine, says in (("vllm", "not vllm"), ("TensorRT-LLM", "not trtllm"))],
])  # fmt: skip
def test_tables_of_another_machine_or_engine_are_refused(mine, hardware, engine, says):
    with pytest.raises(UsageError, match=says):
        link(hardware, engine, tables=mine)


@pytest.mark.parametrize("name", ["NVIDIA H200", None])
def test_the_same_machine_keeps_its_calibration(mine, name):
    assert link(name, tables=mine).calibration == link().calibration != ()


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
    alone, first, second = (
        outlook(b200(tmp_path / "-".join(moe), *moe), LOAD).tpot
        for moe in ((TRTLLM,), (TRTLLM, TRITON), (TRITON, TRTLLM))
    )
    assert first == alone and second.value > alone.value  # the second is the slower one there
    mixed = b200(tmp_path / "-".join((TRTLLM, TRITON)), TRTLLM, TRITON)
    assert any(f"are of {TRITON}, which sglang does not run: left out" in note for note in mixed.notes)


def test_tables_say_whose_they_are_and_what_they_cannot_tell(tmp_path):
    """One row without a telling name does not vouch for the others."""
    with pytest.raises(UsageError, match="fused_moe is timed as"):
        b200(tmp_path / "untold", TRITON, "default")
    tables = read_tables(written(tmp_path / "trt", device="NVIDIA B200", framework="TRTLLM", moe=["moe_x"]))
    found = link(tables=tables)
    assert (found.hardware, found.engine) == ("b200", "trtllm") and not found.calibration
    for said in ("no serving of b200 with trtllm", "which kernel trtllm runs of fused_moe is not known"):
        assert any(said in note for note in found.notes)
