"""AIConfigurator's sets of tables: its layouts, what their times hold, and what no machine takes."""

import csv
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet
from pyarrow.csv import read_csv

from harness.errors import UsageError
from harness.serving.link.model import link
from harness.serving.link.structure import ATTENTION_GLUE, StepLoad, glue_us, structure
from harness.serving.link.times.tables import FILES, MissingTable, read_tables
from shapes.attention import Parallel
from tests.support.serving_link_tables import US, written

TP8 = Parallel(tp=8)
LOAD = StepLoad(tokens=8, batch=8, context=1024)
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


def changed(path: Path, **columns) -> None:
    """The table with other values in these columns; a value may be a function of the row."""
    rows = list(csv.DictReader(path.open()))
    for row in rows:
        row |= {name: str(value(row)) if callable(value) else value for name, value in columns.items()}
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)


def decode_us(tables) -> dict[str, float]:
    return {term.name: term.time(LOAD).us for term in structure(tables, TP8).decode}


def test_both_layouts_are_one_set(tmp_path):
    flat = read_tables(written(tmp_path / "old" / "sglang" / "9"))
    since = read_tables(by_op(tmp_path / "new", "sglang", "9"))
    assert since.rows == flat.rows and since.version == "9" and not since.notes
    assert decode_us(since) == decode_us(flat)


def test_a_set_that_is_not_there(tmp_path):
    by_op(tmp_path, "sglang", "9")
    with pytest.raises(UsageError, match="no such folder"):
        read_tables(tmp_path / "sglang" / "8")
    with pytest.raises(UsageError, match=r"sets of tables: give .* with one of sglang/9"):
        read_tables(tmp_path)


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


def test_the_last_all_reduce_of_an_engine_stands_for_other_versions(tmp_path):
    by_op(tmp_path, "sglang", "9.0", us=US | {"reduce": 7.0})
    by_op(tmp_path, "sglang", "10.0", us=US | {"reduce": 9.0})
    where = by_op(tmp_path, "sglang", "11.0")
    shutil.rmtree(tmp_path / "comm" / "sglang" / "11.0")
    tables = read_tables(where)
    assert tables.all_reduce(7168, 8).us == pytest.approx(9.0)
    assert any("custom_allreduce_perf" in note and "10.0" in note for note in tables.notes)


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
    names = {engine: set(decode_us(read_tables(written(tmp_path / engine, framework=engine))))
             for engine in ("SGLang", "TRTLLM")}  # fmt: skip
    assert names["TRTLLM"] - names["SGLang"] == {
        "block_scale_gemm:shared_gate_up",
        "block_scale_gemm:shared_down",
    }


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
