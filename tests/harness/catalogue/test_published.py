"""Published figures and headline claims: cited, unranked, and held against recorded runs only."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import kernels
from harness.catalogue.published import CLAIMS, figures, read
from harness.errors import UsageError
from harness.paths import PUBLISHED, RESULTS
from harness.report import case_table
from harness.report.comparison_table import claims_table
from harness.report.terminal import plain_text
from harness.results import claims
from harness.results.claims import Ratio, examine, ratios, verdict
from harness.results.schema import Cell, Samples
from kernels.platform import Platform
from shapes.case import Case
from tests.support.written_runs import a_cell

CPU = Platform("cpu", "x86", name="a CPU")


def test_every_figure_names_its_source_and_a_case_that_can_be():
    """Where time and rate were both published, our count of flops ties them, to two or three figures."""
    found = figures()
    assert {f.op for f in found} == set(kernels.OPS)
    for f in found:
        assert f.source and f.where and f.method and (f.time_us or f.tflops)
        sizes = kernels.OPS[f.op].sizes(f.sizes)
        if f.time_us and f.tflops and f.op != "fused_moe":
            work = kernels.OPS[f.op].work(sizes)
            assert work.flops / f.time_us / 1e6 == pytest.approx(f.tflops, rel=0.02)


def test_a_figure_is_shown_beside_its_case_and_no_other():
    case = Case("block_scale_gemm", {"m": 64, "n": 2112, "k": 7168, "fp8": "e4m3fn", "scales": "fp32"})
    shown = plain_text(case_table.published(figures(), case))
    assert shown.startswith("published by others, neither measured here nor ranked:")
    assert all(text in shown for text in ("AITER, tuned", "16.5 us", "MI300X", "profiler", "DeepGEMM v1"))
    assert "19.8 us" not in shown, "that is of 128 rows"
    assert case_table.published(figures(), replace(case, sizes={"m": 65, "n": 2112, "k": 7168})) is None


def test_a_broken_file_is_one_line(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UsageError, match=r"^cannot read .*a\.json: "):
        figures(tmp_path)
    whole = {"source": "s", "where": "w", "method": "m", "figures": [{"op": "fused_moe", "speed": 1}]}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match=r"^cannot read .*a\.json: .*speed"):
        figures(tmp_path)


def cell(impl: str, seconds: float, case: str = "m=1", arch: str = "gfx942", **other: object) -> Cell:
    """Six blocks of five rounds, with a little noise that all share and a little that they do not."""
    places = [(block, index) for block in range(6) for index in range(5)]
    wobble = [1 + 0.01 * ((7 * block + 3 * index + len(impl)) % 5 - 2) / 2 for block, index in places]
    samples = Samples(
        block=[b for b, _ in places], round=[i for _, i in places], seconds=[seconds * w for w in wobble]
    )
    case = f"mla_decode {case} core"
    facts = {"platform": "rocm", "launch": "graph", "time_us": seconds * 1e6, "samples": samples}
    return a_cell(impl=impl, case=case, arch=arch, **facts | other)


def run_of(*cells: Cell, run: str = "a run"):
    return [(run, one) for one in cells]


def test_a_ratio_is_of_the_fastest_on_each_side_in_the_same_case():
    times = {"aiter.asm": 1e-4, "aiter.triton": 2e-4, "torch.naive": 20e-4, "torch.sdpa": 5e-4}
    cells = [cell(impl, seconds) for impl, seconds in times.items()]
    cells += [cell(name, s, f"m={m}") for name, s, m in (("aiter.asm", 1e-4, 2), ("torch.sdpa", 3e-4, 2))]
    cells.append(cell("torch.sdpa", 9e-4, "m=3"))
    found = ratios("mla_decode", "gfx942", run_of(*cells), ("aiter.*",), ("torch.*",))
    assert [(r.a, r.b, r.case.split()[1]) for r in found] == [
        ("aiter.asm", "torch.sdpa", "m=1"),
        ("aiter.asm", "torch.sdpa", "m=2"),
    ]
    for r, true in zip(found, (5, 3), strict=True):
        assert r.low < true < r.high
        assert r.ratio == pytest.approx(true, rel=0.01)
    (alone,) = ratios("mla_decode", "gfx942", run_of(*cells[:4]), ("aiter.*",), ("torch.*",))
    assert found[0].low < alone.low < alone.high < found[0].high, "two share the confidence"


def test_what_is_wrong_or_elsewhere_is_no_side_of_a_ratio():
    wrong, elsewhere = {"status": "wrong", "time_us": None}, {"op": "mha_prefill"}
    once = {"samples": Samples(block=[0], round=[0], seconds=[1e-4])}  # a ratio without an interval
    for spoilt in (wrong, {"arch": "gfx950"}, {"launch": "eager"}, {"cache": "cold"}, elsewhere, once, {}):
        cells = run_of(cell("aiter.asm", 1e-4, **spoilt))
        cells += run_of(cell("torch.naive", 20e-4), run="a run" if spoilt else "another")
        assert ratios("mla_decode", "gfx942", cells, ("aiter.*",), ("torch.naive",)) == [], spoilt


def test_runs_of_two_machines_may_have_the_same_name(tmp_path):
    for machine in ("one", "another"):
        shutil.copytree(RESULTS / "epyc-zen4-2core/fused_moe-prefill", tmp_path / machine / "run")
    assert len({run for run, _ in claims.recorded_cells(tmp_path)}) == 2


def test_up_to_a_factor_needs_one_case_that_surely_reaches_it():
    under, over, about = (
        Ratio((low + high) / 2, low, high, "a", "b", "a case", "a run")
        for low, high in ((1.0, 1.9), (2.0, 2.4), (1.8, 2.2))
    )
    for found, said in (
        ([], "not measured on MI300X"), ([under], "not supported"), ([under, over], "supported"),
        ([under, about], "unclear"),
    ):  # fmt: skip
        assert verdict(2.0, found, "MI300X") == said


def test_each_claim_is_held_against_each_kind_of_rival_on_its_own_hardware(snapshot):
    cells = run_of(
        cell("aiter.asm", 1e-4),
        cell("torch.naive", 20e-4),
        cell("torch.sdpa", 5e-4),
        cell("vllm.amx", 1e-3, arch="x86"),
        cell("torch.naive", 99e-3, arch="x86"),
    )
    document = read(PUBLISHED / CLAIMS)
    tests = {t.against: t for t in examine(document, CPU, cells) if t.op == "mla_decode"}
    assert {t: tests[t].verdict for t in tests} == {
        "naive torch": "supported",
        "the best of torch": "not supported",
        "Triton": "not measured on MI300X",
    }
    text, _, _ = plain_text(claims_table(document, [*tests.values()])).partition("\nOn their")
    snapshot(Path(__file__).parent / "snapshots" / "claims.txt", text)
    assert "none of the claim, against nothing" in plain_text(claims_table(document, [tests["Triton"]]))


def test_claims_prints_its_table_here(here):
    done = here("claims")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("2x", "3x", "17x", "14x", "not measured on MI300X", "unknown: the baseline"):
        assert word in done.stdout
    assert "supported" not in done.stdout
    whole = json.loads(here("claims", "--json", "-").stdout)
    assert len(whole["tests"]) == 4 * len(claims.RIVALS)
    assert {t["verdict"] for t in whole["tests"]} == {"not measured on MI300X"}
