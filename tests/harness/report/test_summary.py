"""What is said of several cases: times of known totals, wins, ties and gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from harness.report.rows import CaseResult
from harness.report.summary import summary
from harness.results.schema import Record, Verdict
from shapes.case import Case
from tests.support.written_runs import a_run, case, cell, finished, planned, ranked, verdict

AMX, VEC, SDPA, NAIVE = "vllm.amx", "vllm.vec", "torch.sdpa", "torch.naive"
WEIGHTS = (0.5, 0.3, 0.2)
CASES = [replace(case(4**i), place="deepseek-r1", weight=weight) for i, weight in enumerate(WEIGHTS)]


def said(records: Sequence[Sequence[Record]], cases: Sequence[Case] = CASES, **run: object) -> list[str]:
    told = a_run([planned(of) for of in cases], **run)
    return summary([CaseResult.of(of) for of in records], told)


def measured(*times: Mapping[str, float], word: str = "faster") -> list[list[Record]]:
    return [ranked(of, {SDPA: 400.0, **rows}, word) for of, rows in zip(CASES, times, strict=False)]


FIRST, SECOND, THIRD = {AMX: 100.0, VEC: 150.0}, {AMX: 100.0, VEC: 120.0}, {AMX: 100.0, VEC: 90.0}


def test_wins_are_counted_and_totals_are_weighted():
    """vllm.vec, what vLLM runs on such a CPU, takes 0.5 x 150 + 0.3 x 120 + 0.2 x 90 = 129."""
    assert said(measured(FIRST, SECOND, THIRD)) == [
        "fastest in 2 of 3 cases: vllm.amx; in 1: vllm.vec; "
        "weighted by the suite 1.290x vLLM's default vllm.vec (1.289 to 1.291)"
    ]


def test_the_row_with_most_wins_need_not_take_the_least_time():
    slow = {AMX: 900.0, VEC: 100.0}
    assert said(measured(FIRST, SECOND, slow)) == [
        "fastest in 2 of 3 cases: vllm.amx; in 1: vllm.vec; "
        "weighted by the suite vllm.vec takes the least time; it is vLLM's default"
    ]


def test_only_a_clear_verdict_is_a_win():
    unclear, same, faster = (
        measured(FIRST, FIRST, FIRST, word=word) for word in ("unclear", "same", "faster")
    )
    assert said([unclear[0], same[1], faster[2]])[0].startswith(
        "fastest in 1 of 3 cases: vllm.amx; indistinguishable in 1; two are the same in 1; weighted"
    )
    assert said(unclear)[0].startswith(
        "no row is clearly the fastest in 3 cases; indistinguishable in 3; weighted by the suite "
        "vllm.amx takes the least time, 1.500x vLLM's default vllm.vec"
    )


def test_rows_as_good_as_the_best_are_named_and_those_that_may_be():
    *_, done = of_case = ranked(CASES[0], {SDPA: 200.0, AMX: 100.0, "x.near": 101.5, "x.far": 103.0})
    scattered = cell(CASES[0], "x.scattered", 103.0, 20.0)
    again = [[*of_case[:-1], scattered, done]]
    again.append([*ranked(CASES[1], {SDPA: 200.0, AMX: 100.0, "x.near": 101.5, "x.far": 103.0})])
    again[1].insert(0, cell(CASES[1], "x.scattered", 103.0, 20.0))
    assert said(again, CASES[:2])[0].endswith(
        "weighted by the suite 2.000x torch.sdpa (2.000 to 2.000); within 2 %: x.near; "
        "perhaps within 2 %: x.scattered"
    )


def test_what_is_missing_is_counted():
    """A case without a time, one with a single row, one that the default lacks, one that was not reached."""
    cases = [*CASES, case(100), case(101)]
    none = [cell(cases[3], AMX, None), finished(cases[3])]
    alone = [cell(CASES[2], AMX, 100.0, 1.0), verdict(*[cell(CASES[2], AMX, 100.0)] * 2, "same", "A/A")]
    rows = [*measured(FIRST, {AMX: 100.0}), [*alone, finished(CASES[2])], none]
    assert said(rows, cases) == [
        "fastest in 2 of 4 cases: vllm.amx; one row alone in 1; no row has a time in 1; "
        "weighted by the suite (3 of 4 cases) 1.500x vLLM's default vllm.vec (1.500 to 1.500) in 1 of 3; "
        "1 more not measured"
    ]


@pytest.mark.parametrize(("weight", "expected"), [
    (0.99, "the same as vLLM's default vllm.vec (1.100x to 1.100x)"),
    (0.01, "1.100x vLLM's default vllm.vec (1.100 to 1.100)"),
])  # fmt: skip
def test_noise_counts_as_much_as_its_case(weight, expected):
    """Of two cases the baseline took 1.2 times as long in the first, when it was prepared again."""
    cases = [replace(of, weight=w) for of, w in zip(CASES, (weight, 1 - weight), strict=False)]
    rows = [ranked(of, {SDPA: 400.0, AMX: 100.0, VEC: 110.0}) for of in cases]
    (pair,) = (r for r in rows[0] if isinstance(r, Verdict) and r.about == "A/A")
    slower = pair.samples.model_copy(update={"seconds": [1.2 * s for s in pair.samples.seconds]})
    rows[0][rows[0].index(pair)] = pair.model_copy(update={"samples": slower})
    assert said(rows, cases)[0].endswith(expected)


def test_rows_that_differ_by_case_share_an_engine_s_default():
    """vLLM on Hopper runs FlashInfer's below 32 tokens, DeepGEMM's from there; SGLang's has no time."""
    cases = [Case("block_scale_gemm", {"m": m, "n": 2112, "k": 7168}, "core", "r1", 0.5) for m in (1, 64)]
    rows = {"flashinfer.sm90": 100.0, "deepgemm@vllm": 200.0, "torch.bf16": 50.0}
    records = [
        [
            r.model_copy(update={"arch": "sm_90", "platform": "cuda", "launch": "graph"})
            if hasattr(r, "arch")
            else r
            for r in of
        ]
        for of in (ranked(case, {"torch.naive": 900.0, **rows}) for case in cases)
    ]
    assert said(records, cases)[0] == (
        "fastest in 2 of 2 cases: torch.bf16; weighted by the suite 3.000x vLLM's default flashinfer.sm90, "
        "deepgemm@vllm (2.994 to 3.006)"
    )


