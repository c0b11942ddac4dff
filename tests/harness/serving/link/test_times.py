"""Times of kernels for the serving link: tables, data sheets, whose they are; numbers by hand."""

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness.serving.link.experts import experts_hit, routed, shared_expert_factor
from pyarrow import parquet
from pyarrow.csv import read_csv

from harness.errors import UsageError
from harness.paths import PUBLISHED
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from harness.serving.link.predictions import outlook
from harness.serving.link.structure import (
    ATTENTION_GLUE,
    GLUE_BYTES,
    GLUE_CALLS,
    GLUE_GBPS,
    GLUE_US,
    StepLoad,
    glue_us,
    plain_prefill,
    structure,
    without,
)
from harness.serving.link.times.assumed_times import DEVIATION, SOURCE, AssumedTables
from harness.serving.link.times.interpolation import Curve, Surface, TimeEstimate, between
from harness.serving.link.times.kernel_identity import of_engine, words
from harness.serving.link.times.measured_times import MeasuredTimes
from harness.serving.link.times.tables import FILES, TABLES, MissingTable, Tables, read_tables
from harness.serving.link.validation import validated
from harness.serving.names import engine_name, hardware_name
from shapes.attention import Parallel
from shapes.models import model
from tests.support.serving_link_tables import US, written

R1 = model("deepseek-r1")
FOLDER = TABLES / "h200-sglang-0.5.9"
H200 = read_tables(FOLDER)
TP8 = Parallel(tp=8)
LOAD = StepLoad(tokens=8, batch=8, context=1024)


def test_a_curve_is_linear_in_logarithms_and_less_sure_beyond_its_points():
    curve = Curve([(64, 40.0), (16, 10.0)])
    found = {x: (curve.at(x).us, curve.at(x).distance) for x in (1, 16, 32, 256)}
    assert [us for us, _ in found.values()] == pytest.approx([10.0, 10.0, 20.0, 160.0])
    assert found[16][1] == 0.0 and found[32][1] == pytest.approx(0.25 * math.log(4))
    assert found[1][1] > 0.3 and found[256][1] > 0.3
    falls = Curve([(1, 10.0), (2, 20.0), (4, 10.0), (8, 40.0)])  # which is noise
    assert falls.at(2).us == falls.at(4).us == pytest.approx(math.sqrt(200))
    assert falls.at(2).noise == pytest.approx(math.log(2) / 4 / 0.8) and curve.noise == 0.0
    steep = Curve([(1, 1.0), (16, 16.0), (20, 40.0)])  # beyond it goes on as over its last factor of 1.6
    assert steep.at(40).us == pytest.approx(40 * 2 ** (math.log(40) / math.log(20)))
    assert between(TimeEstimate(1.0, 0.2), TimeEstimate(1.0, 0.4), 0.25).noise == pytest.approx(0.25)
    surface = Surface([((n, m), float(n * m)) for n in (8, 2) for m in (16, 1)])
    assert [surface.at(n, 4).us for n in (1, 2, 4, 16)] == pytest.approx([8.0, 8.0, 16.0, 64.0])


def changed(path: Path, **columns) -> None:
    """The table with other values in these columns; a value may be a function of the row."""
    rows = list(csv.DictReader(path.open()))
    for row in rows:
        row |= {name: str(value(row)) if callable(value) else value for name, value in columns.items()}
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)


def terms(phase):
    return {term.name: term for term in phase}


def test_a_decode_step_by_hand(tmp_path):
    """61 attentions, 58 MoE and 3 dense layers, 122 all-reduces; every kernel of a kind takes the same."""
    found = structure(read_tables(written(tmp_path)), TP8)
    total = sum(term.calls * term.time(LOAD).us for term in found.decode)
    gemms = 61 * 3 + 3 * 2  # qkv_a, q_b, o_proj; gate_up and down of the dense layers
    glue = GLUE_CALLS * GLUE_US + 8 * GLUE_BYTES / GLUE_GBPS / 1e3
    by_hand = (
        gemms * US["fp8_block"]
        + (58 + 1) * US["bfloat16"]
        + 58 * US["moe"] * shared_expert_factor(R1, 8)
        + 61 * US["decode"]
        + 2 * 61 * US["bmm"]
        + 122 * US["reduce"]
        + 61 * glue
    )
    assert total == pytest.approx(by_hand)


