"""Suites of cases for all ops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import OPS
from shapes.attention import Parallel, mla_decode_sizes
from shapes.lengths import parse_span, spread
from shapes.models import model
from shapes.suites import suite, suites

ROOT = Path(__file__).parent.parent


def test_the_suites_by_name():
    served = [f"serving-3200-800-c{c}" for c in (1, 2, 4, 8, 16, 32, 64, 128)]
    served += [f"serving-3200-{osl}-c128" for osl in (1600, 3200, 6400)]
    served += [f"serving-3200-800-c{c}-mixed" for c in (4, 8, 16, 32, 64, 128)]
    served += [f"offline-3200-800-b{b}" for b in (32, 64, 128, 256, 512, 1024)]
    served += [f"offline-3200-{osl}-b{b}" for osl in (1600, 3200) for b in (256, 512, 1024)]
    served += [f"serving-{load}-c10800" for load in ("512-512", "1000-1000", "2000-2000", "2000-100")]
    assert list(suites()) == ["smoke", "r1-tp8", "r1-tp4", "r1-dp-ep8", *served]


@pytest.mark.parametrize("name", suites())
def test_a_suite_has_weighted_cases_that_the_op_reads_unchanged(name):
    chosen = suite(name)
    assert chosen.name == name
    assert "\n" not in chosen.description
    cases = chosen.cases("mla_decode")
    assert 1 <= len(cases) <= 8
    assert sum(case.weight for case in cases) == pytest.approx(1)
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert OPS["mla_decode"].case(case.sizes).key == case.key


def test_an_op_without_cases_has_none():
    assert suite("r1-tp8").cases("block_scale_gemm") == []


def test_smoke_is_small():
    for case in suite("smoke").cases("mla_decode"):
        lengths = spread(parse_span(case.sizes["ctx"]), case.sizes["batch"], 0)
        assert sum(lengths) * 576 < 200_000
    assert {case.sizes["page"] for case in suite("smoke").cases("mla_decode")} == {1, 16, 64}


@pytest.mark.parametrize(("name", "heads"), [("r1-tp8", 16), ("r1-tp4", 32)])
def test_the_sweep_has_each_concurrency_once_the_most_served_first(name, heads):
    cases = suite(name).cases("mla_decode")
    assert [case.sizes["batch"] for case in cases] == [64, 128, 32, 16, 8, 4, 2, 1]
    assert {case.weight for case in cases} == {1 / 8}
    assert {case.place for case in cases} == {f"deepseek-r1 {name[3:]} decode"}
    r1 = model("deepseek-r1")
    for case in cases:
        parallel = Parallel(tp=int(name[-1]))
        assert case.sizes == mla_decode_sizes(r1, parallel, case.sizes["batch"], "3201..3999")
        assert case.sizes["heads"] == heads


def test_dp_attention_has_all_heads_and_a_share_of_the_requests():
    cases = suite("r1-dp-ep8").cases("mla_decode")
    assert {case.sizes["heads"] for case in cases} == {128}
    assert {case.sizes["batch"] for case in cases} == {128, 64, 32, 16}


def test_pages_and_cache_formats():
    for name, chosen in suites().items():
        if name != "smoke":
            formats = {(case.sizes["page"], case.sizes["kv"]) for case in chosen.cases("mla_decode")}
            assert formats == {(64, "fp8" if name.endswith("c10800") else "bf16")}


def test_an_unknown_suite_is_one_line_that_names_the_suites():
    with pytest.raises(ValueError, match=r"^unknown suite 'r1'; suites: smoke, r1-tp8, ") as error:
        suite("r1")
    assert "\n" not in str(error.value)


def test_listing_suites_imports_no_library_and_simulates_nothing():
    code = (
        "import sys; from shapes.suites import suites;"
        "[(s.name, s.description) for s in suites().values()];"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'pandas', 'numpy', 'scipy', 'triton', 'pydantic', 'kernels', 'harness'}),"
        "'shapes.bins' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[] False"
