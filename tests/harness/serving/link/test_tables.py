"""Tables, interpolation and structure of the serving link: numbers by hand."""

import csv
import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from pyarrow.csv import read_csv

from harness.errors import UsageError
from harness.serving.link.experts import experts_hit, routed, shared_expert_factor
from harness.serving.link.model import link
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
)
from harness.serving.link.times.interpolation import Curve, Surface, isotonic
from harness.serving.link.times.tables import FILES, TABLES, MissingTable, read_tables
from shapes.attention import Parallel
from shapes.models import model
from tests.support.serving_link_tables import US, written

R1 = model("deepseek-r1")
H200 = TABLES / "h200-sglang-0.5.9"
TP8 = Parallel(tp=8)
LOAD = StepLoad(tokens=8, batch=8, context=1024)


def test_a_curve_is_linear_in_logarithms_and_less_sure_beyond_its_points():
    curve = Curve([(16, 10.0), (64, 40.0)])
    found = {x: (curve.at(x).us, curve.at(x).distance) for x in (1, 16, 32, 256)}
    assert [us for us, _ in found.values()] == pytest.approx([10.0, 10.0, 20.0, 160.0])
    assert found[16][1] == 0.0 and found[32][1] == pytest.approx(0.25 * math.log(4))
    assert found[1][1] > 0.3 and found[256][1] > 0.3
    falls = Curve([(1, 10.0), (2, 20.0), (4, 10.0), (8, 40.0)])  # which is noise
    assert falls.at(2).us == falls.at(4).us == pytest.approx(math.sqrt(200))
    assert falls.at(2).noise > 0.1 and Curve([(1, 1.0), (2, 2.0)]).noise == 0.0
    surface = Surface([((n, m), float(n * m)) for n in (2, 8) for m in (1, 16)])
    assert (surface.at(4, 4).us, surface.at(16, 4).us) == (pytest.approx(16.0), pytest.approx(64.0))


def test_isotonic_regression_grows_and_keeps_the_mean():
    for seed in range(50):
        values = np.random.default_rng(seed).normal(size=1 + seed % 30)
        found = isotonic(values.tolist())
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
        assert sum(found) == pytest.approx(values.sum(), abs=1e-9)


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
    found = structure(read_tables(H200), TP8)
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
    tables = read_tables(H200)
    hit = experts_hit(R1, 16)
    assert routed(tables, R1, 16, 8, 1).us == pytest.approx(tables.moe(hit / 8, 8, 1, "balanced").us)
    # Tokens by tokens the balanced ones read more experts, and from far on none.
    assert routed(tables, R1, 32, 8, 1).us < 0.8 * tables.moe(32, 8, 1, "balanced").us
    assert routed(tables, R1, 4096, 8, 1).us == pytest.approx(tables.moe(4096, 8, 1, "balanced").us, rel=1e-3)
    # The shared expert is one tile at few tokens and a ninth of the work at many.
    factors = [shared_expert_factor(R1, tokens) for tokens in (1, 64, 64 * 1024)]
    assert factors == pytest.approx([9 / 8, 1 + 1 / experts_hit(R1, 64), 9 / 8])


def test_prefill_attention_is_scaled_from_absorbed_to_plain_where_it_was_timed_absorbed(tmp_path):
    tables = read_tables(H200)
    timed, least = (tables.mla_prefill(1, n, 16, "bfloat16").us for n in (8192, 1))
    plain = plain_prefill(tables, R1, StepLoad(8192, 1, 8192), 16).us
    assert plain == pytest.approx(least + (timed - least) * 320 / 1088)
    other = read_tables(written(tmp_path, framework="TRTLLM"))
    assert plain_prefill(other, R1, StepLoad(8192, 1, 8192), 16).us == pytest.approx(US["prefill"])


def test_expert_parallelism_has_shared_linears_and_its_slowest_rank():
    tables = read_tables(H200)
    found = structure(tables, Parallel(tp=8, ep=8))
    assert terms(found.decode)["block_scale_gemm:shared_gate_up"].calls == 58
    mean = tables.moe(experts_hit(R1, 8) / 8, 1, 8, "balanced").us
    assert routed(tables, R1, 8, 1, 8).us > 1.2 * mean