def test_what_a_rank_holds_and_calls(tmp_path):
    found = structure(H200, TP8)
    assert found.weights_gb == pytest.approx(85.1, rel=0.01) and found.kv_bytes == 61 * 576 * 2
    prefill = terms(found.prefill)
    calls = {name.removeprefix("block_scale_gemm:"): term.calls for name, term in prefill.items()}
    assert calls == {
        "qkv_a": 61, "q_b": 61, "kv_b": 61, "o_proj": 61, "dense_gate_up": 3, "dense_down": 3,
        "bf16_gemm:router": 58, "bf16_gemm:lm_head": 1, "fused_moe": 58, "all_reduce": 122,
        "elementwise:glue": 61, "mha_prefill": 61,
    }  # fmt: skip
    lm_head = prefill["bf16_gemm:lm_head"]  # it sees one token of each sequence
    assert lm_head.time(StepLoad(8192, 1, 8192)).us == lm_head.time(StepLoad(16, 1, 16)).us


def test_tokens_hit_experts_and_balanced_ones_are_read_where_they_hit_as_many():
    assert experts_hit(R1, 1) == pytest.approx(8)
    assert experts_hit(R1, 32) == pytest.approx(256 * (1 - (31 / 32) ** 32))
    hit = experts_hit(R1, 16)
    assert routed(H200, R1, 16, 8, 1).us == pytest.approx(H200.moe(hit / 8, 8, 1, "balanced").us)
    # Tokens by tokens the balanced ones read more experts, and from far on none.
    assert routed(H200, R1, 32, 8, 1).us < 0.8 * H200.moe(32, 8, 1, "balanced").us
    assert routed(H200, R1, 4096, 8, 1).us == pytest.approx(H200.moe(4096, 8, 1, "balanced").us, rel=1e-3)
    # The shared expert is one tile at few tokens and a ninth of the work at many.
    factors = [shared_expert_factor(R1, tokens) for tokens in (1, 64, 64 * 1024)]
    assert factors == pytest.approx([9 / 8, 1 + 1 / experts_hit(R1, 64), 9 / 8])


def test_prefill_attention_is_scaled_from_absorbed_to_plain_where_it_was_timed_absorbed(tmp_path):
    timed, least = (H200.mla_prefill(1, n, 16, "bfloat16").us for n in (8192, 1))
    plain = plain_prefill(H200, R1, StepLoad(8192, 1, 8192), 16).us
    assert plain == pytest.approx(least + (timed - least) * 320 / 1088)
    assert read_tables(written(tmp_path / "untold")).prefill_is_absorbed
    other = read_tables(written(tmp_path, framework="TRTLLM"))
    assert plain_prefill(other, R1, StepLoad(8192, 1, 8192), 16).us == pytest.approx(US["prefill"])


@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_tables_in_another_unit_are_refused(tmp_path, scale):
    folder = shutil.copytree(FOLDER, tmp_path / "tables")
    changed(folder / "gemm_perf.csv", latency=lambda row: float(row["latency"]) * scale)
    with pytest.raises(UsageError, match="TFLOPS; latency is to be in milliseconds"):
        read_tables(folder)


@pytest.mark.parametrize("dropped, named", [
    ("moe_perf", "fused_moe"), ("custom_allreduce_perf", "all_reduce"), ("mla_bmm_perf", "absorbed_bmm in"),
    ("generation_mla_perf", "mla_decode"), ("context_mla_perf", "mha_prefill"),
    ("gemm_perf", "block_scale_gemm, bf16_gemm in"),
])  # fmt: skip
def test_what_is_missing_is_named(tmp_path, dropped, named):
    folder = written(tmp_path / dropped)
    (folder / f"{dropped}.csv").unlink()
    with pytest.raises(MissingTable, match=named):
        structure(read_tables(folder), TP8)


@pytest.mark.parametrize("text", ["", "nan", "-1", "fast", "1e9"])
def test_a_latency_that_is_none_is_named_with_its_line(tmp_path, text):
    path = written(tmp_path) / "moe_perf.csv"
    lines = path.read_text().splitlines()
    assert lines[0].endswith("latency")
    lines[2] = lines[2].rpartition(",")[0] + f",{text}"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"moe_perf.csv, line 3"):
        read_tables(tmp_path)