def test_each_boundary_and_launch_mode_has_a_sentence():
    wide = [replace(of, boundary="with_quant") for of in CASES[:2]]
    boundaries = [*measured(FIRST, SECOND), *(ranked(of, {SDPA: 100.0, AMX: 50.0}) for of in wide)]
    assert [line.partition(";")[0] for line in said(boundaries, [*CASES[:2], *wide])] == [
        "core: fastest in 2 of 2 cases: vllm.amx", "with_quant: fastest in 2 of 2 cases: vllm.amx"
    ]  # fmt: skip
    modes = [
        [
            *(cell(of, AMX, 10.0, launch="graph"), cell(of, SDPA, 20.0, launch="graph")),
            *(cell(of, AMX, 40.0, launch="eager"), cell(of, SDPA, 30.0, launch="eager")),
            *(verdict(*[cell(of, SDPA, 20.0)] * 2, "same", "A/A"), finished(of)),
        ]
        for of in CASES[:2]
    ]
    graph, eager = said(modes, CASES[:2], launches=["graph", "eager"])
    assert graph.startswith(
        "graph: fastest in 2 of 2 cases: vllm.amx; weighted by the suite 2.000x torch.sdpa"
    )
    assert eager.startswith("eager: fastest in 2 of 2 cases: torch.sdpa")


@pytest.mark.parametrize(("rows", "expected"), [
    (measured(FIRST), []),
    ([*measured(FIRST), ranked(replace(CASES[0], boundary="with_quant"), {SDPA: 100.0, AMX: 50.0})],
     ["core: fastest: vllm.amx 100.0 us, 1.500x vLLM's default vllm.vec (1.480 to 1.520), "
      "10 % of this machine's limit; 2 more not measured",
      "with_quant: fastest: vllm.amx 50.0 us, 2.000x torch.sdpa (1.980 to 2.020), "
      "20 % of this machine's limit"]),
])  # fmt: skip
def test_one_case_has_its_headline_alone(rows, expected):
    assert said(rows) == expected
