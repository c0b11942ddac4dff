"""Times of kernels for the serving link: tables, data sheets, whose they are; numbers by hand."""

import csv
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import parquet
from pyarrow.csv import read_csv

from harness.errors import UsageError
from harness.paths import PUBLISHED
from harness.serving.link.kernel_times import (
    DEVIATION,
    FILES,
    TABLES,
    AssumedTables,
    MeasuredTimes,
    MissingTable,
    Surface,
    Tables,
    kernel_words,
    read_tables,
)
from harness.serving.link.load import Load
from harness.serving.link.model import System, link, uncalibrated
from harness.serving.link.structure import (
    GLUE_BYTES,
    GLUE_CALLS,
    GLUE_GBPS,
    GLUE_US,
    StepLoad,
    experts_hit,
    plain_prefill,
    routed_us,
    shared_expert_factor,
    structure,
)
from harness.serving.names import engine_name, hardware_name
from shapes.attention import Parallel
from tests.support.serving_link_tables import US, written

FOLDER = TABLES / "h200-sglang-0.5.9"
H200 = read_tables(FOLDER)
TP8 = Parallel(tp=8)
LOAD = StepLoad(tokens=8, batch=8, context=1024)
TRITON, TRTLLM = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"


def test_a_curve_is_linear_in_logarithms_grows_and_goes_on_beyond_its_points():
    curve = Surface({(64,): 40.0, (16,): 10.0})
    assert [curve.us_at(x) for x in (1, 16, 32, 256)] == pytest.approx([10.0, 10.0, 20.0, 160.0])
    falls = Surface({(1,): 10.0, (2,): 20.0, (4,): 10.0, (8,): 40.0})  # which is noise
    assert falls.us_at(2) == falls.us_at(4) == pytest.approx(math.sqrt(200))
    steep = Surface({(1,): 1.0, (16,): 16.0, (20,): 40.0})  # beyond it goes on as over its last factor of 1.6
    assert steep.us_at(40) == pytest.approx(40 * 2 ** (math.log(40) / math.log(20)))
    assert [Surface({(8,): 5.0}).us_at(x) for x in (4, 8, 16)] == pytest.approx([5.0, 5.0, 10.0])
    surface = Surface({(n, m): float(n * m) for n in (8, 2) for m in (16, 1)})
    assert [surface.us_at(n, 4) for n in (1, 2, 4, 16)] == pytest.approx([8.0, 8.0, 16.0, 64.0])
    assert surface.covers(24, 5) and not surface.covers(25, 5) and not surface.covers(8, 0.3)


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
    total = sum(term.calls * term.time(LOAD) for term in found.decode)
    gemms = 61 * 3 + 3 * 2  # qkv_a, q_b, o_proj; gate_up and down of the dense layers
    glue = GLUE_CALLS * GLUE_US + 8 * GLUE_BYTES / GLUE_GBPS / 1e3
    calls = {"fp8_block": gemms, "bfloat16": 58 + 1, "moe": 58 * shared_expert_factor(8)}
    calls |= {"decode": 61, "bmm": 2 * 61, "reduce": 122}
    assert total == pytest.approx(sum(count * US[kind] for kind, count in calls.items()) + 61 * glue)


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
    assert lm_head.time(StepLoad(8192, 1, 8192)) == lm_head.time(StepLoad(16, 1, 16))


def test_tokens_hit_experts_and_balanced_ones_are_read_where_they_hit_as_many():
    assert experts_hit(1) == pytest.approx(8)
    assert experts_hit(32) == pytest.approx(256 * (1 - (31 / 32) ** 32))
    hit = experts_hit(16)
    assert routed_us(H200, 16, 8, 1) == pytest.approx(H200.moe(hit / 8, 8, 1, "balanced"))
    # Tokens by tokens the balanced ones read more experts, and from far on none.
    assert routed_us(H200, 32, 8, 1) < 0.8 * H200.moe(32, 8, 1, "balanced")
    assert routed_us(H200, 4096, 8, 1) == pytest.approx(H200.moe(4096, 8, 1, "balanced"), rel=1e-3)
    assert routed_us(H200, 4096, 1, 8) == pytest.approx(1.2 * H200.moe(4096, 1, 8, "balanced"), rel=1e-3)
    times = {name: [H200.moe(n, 1, 8, name) for n in (3072, 4096, 6144, 8192, 12288, 16384)]
             for name in ("balanced", "power_law_1.01", "power_law_1.2")}  # fmt: skip
    skewed = [*times.values()][1:]
    ratios = [us / even for each in skewed for us, even in zip(each, times["balanced"], strict=True)]
    assert statistics.median(ratios) == pytest.approx(1.2, rel=0.02)
    # The shared expert is one tile at few tokens and a ninth of the work at many.
    factors = [shared_expert_factor(tokens) for tokens in (1, 64, 64 * 1024)]
    assert factors == pytest.approx([9 / 8, 1 + 1 / experts_hit(64), 9 / 8])