def test_of_several_times_of_one_size_the_median_is_taken(tmp_path):
    path = written(tmp_path) / "gemm_perf.csv"
    header, *rows = path.read_text().splitlines()
    slower = [f"{row.rpartition(',')[0]},{ms}" for row in rows for ms in (0.9, 0.8)]
    path.write_text("\n".join([header, *rows, *slower]))
    assert read_tables(tmp_path).gemm("fp8_block", 1, 128, 128).us == pytest.approx(800.0)


# AIConfigurator's sets of tables: its layouts, what their times hold, and what no machine takes


OPS = {"gemm_perf": "gemm", "moe_perf": "moe", "mla_bmm_perf": "mla_bmm", "custom_allreduce_perf": "comm"}
MODULES = US | {"decode module": 90.0, "prefill module": 900.0}


def by_op(system: Path, engine: str, version: str, **how) -> Path:
    """A set in the layout since July 2026, and how it is named."""
    for file in sorted(written(system / "flat", version=version, **how).iterdir()):
        home = system / OPS.get(file.stem, "mla") / engine / version
        home.mkdir(parents=True, exist_ok=True)
        shutil.move(file, home)
    (system / "flat").rmdir()
    return system / engine / version


def decode_us(tables) -> dict[str, float]:
    return {term.name: term.time(LOAD).us for term in structure(tables, TP8).decode}


def test_both_layouts_are_one_set(tmp_path):
    flat = read_tables(written(tmp_path / "old" / "sglang" / "9"))
    since = read_tables(by_op(tmp_path / "new", "sglang", "9"))
    assert since.rows == flat.rows and since.version == "9" and not since.notes
    assert decode_us(since) == decode_us(flat)
    with pytest.raises(UsageError, match="no such folder"):
        read_tables(tmp_path / "new" / "sglang" / "8")
    with pytest.raises(UsageError, match=r"sets of tables: give .* with one of sglang/9"):
        read_tables(tmp_path / "new")


def test_times_of_another_version_are_taken_where_the_set_says_so(tmp_path):
    by_op(tmp_path, "sglang", "9")
    where = by_op(tmp_path, "sglang", "10", us=US | {"moe": 999.0})
    shutil.rmtree(tmp_path / "moe" / "sglang" / "10")
    with pytest.raises(MissingTable, match="fused_moe"):
        structure(read_tables(where), TP8)
    read_tables.cache_clear()
    (tmp_path / "moe" / "sglang" / "10").mkdir()
    reuse = tmp_path / "moe" / "sglang" / "10" / "reuse.yaml"
    reuse.write_text("schema_version: 1\nreuse:\n- table: moe_perf\n  from_version: '9'\n")
    tables = read_tables(where)
    assert tables.version == "10" and any("moe_perf" in n and "SGLang 9" in n for n in tables.notes)
    assert tables.moe(8, 8, 1, "balanced").us == pytest.approx(US["moe"])


def test_a_module_is_what_it_holds_and_attention(tmp_path):
    times = decode_us(read_tables(written(tmp_path, us=MODULES, framework="VLLM")))
    held = 3 * US["fp8_block"] + 2 * US["bmm"] + glue_us(LOAD.tokens, *ATTENTION_GLUE)
    assert times["mla_decode"] == pytest.approx(90 - held)
    prompt = StepLoad(tokens=512, batch=1, context=1024)  # a chunk of it
    prefill = {t.name: t.time(prompt).us for t in structure(read_tables(tmp_path), TP8).prefill}
    held = 4 * US["fp8_block"] + glue_us(1024, *ATTENTION_GLUE)
    assert prefill["mha_prefill"] == pytest.approx(900 - held)
    assert without(TimeEstimate(10.0, 0.1, 0.2), 20.0) == TimeEstimate(1.0, 1.0, 2.0)
    own = MeasuredTimes("NVIDIA X1", "runs", {("mla_decode", (16, "bf16")): attention(40.0)})
    for measured, said in ((None, 1), (own, 0)):
        notes = link(tables=read_tables(tmp_path), measured_times=measured).notes
        assert sum("their own times are taken off" in note for note in notes) == said


@pytest.mark.parametrize("us, attention", [
    (MODULES, 90.0 - 3 * US["fp8_block"] - glue_us(LOAD.tokens, *ATTENTION_GLUE)), (US, US["decode"])
])  # fmt: skip
def test_products_without_a_time_of_their_own_stay_in_attention(tmp_path, us, attention):
    """vLLM's layer was timed with them, and a module has them."""
    without = {name: value for name, value in us.items() if name != "bmm"}
    times = decode_us(read_tables(written(tmp_path, us=without, framework="VLLM")))
    assert times["mla_decode"] == pytest.approx(attention)
    assert not any(name.startswith("absorbed_bmm") for name in times)


