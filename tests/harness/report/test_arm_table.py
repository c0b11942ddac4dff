"""What a person reads of a case under arms: of recorded runs."""

from __future__ import annotations

import pytest

from harness.report.arm_table import case_table, conclusion
from harness.report.terminal import plain
from harness.results.journal import Journal
from tests.support.paths import ROOT

TOGGLE = ROOT / "results/epyc-zen4-2core/toggle"


def first_case(name: str, columns: int | None = None) -> str:
    journal = Journal(TOGGLE / name)
    return plain(case_table(next(iter(journal.finished().values())), journal.run()), columns)


def test_what_can_run_under_no_arm_is_named_once():
    shown = first_case("onednn")
    assert "unsupported  its call covers with_quant, which is more than core: vllm.amx\n" in shown
    assert shown.count("vllm.amx") == 1


def test_what_ran_is_said_of_the_first_arm_and_of_whoever_changed_it():
    words = " ".join(first_case("onednn").split())
    assert "what ran torch.bf16: mkldnn::_linear_pointwise, " in words
    assert "torch.bf16 @ ONEDNN_MAX_CPU_ISA=AVX2: mkldnn::_linear_pointwise, onednn inner_product" in words
    assert "brg_matmul:avx512_core_bf16 -> aten::mm, onednn none" in words
    assert "torch.naive @" not in words, "its arms ran the same"


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_long_arm_has_a_line_for_each_variable(columns):
    lines = first_case("threads", columns).splitlines()
    assert max(map(len, lines)) <= columns
    first = next(i for i, line in enumerate(lines) if line.startswith("  OMP_NUM_THREADS=1, "))
    assert "slower" in lines[first]
    assert lines[first + 1].startswith("  ONEDNN_MAX_CPU_ISA=AVX2")


def test_effects_of_flags_have_a_table_for_each_implementation():
    shown = first_case("threads")
    assert "effects of the flags on torch.bf16, all of them together 95 % sure:" in shown
    effect = next(line for line in shown.splitlines() if "OMP_NUM_THREADS: 1 -> 2" in line)
    assert effect.startswith("main ") and effect.endswith(" 1.68x (1.63 to 1.72)  faster")


def test_the_recommendation_stands_below_its_title():
    journal = Journal(TOGGLE / "onednn")
    records = [record for case in journal.finished().values() for record in case]
    lines = plain(conclusion(records, journal.run())).splitlines()
    assert lines[0] == "recommendation:"
    assert all(line.startswith("  ") for line in lines[1:])
    assert "torch.bf16: leave it as it is" in lines[1]