def test_prefill_attention_is_scaled_from_absorbed_to_plain_where_it_was_timed_absorbed(tmp_path):
    timed, least = (H200.mla_prefill(1, n, 16, "bfloat16") for n in (8192, 1))
    plain = plain_prefill(H200, StepLoad(8192, 1, 8192), 16)
    assert plain == pytest.approx(least + (timed - least) * 320 / 1088)
    assert read_tables(written(tmp_path / "untold")).prefill_is_absorbed
    other = read_tables(written(tmp_path, framework="TRTLLM"))
    assert not other.prefill_is_absorbed
    assert plain_prefill(other, StepLoad(8192, 1, 8192), 16) == pytest.approx(US["prefill"])


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


# AIConfigurator's sets of tables: its layouts, what their times hold, and what no machine takes


OPS = {"gemm_perf": "gemm", "moe_perf": "moe", "mla_bmm_perf": "mla_bmm", "custom_allreduce_perf": "comm"}


def by_op(system: Path, engine: str, version: str, **how) -> Path:
    """A set in the layout since July 2026, and how it is named."""
    for file in sorted(written(system / "flat", version=version, **how).iterdir()):
        home = system / OPS.get(file.stem, "mla") / engine / version
        home.mkdir(parents=True, exist_ok=True)
        shutil.move(file, home)
    (system / "flat").rmdir()
    return system / engine / version


def decode_us(tables) -> dict[str, float]:
    return {term.name: term.time(LOAD) for term in structure(tables, TP8).decode}


def test_both_layouts_are_one_set(tmp_path):
    flat = read_tables(written(tmp_path / "old" / "sglang" / "9"))
    since = read_tables(by_op(tmp_path / "new", "sglang", "9"))
    assert since.rows == flat.rows and since.version == "9" and not since.notes
    assert decode_us(since) == decode_us(flat)
    with pytest.raises(UsageError, match=r"no folder .* on disk"):
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
    assert tables.moe(8, 8, 1, "balanced") == pytest.approx(US["moe"])


def test_the_shared_expert_is_sglangs_to_fuse(tmp_path):
    sets = [written(tmp_path / engine, framework=engine) for engine in ("SGLang", "TRTLLM")]
    sglang, other = ({*decode_us(read_tables(each))} for each in sets)
    assert other - sglang == {"block_scale_gemm:shared_gate_up", "block_scale_gemm:shared_down"}


@pytest.mark.parametrize(("how", "left_out", "said"), [
    ({"us": US | {"fp8_block": 300.0}}, "block_scale_gemm", "FP8 products of 64 tokens take 63 times what"),
    ({"us": US | {"moe": 3000.0}}, "fused_moe", "experts of 64 tokens take 10 times what"),
    ({"framework": "VLLM"}, "mla_decode", "hold products beside attention: left out"),
    ({"device": "NVIDIA B200", "moe": [TRITON]}, "fused_moe", f"8 of 8 times of fused_moe are of {TRITON}"),
])  # fmt: skip
def test_times_of_something_else_are_left_out_and_assumed(tmp_path, how, left_out, said):
    folder = written(tmp_path, **{"device": "NVIDIA H200"} | how)
    changed(folder / "gemm_perf.csv", m=lambda row: "64" if row["m"] == "1" else row["m"])
    found = link(System(times=(str(folder),)))
    assert left_out in found.structure.assumed
    assert any(said in note for note in found.notes)
    origins = {term.op: term.origin for term in found.structure.decode}
    assert origins[left_out] == "assumed"


def test_a_slow_kernel_of_an_fp8_cache_is_said():
    notes = [link(System(kv=kv)).notes for kv in ("fp8", "bfloat16")]
    slow = "mla_decode takes 5.8 times as long with an FP8 cache as with one in bf16"
    assert [any(slow in note for note in each) for each in notes] == [True, False]


@pytest.mark.parametrize(("how", "said"), [
    ({"device": "NVIDIA H100 80GB HBM3"}, "weights take 85.4 GB, more than the 82% of each h100's 85.9 GB"),
    ({"device": "NVIDIA B200", "moe": [TRTLLM, TRITON]}, f"are of {TRITON}, the engine runs flashinfer"),
    ({"device": "NVIDIA B200", "framework": "TRTLLM", "moe": ["moe_x"]}, "which kernel trtllm runs of"),
    ({"device": "NVIDIA B200", "framework": "TGI"}, "which kernel tgi runs of fused_moe is not known"),
    ({"device": "NVIDIA B200", "moe": [TRTLLM]}, "not calibrated: the constants are those of other servers"),
])  # fmt: skip
def test_what_tables_lack_or_cannot_tell_is_said(tmp_path, how, said):
    found = link(System(times=(str(written(tmp_path, **how)),)))
    assert any(said in note for note in found.notes) and not found.structure.assumed
    assert (found.sums(Load(64, 64, 1024)).capacity == math.inf) == ("more than" in said)