def test_the_shared_expert_is_sglangs_to_fuse(tmp_path):
    sglang, *others = (
        set(decode_us(read_tables(written(tmp_path / engine, framework=engine))))
        for engine in ("SGLang", "TRTLLM", "VLLM")
    )
    shared = {"block_scale_gemm:shared_gate_up", "block_scale_gemm:shared_down"}
    assert [engine - sglang for engine in others] == [shared, shared]


def test_times_of_the_host_are_not_those_of_a_kernel(tmp_path):
    folder = written(tmp_path, us=US | {"fp8_block": 300.0}, device="NVIDIA H200")
    changed(folder / "gemm_perf.csv", m=lambda row: "64" if row["m"] == "1" else row["m"])
    fast = ("fp8_block", "65536")  # 1.25 times bf16's
    latency = {"latency": lambda row: "0.01" if (row["gemm_dtype"], row["n"]) == fast else row["latency"]}
    changed(folder / "gemm_perf.csv", **latency)
    tables = read_tables(folder)
    assert tables.gemm("fp8_block", 64, 128, 128).us == pytest.approx(US["bfloat16"])
    assert tables.gemm("fp8_block", 64, 65536, 128).us == pytest.approx(10.0)
    assert any("take 38 times bf16's" in note for note in tables.notes)


def test_more_gpus_behind_one_switch(tmp_path):
    tables = read_tables(written(tmp_path / "gb", device="NVIDIA GB200", gpus=4))
    four, eight = tables.all_reduce(7168, 4), tables.all_reduce(7168, 8)
    assert eight.us == pytest.approx(four.us * 2**0.25) and eight.distance > four.distance
    timed = {"custom_allreduce_perf": [{"num_gpus": gpus} for gpus in (2, 4)]}
    assert replace(tables, rows=timed).timed_gpus(8) == 4
    with pytest.raises(MissingTable, match="all_reduce"):
        structure(read_tables(written(tmp_path / "b", device="NVIDIA B200", gpus=4)), TP8)


TRITON, TRTLLM = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"
WITHOUT_BMM = {name: us for name, us in US.items() if name != "bmm"}
OTHERS = {"device": "NVIDIA B200", "framework": "TRTLLM", "moe": ["moe_x"]}


@pytest.mark.parametrize(("how", "said"), [
    ({"device": "NVIDIA H100 80GB HBM3"}, "this does not fit: weights take 85.4 GB of each h100's 85.9"),
    ({"device": "NVIDIA GB200", "gpus": 4}, "over 8 GPUs was timed"),
    ({"framework": "VLLM", "us": WITHOUT_BMM}, "w_uk and w_uv have none"),
    ({"device": "NVIDIA B200", "moe": [TRTLLM, TRITON]},
     f"are of {TRITON}, which sglang does not run: left out"),
    (OTHERS, "no serving of b200 with trtllm"),
    (OTHERS, "which kernel trtllm runs of fused_moe is not known"),
])  # fmt: skip
def test_what_tables_lack_or_cannot_tell_is_said(tmp_path, how, said):
    found = link(tables=read_tables(written(tmp_path, **how)))
    assert any(said in note for note in found.notes) and not found.calibration
    if "not fit" in said:
        assert found.steps(ClosedLoop(64, 64, 1024)).capacity == math.inf


def test_a_neighbours_all_reduce_and_chip(tmp_path):
    """TensorRT-LLM's all-reduce stands in sets of SGLang, GB300's products in sets of B300."""
    folder = written(tmp_path / "a", device="NVIDIA B300 SXM6 AC")
    changed(folder / "custom_allreduce_perf.csv", framework="TRTLLM", version="1.2")
    changed(folder / "gemm_perf.csv", device="NVIDIA GB300")
    tables = read_tables(folder)
    assert (tables.device, tables.engine) == ("NVIDIA B300 SXM6 AC", "SGLang")
    assert len(tables.notes) == 2
    other = written(tmp_path / "b", device="NVIDIA B300 SXM6 AC")
    changed(other / "moe_perf.csv", framework="TRTLLM")
    with pytest.raises(UsageError, match="more than one machine or engine"):
        read_tables(other)


