"""Tables, interpolation and structure of the serving link: numbers by hand."""

import csv
import itertools
import math
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.serving.link.experts import experts_hit, routed, shared_expert_factor
from harness.serving.link.structure import (
    GLUE_BYTES,
    GLUE_CALLS,
    GLUE_GBPS,
    GLUE_US,
    StepLoad,
    plain_prefill,
    structure,
)
from harness.serving.link.times.interpolation import Curve, Surface, isotonic
from harness.serving.link.times.tables import TABLES, MissingTable, read_tables
from shapes.attention import Parallel
from shapes.models import model
from tests.support.serving_link_tables import US, written

R1 = model("deepseek-r1")
H200 = TABLES / "h200-sglang-0.5.9"
TP8 = Parallel(tp=8)


def test_a_curve_is_linear_in_logarithms_and_less_sure_beyond_its_points():
    curve = Curve([(16, 10.0), (64, 40.0)])
    found = {x: (curve.at(x).us, curve.at(x).distance) for x in (1, 16, 32, 256)}
    assert [us for us, _ in found.values()] == pytest.approx([10.0, 10.0, 20.0, 160.0])
    assert found[16][1] == 0.0 and found[32][1] == pytest.approx(0.25 * math.log(4))
    assert found[1][1] > 0.3 and found[256][1] > 0.3
    falls = Curve([(1, 10.0), (2, 20.0), (4, 10.0), (8, 40.0)])  # which is noise
    assert falls.at(2).us == falls.at(4).us == pytest.approx(math.sqrt(200))
    assert falls.at(2).noise > 0.1 and Curve([(1, 1.0), (2, 2.0)]).noise == 0.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_isotonic_regression_grows_and_keeps_the_mean(values):
    found = isotonic(values)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)


def test_a_surface_of_two_sizes():
    rows = [((n, m), float(n * m)) for n in (2, 8) for m in (1, 16)]
    assert Surface(rows).at(4, 4).us == pytest.approx(16.0)
    assert Surface(rows).at(16, 4).us == pytest.approx(64.0)


def terms(phase):
    return {term.name: term for term in phase}


def test_a_decode_step_by_hand(tmp_path):
    """61 attentions, 58 MoE and 3 dense layers, 122 all-reduces; every kernel of a kind takes the same."""
    found = structure(read_tables(written(tmp_path)), TP8)
    load = StepLoad(tokens=8, batch=8, context=1024)
    total = sum(term.calls * term.time(load).us for term in found.decode)
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


def test_experts_hit():
    assert experts_hit(R1, 1) == pytest.approx(8)
    assert experts_hit(R1, 32) == pytest.approx(256 * (1 - (31 / 32) ** 32))


def test_independent_tokens_are_read_where_balanced_ones_hit_as_many():
    tables = read_tables(H200)
    hit = experts_hit(R1, 16)
    assert routed(tables, R1, 16, 8, 1).us == pytest.approx(tables.moe(hit / 8, 8, 1, "balanced").us)
    # Tokens by tokens the balanced ones read more experts, and from far on none.
    assert routed(tables, R1, 32, 8, 1).us < 0.8 * tables.moe(32, 8, 1, "balanced").us
    assert routed(tables, R1, 4096, 8, 1).us == pytest.approx(tables.moe(4096, 8, 1, "balanced").us, rel=1e-3)


def test_the_shared_expert_is_one_tile_at_few_tokens_and_a_ninth_of_the_work_at_many():
    assert shared_expert_factor(R1, 1) == pytest.approx(9 / 8)
    assert shared_expert_factor(R1, 64) == pytest.approx(1 + 1 / experts_hit(R1, 64))
    assert shared_expert_factor(R1, 64 * 1024) == pytest.approx(9 / 8)


def test_prefill_attention_is_scaled_from_absorbed_to_plain():
    tables = read_tables(H200)
    timed, least = (tables.mla_prefill(1, n, 16, "bfloat16").us for n in (8192, 1))
    plain = plain_prefill(tables, R1, StepLoad(8192, 1, 8192), 16).us
    assert plain == pytest.approx(least + (timed - least) * 320 / 1088)


def test_prefill_attention_of_other_engines_was_timed_plain(tmp_path):
    tables = read_tables(written(tmp_path, framework="TRTLLM"))
    assert plain_prefill(tables, R1, StepLoad(8192, 1, 8192), 16).us == pytest.approx(US["prefill"])


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
    path = folder / "gemm_perf.csv"
    rows = list(csv.DictReader(path.open()))
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows([row | {"latency": float(row["latency"]) * scale} for row in rows])
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


@pytest.mark.parametrize("parallel", [Parallel(dp=8), Parallel(tp=8, ep=4)])
def test_parallelism_that_is_not_modelled_is_refused(parallel):
    with pytest.raises(UsageError, match="not modelled"):
        structure(read_tables(H200), parallel)