def test_float16_stands_for_bfloat16_and_prompts_behind_a_cached_prefix_are_left_out(tmp_path):
    folder = written(tmp_path / "float16")
    changed(folder / "gemm_perf.csv", gemm_dtype=lambda row: row["gemm_dtype"].replace("bfloat16", "float16"))
    assert decode_us(read_tables(folder)) == decode_us(read_tables(written(tmp_path / "plain")))
    folder = written(tmp_path / "prefix")
    changed(folder / "context_mla_perf.csv", step="4096")
    with pytest.raises(MissingTable, match="mha_prefill"):
        structure(read_tables(folder), TP8)


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


def test_a_file_of_several_versions_has_the_same_label_each_time(tmp_path):
    """Whatever the order is in which a set of labels is iterated."""
    path, versions = written(tmp_path) / "gemm_perf.csv", itertools.cycle("32145")
    for other in set(tmp_path.iterdir()) - {path}:
        other.unlink()
    changed(path, version=lambda row: next(versions))
    assert read_tables(tmp_path).version == "1"


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
    ("gemm_perf.json", b"", "no tables in .*; wanted: one or more of gemm_perf, .* or .parquet, or a run"),
])  # fmt: skip
def test_a_table_that_cannot_be_read_is_one_line(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"^{says}.*$"):
        read_tables(tmp_path)


# Times from data sheets: by hand, and against serving that nobody fitted anything to