def test_parquet_is_as_csv(tmp_path):
    written(tmp_path / "csv")
    (tmp_path / "parquet").mkdir()
    for stem in FILES:
        if (path := tmp_path / "csv" / f"{stem}.csv").exists():
            text = path.read_text()
            path.write_text(text + text.replace("fp8_block", "int8").partition("\n")[2])
            parquet.write_table(read_csv(path), tmp_path / "parquet" / f"{stem}.parquet")
    assert read_tables(tmp_path / "parquet").rows == read_tables(tmp_path / "csv").rows


@pytest.mark.parametrize(("name", "data", "says"), [
    ("gemm_perf.parquet", b"version https://git-lfs.github.com/spec/v1", ".* `git lfs pull`"),
    ("gemm_perf.parquet", b"PAR1\n\nPAR1", "cannot read .*gemm_perf.parquet: .*"),
    ("gemm_perf.csv", "é".encode("latin-1"), "cannot read .*gemm_perf.csv: 'utf-8'"),
    ("gemm_perf.json", b"", "no tables in .*; wanted: one or more of gemm_perf, .* as .csv or .parquet"),
])  # fmt: skip
def test_a_table_that_cannot_be_read_is_one_line(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"^{says}.*$"):
        read_tables(tmp_path)


def test_parquet_needs_its_library(tmp_path, monkeypatch):
    (tmp_path / "gemm_perf.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="needs pyarrow"):
        read_tables(tmp_path)


@pytest.mark.parametrize("since", [False, True])
def test_an_all_reduce_of_another_version_stands_in_and_the_latest_one_does(tmp_path, since):
    for version, us in (("9", 8.0), ("10", 7.0), ("11", 6.0)):
        if since:
            where = by_op(tmp_path, "vllm", version, framework="VLLM", us=US | {"reduce": us})
        else:
            where = written(tmp_path / "vllm" / version, US | {"reduce": us}, "NVIDIA X1", "VLLM", version)
    path = (tmp_path / "comm" / "vllm" / "11" if since else where) / "custom_allreduce_perf.csv"
    path.rename(path.with_suffix(".json"))
    assert read_tables(where).all_reduce(7168, 8).us == pytest.approx(7.0)


# Times from data sheets: by hand, and against serving that nobody fitted anything to


SIXTEEN = ClosedLoop(1024, 1024, 16)


def test_aiters_own_times_lie_where_they_should():
    """In a 90 % interval of their assumed times; AITER's tuned kernels, not SGLang 0.5.9's."""
    inside = []
    for figure in json.loads((PUBLISHED / "aiter-tuned.json").read_text())["figures"]:
        tables, sizes = AssumedTables.of(figure["device"].lower(), "vllm", H200), figure["sizes"]
        if figure["op"] == "block_scale_gemm":
            assumed = tables.gemm("fp8_block", sizes["m"], sizes["n"], sizes["k"]).us
        elif figure["op"] == "fused_moe" and sizes["experts"] == 256:
            assumed = tables.moe(sizes["tokens"], 2048 // sizes["inter"], 1, "balanced").us
        else:
            continue
        inside.append(abs(math.log(figure["time_us"] / assumed)) <= 1.645 * DEVIATION)
    assert len(inside) == 31 and sum(inside) >= 0.85 * len(inside)


def test_all_reduce_takes_elements():
    """Were its sizes bytes, 8 GPUs would reduce at half of what NVLink gives."""
    us = H200.all_reduce(2**29, 8).us
    assert 380 < 2 * 2**29 * 2 * 7 / 8 / us / 1e3 < 480  # GB/s


def test_what_bounds_a_kernel_scales_it():
    """H200: 989.5 and 1979 TFLOPS, 4.8 TB/s; MI355X: 2516.6 and 5033.2, 8.0."""
    tables = AssumedTables.of("mi355x", "sglang", H200)

    def factor(of_tables: Callable[[Tables], TimeEstimate]) -> float:
        return of_tables(tables).us / of_tables(H200).us

    # 3 us of launching; the cache is 302 MB, 8 experts of 256 are 44 MB.
    computes = factor(lambda t: t.gemm("bfloat16", 65536, 7168, 2048))
    assert computes == pytest.approx(989.5 / 2516.6, rel=0.01)
    moves = factor(lambda t: t.mla_decode(64, 4096, 16, "bfloat16"))
    assert moves == pytest.approx((3 + 302 / 8.0) / (3 + 302 / 4.8), rel=0.01)
    half = factor(lambda t: t.mla_decode(64, 4096, 16, "fp8")) * H200.mla_decode(64, 4096, 16, "fp8").us
    plain = H200.mla_decode(64, 4096, 16, "bfloat16").us
    assert half == pytest.approx(plain * (3 + 151 / 8.0) / (3 + 302 / 4.8), rel=0.01)
    for tp, ep in ((8, 1), (1, 8)):
        few = factor(lambda t, tp=tp, ep=ep: t.moe(1, tp, ep, "balanced"))
        assert few == pytest.approx((3 + 44 / 8.0) / (3 + 44 / 4.8), rel=0.01)
    prompt = factor(lambda t: t.mla_prefill(1, 8192, 16, "bfloat16"))
    assert prompt == pytest.approx(989.5 / 2516.6, rel=0.01)


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
    assert outlook(slow, SIXTEEN).tpot.value > outlook(measured, SIXTEEN).tpot.value


def attention(us: float) -> Surface:
    return Surface([((1.0, b, c), us) for b in (1.0, 64.0) for c in (512.0, 4096.0)])


@pytest.mark.parametrize(("lacks", "share"), [
    (["mla_bmm_perf"], 0.0292), (["custom_allreduce_perf", "mla_bmm_perf"], 0.1101), (["gemm_perf"], 0.1277),
])  # fmt: skip
def test_what_tables_lack_is_filled_beside_skewed_routing(lacks, share):
    rows = {name: many for name, many in H200.rows.items() if name not in lacks}
    part = replace(H200, where=f"without {lacks}", rows=rows)
    with pytest.raises(UsageError, match="--assumed takes what is missing"):
        link(tables=part)
    filled = link(tables=part, assumed=True)
    assert filled.skewed is not None
    assert {t.name for t in filled.structure.decode} == {t.name for t in link().structure.decode}
    assumed = {term.op for term in filled.structure.decode if term.source == SOURCE}
    assert assumed and "fused_moe" not in assumed and "mla_decode" not in assumed
    assert filled.structure.assumed_share == pytest.approx(share, abs=5e-4)


# Whose times they are: of which machine, which engine, which kernel. What is another's is refused


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The H200's tables, as a user might have them."""
    return read_tables(shutil.copytree(FOLDER, tmp_path_factory.mktemp("tables") / "mine"))


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


def test_of_several_kernels_rows_of_another_dtype_stay():
    kernels = (("fp8_block", "deep_gemm"), ("fp8_block", "triton"), ("bfloat16", "triton"))
    rows = [{"gemm_dtype": dtype, "kernel_source": source} for dtype, source in kernels]
    found, others = of_engine(replace(H200, rows={"gemm_perf": rows}), "sglang", "h200")
    assert found.rows["gemm_perf"] == [rows[0], rows[2]] and not others
    assert "1 of 2 times of block_scale_gemm are of triton" in found.notes[-1]


def b200(tmp_path, *moe, **how):
    return link(tables=read_tables(written(tmp_path, device="NVIDIA B200", moe=moe)), **how)


def test_times_of_another_kernel_are_refused_or_wide(tmp_path):
    says = (
        f"fused_moe is timed as {TRITON}, the engine runs flashinfer.trtllm_routed@sglang or "
        "flashinfer.trtllm@sglang: .* off by 54%; give .* or --any-kernel"
    )
    with pytest.raises(UsageError, match=says):
        b200(tmp_path / "refused", TRITON)
    right = outlook(b200(tmp_path / "right", TRTLLM), SIXTEEN).tpot
    other = b200(tmp_path / "wide", TRITON, any_kernel=True)
    wide = outlook(other, SIXTEEN).tpot
    assert wide.value == pytest.approx(right.value)  # the same times
    assert wide.high / wide.low > 1.4 * right.high / right.low
    assert wide.low < right.value / 1.3 and right.value * 1.5 < wide.high
    assert any(TRITON in note for note in other.notes)


def test_of_several_kernels_the_engines_own_is_read(tmp_path):
    alone, first, second = (
        outlook(b200(tmp_path / "-".join(moe), *moe), SIXTEEN).tpot
        for moe in ((TRTLLM,), (TRTLLM, TRITON), (TRITON, TRTLLM))
    )
    assert first == alone and second.value > alone.value  # the second is the slower one there
    with pytest.raises(UsageError, match="fused_moe is timed as"):  # one untold row vouches for no other
        b200(tmp_path / "untold", TRITON, "default")