def test_all_reduce_takes_elements():
    """Were its sizes bytes, 8 GPUs would reduce at half of what NVLink gives."""
    us = read_tables(H200).all_reduce(2**29, 8).us
    gbps = 2 * 2**29 * 2 * 7 / 8 / us / 1e3
    assert 380 < gbps < 480


@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_tables_in_another_unit_are_refused(tmp_path, scale):
    folder = tmp_path / "tables"
    shutil.copytree(H200, folder)
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
    home = tmp_path / "moe" / "sglang" / "10"
    home.mkdir()
    (home / "reuse.yaml").write_text("schema_version: 1\nreuse:\n- table: moe_perf\n  from_version: '9'\n")
    tables = read_tables(where)
    assert tables.version == "10" and any("moe_perf" in n and "SGLang 9" in n for n in tables.notes)
    assert tables.moe(8, 8, 1, "balanced").us == pytest.approx(US["moe"])


def test_a_module_is_what_it_holds_and_attention(tmp_path):
    times = decode_us(read_tables(written(tmp_path, us=MODULES, framework="VLLM")))
    held = 3 * US["fp8_block"] + 2 * US["bmm"] + glue_us(LOAD.tokens, *ATTENTION_GLUE)
    assert times["mla_decode"] == pytest.approx(90 - held)
    prompt = StepLoad(tokens=1024, batch=1, context=1024)
    prefill = {t.name: t.time(prompt).us for t in structure(read_tables(tmp_path), TP8).prefill}
    held = 4 * US["fp8_block"] + glue_us(1024, *ATTENTION_GLUE)
    assert prefill["mha_prefill"] == pytest.approx(900 - held)


@pytest.mark.parametrize("us, attention", [
    (MODULES, 90.0 - 3 * US["fp8_block"] - glue_us(LOAD.tokens, *ATTENTION_GLUE)), (US, US["decode"])
])  # fmt: skip
def test_products_without_a_time_of_their_own_stay_in_attention(tmp_path, us, attention):
    """vLLM's layer was timed with them, and a module has them."""
    without = {name: value for name, value in us.items() if name != "bmm"}
    tables = read_tables(written(tmp_path, us=without, framework="VLLM"))
    times = decode_us(tables)
    assert times["mla_decode"] == pytest.approx(attention)
    assert not any(name.startswith("absorbed_bmm") for name in times)
    assert any("w_uk and w_uv have none" in note for note in link("x1", "vllm", tables=tables).notes)


def test_the_shared_expert_is_sglangs_to_fuse(tmp_path):
    sglang, trtllm = (
        set(decode_us(read_tables(written(tmp_path / engine, framework=engine))))
        for engine in ("SGLang", "TRTLLM")
    )
    assert trtllm - sglang == {"block_scale_gemm:shared_gate_up", "block_scale_gemm:shared_down"}


def test_times_of_the_host_are_not_those_of_a_kernel(tmp_path):
    folder = written(tmp_path, us=US | {"fp8_block": 300.0}, device="NVIDIA H200")
    changed(folder / "gemm_perf.csv", m=lambda row: "64" if row["m"] == "1" else row["m"])
    tables = read_tables(folder)
    assert tables.gemm("fp8_block", 64, 128, 128).us == pytest.approx(US["bfloat16"])
    assert any("take 38 times bf16's" in note for note in tables.notes)


def test_more_gpus_behind_one_switch(tmp_path):
    tables = read_tables(written(tmp_path / "gb", device="NVIDIA GB200", gpus=4))
    four, eight = tables.all_reduce(7168, 4), tables.all_reduce(7168, 8)
    assert eight.us == pytest.approx(four.us * 2**0.25) and eight.distance > four.distance
    assert any("over 8 GPUs was timed" in note for note in link("gb200", tables=tables).notes)
    with pytest.raises(MissingTable, match="all_reduce"):
        structure(read_tables(written(tmp_path / "b", device="NVIDIA B200", gpus=4)), TP8)


def test_weights_that_do_not_fit_are_said_first(tmp_path):
    model = link("h100", tables=read_tables(written(tmp_path, device="NVIDIA H100 80GB HBM3")))
    assert model.notes[0].startswith("this does not fit: weights take 85.4 GB of each h100's 85.9")


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
            parquet.write_table(read_csv(path), tmp_path / "parquet" / f"{stem}.parquet")
    assert read_tables(tmp_path / "parquet").rows == read_tables(tmp_path / "csv").rows