def test_aiters_own_times_lie_where_they_should():
    """In a 90 % interval of their assumed times; AITER's tuned kernels, not SGLang 0.5.9's."""
    inside = []
    for figure in json.loads((PUBLISHED / "aiter-tuned.json").read_text())["figures"]:
        tables, sizes = AssumedTables.scaled_to(figure["device"].lower(), "vllm"), figure["sizes"]
        if figure["op"] == "block_scale_gemm":
            assumed = tables.gemm("fp8_block", sizes["m"], sizes["n"], sizes["k"])
        elif figure["op"] == "fused_moe" and sizes["experts"] == 256:
            assumed = tables.moe(sizes["tokens"], 2048 // sizes["inter"], 1, "balanced")
        else:
            continue
        inside.append(abs(math.log(figure["time_us"] / assumed)) <= 1.645 * DEVIATION)
    assert len(inside) == 31 and sum(inside) >= 0.85 * len(inside)


def test_what_bounds_a_kernel_scales_it():
    """H200: 989.5 and 1979 TFLOPS, 4.8 TB/s; MI355X: 2516.6 and 5033.2, 8.0."""
    tables = AssumedTables.scaled_to("mi355x", "sglang")

    def factor(of_tables: Callable[[Tables], float]) -> float:
        return of_tables(tables) / of_tables(H200)

    # 3 us of launching; the cache is 302 MB, 8 experts of 256 are 44 MB.
    computes = factor(lambda t: t.gemm("bfloat16", 65536, 7168, 2048))
    assert computes == pytest.approx(989.5 / 2516.6, rel=0.01)
    moves = factor(lambda t: t.mla_decode(64, 4096, 16, "bfloat16"))
    assert moves == pytest.approx((3 + 302 / 8.0) / (3 + 302 / 4.8), rel=0.01)
    half = factor(lambda t: t.mla_decode(64, 4096, 16, "fp8")) * H200.mla_decode(64, 4096, 16, "fp8")
    plain = H200.mla_decode(64, 4096, 16, "bfloat16")
    assert half == pytest.approx(plain * (3 + 151 / 8.0) / (3 + 302 / 4.8), rel=0.01)
    for tp, ep in ((8, 1), (1, 8)):
        few = factor(lambda t, tp=tp, ep=ep: t.moe(1, tp, ep, "balanced"))
        assert few == pytest.approx((3 + 44 / 8.0) / (3 + 44 / 4.8), rel=0.01)
    prompt = factor(lambda t: t.mla_prefill(1, 8192, 16, "bfloat16"))
    assert prompt == pytest.approx(989.5 / 2516.6, rel=0.01)


def test_what_is_assumed_is_said_and_gives_way_to_what_is_measured():
    assumed = uncalibrated(System(hardware="mi300x"))
    assert any("times of block_scale_gemm, absorbed_bmm, " in note for note in assumed.notes)
    assert {term.origin for term in assumed.structure.decode} == {"assumed"}
    measured, slow = (
        uncalibrated(System(hardware="mi300x"), own=MeasuredTimes(
            "AMD Instinct MI300X", "runs", {("mla_decode", (16, "bf16", 1)): attention(us)}))
        for us in (40.0, 80.0)
    )  # fmt: skip
    origins = {term.op: term.origin for term in measured.structure.decode}
    assert origins["mla_decode"] == "measured" and origins["absorbed_bmm"] == "assumed"
    difference = [model.sums(Load(1024, 1024, 16)).decode.ms(16) for model in (slow, measured)]
    assert difference[0] - difference[1] == pytest.approx(61 * 40e-3)


def test_mla_is_slower_on_gfx942_and_a_product_takes_its_time_for_each_block_of_k():
    gfx942, gfx950 = (AssumedTables.scaled_to(name, "sglang") for name in ("mi325x", "mi355x"))
    times = [tables.mla_decode(64, 4096, 16, "fp8") for tables in (gfx942, gfx950)]
    peaks = [3 + 151 / tables.sheet["tbps"] for tables in (gfx942, gfx950)]
    assert times[0] / times[1] == pytest.approx(4 * peaks[0] / peaks[1], rel=0.01)
    assert gfx942.gemm("fp8_block", 4, 2112, 7168) == pytest.approx(2.2 * 7168 / 128)
    assert gfx950.gemm("fp8_block", 4, 2112, 7168) < 40


def test_only_sglang_on_amd_moves_bytes_between_its_kernels():
    """100 MB of a token at 6 and 8 TB/s; ATOM and vLLM have small kernels of their own."""
    systems = ("mi325x sglang", "mi355x sglang", "mi355x atom", "mi300x vllm", "b200 sglang")
    between_us = [AssumedTables.scaled_to(*system.split()).between_us for system in systems]
    assert between_us == [(4.7e3, pytest.approx(100 / 6)), (0.0, 12.5), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_data_sheets_scale_tp8_alone_and_say_so_first():
    says = r"^data sheets scale times of tp8 alone: at tp4 there are none of .*moe"
    with pytest.raises(UsageError, match=says):
        link(System(hardware="mi355x", tp=4))


def attention(us: float) -> Surface:
    return Surface({(b, c): us for b in (1.0, 64.0) for c in (512.0, 4096.0)})


@pytest.mark.parametrize("lacks", [["mla_bmm_perf"], ["custom_allreduce_perf", "gemm_perf"]])
def test_what_tables_lack_is_filled(lacks):
    rows = {name: many for name, many in H200.rows.items() if name not in lacks}
    part = replace(H200, source=f"without {lacks}", rows=rows)
    with pytest.raises(UsageError, match="give --times DIR with AIConfigurator's tables"):
        structure(part, TP8)
    filled = uncalibrated(System(), part).structure
    assert {t.name for t in filled.decode} == {t.name for t in structure(H200, TP8).decode}
    assert filled.assumed and "fused_moe" not in filled.assumed and "mla_decode" not in filled.assumed


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
        uncalibrated(System(hardware=hardware, engine=engine or ""), mine)


def test_spellings():
    assert {hardware_name(t) for t in ("NVIDIA-H200", "nvidia h200 SXM", "h200")} == {"h200"}
    assert hardware_name("AMD-Instinct-MI300X-OAM") == "mi300x" and hardware_name("AMD EPYC") == "epyc"
    assert {engine_name(t) for t in ("TensorRT-LLM", "tensorrt_llm", "trtllm", "TRT-LLM")} == {"trtllm"}
    assert (
        kernel_words("sglang_flashinfer_trtllm_moe") == kernel_words("flashinfer.trtllm@sglang") == {"trtllm"}
    )
    assert kernel_words("flash_attention") == kernel_words("flash_attn.fa3@sglang") and not kernel_words(
        "default"
    )


def test_of_several_kernels_the_engines_own_is_read(tmp_path):
    """Each next kernel is slower by half; one untold row vouches for no other."""

    def moe(*kernels: str) -> float | None:
        folder = written(tmp_path / "-".join(kernels), device="NVIDIA B200", moe=kernels)
        built = link(System(times=(str(folder),))).structure
        return None if built.assumed else terms(built.decode)["fused_moe"].time(LOAD)

    alone = moe(TRTLLM)
    assert moe(TRTLLM, TRITON) == alone and moe(TRITON, TRTLLM) == pytest.approx(1.5 * alone)
    assert moe(TRITON, "default") is None
