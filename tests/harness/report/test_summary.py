"""What is said of several cases: times of known totals, wins, ties, noise and gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from harness.report.rows import CaseResult
from harness.report.summary import summary
from harness.results.schema import Cell, Record, Samples, Verdict
from shapes.case import Case
from tests.support.written_runs import a_run, case, cell, finished, planned, ranked, verdict

AMX, VEC, SDPA, NAIVE = "vllm.amx", "vllm.vec", "torch.sdpa", "torch.naive"
WEIGHTS = (0.5, 0.3, 0.2)
CASES = [replace(case(4**i), place="deepseek-r1", weight=weight) for i, weight in enumerate(WEIGHTS)]


def summary_of(
    records: Sequence[Sequence[Record]], cases: Sequence[Case] = CASES, **run: object
) -> list[str]:
    planned_run = a_run([planned(of) for of in cases], **run)
    return summary([CaseResult.of(of) for of in records], planned_run)


def measured(*times: Mapping[str, float], word: str = "faster") -> list[list[Record]]:
    return [ranked(of, {SDPA: 400.0, **rows}, word) for of, rows in zip(CASES, times, strict=False)]


FIRST, SECOND, THIRD = {AMX: 100.0, VEC: 150.0}, {AMX: 100.0, VEC: 120.0}, {AMX: 100.0, VEC: 90.0}


def scattered(of: Case, impl: str, us: float) -> Cell:
    """Its blocks are 5 % above and below the time."""
    found = cell(of, impl, us, 5.0)
    found.samples.seconds = [us * (0.95 + 0.1 * (block % 2)) / 1e6 for block in found.samples.block]
    return found


def test_wins_are_counted_and_totals_are_weighted():
    """vllm.vec, what vLLM runs on such a CPU, takes 0.5 x 150 + 0.3 x 120 + 0.2 x 90 = 129."""
    assert summary_of(measured(FIRST, SECOND, THIRD)) == [
        "fastest in 2 of 3 cases: vllm.amx; in 1: vllm.vec; "
        "weighted by the suite vllm.amx takes the least time, 1.290x vLLM's default vllm.vec (1.289 to 1.291)"
    ]
    alike = [replace(of, weight=0.125) for of in CASES]
    everywhere = [ranked(of, {SDPA: 400.0, **FIRST}) for of in alike]
    assert summary_of(everywhere, alike) == [
        "fastest in 3 of 3 cases: vllm.amx; "
        "all cases together 1.500x vLLM's default vllm.vec (1.500 to 1.500)"
    ]


def test_the_row_with_most_wins_need_not_take_the_least_time():
    slow = {AMX: 900.0, VEC: 100.0}
    assert summary_of(measured(FIRST, SECOND, slow)) == [
        "fastest in 2 of 3 cases: vllm.amx; in 1: vllm.vec; "
        "weighted by the suite vllm.vec takes the least time, 1.985x vllm.amx (1.972 to 1.997); "
        "it is vLLM's default"
    ]


def test_the_least_time_is_claimed_only_where_the_intervals_prove_it():
    """Over all cases vllm.amx is faster than vllm.vec, but not known to be faster than x.near."""
    rows = []
    for of in CASES:
        *cells, done = ranked(of, {SDPA: 400.0, AMX: 100.0, VEC: 150.0}, "unclear")
        rows.append([scattered(of, "x.near", 100.5), *cells, done])
    assert summary_of(rows)[0].endswith(
        "; weighted by the suite vllm.amx, not clearly the fastest, "
        "1.500x vLLM's default vllm.vec (1.500 to 1.500)"
    )


def test_a_baseline_that_is_the_best_is_compared_with_the_second():
    rows = [ranked(of, {SDPA: 100.0, "x.a": 120.0, "x.b": 300.0}) for of in CASES]
    assert summary_of(rows) == [
        "fastest in 3 of 3 cases: torch.sdpa; weighted by the suite 1.200x x.a (1.200 to 1.200)"
    ]


def test_only_a_clear_verdict_is_a_win():
    unclear, same, faster = (
        measured(FIRST, FIRST, FIRST, word=word) for word in ("unclear", "same", "faster")
    )
    assert summary_of([unclear[0], same[1], faster[2]])[0].startswith(
        "fastest in 1 of 3 cases: vllm.amx; indistinguishable in 1; two are the same in 1; "
        "weighted by the suite vllm.amx 1.500x vLLM's default vllm.vec"
    )
    assert summary_of(unclear)[0].startswith(
        "no row is clearly the fastest in 3 cases; indistinguishable in 3; weighted by the suite "
        "vllm.amx takes the least time, 1.500x vLLM's default vllm.vec"
    )


def test_a_case_without_an_answer_is_not_called_indistinguishable():
    slower, apart = measured(FIRST, FIRST, word="slower")
    apart = [r for r in apart if not (isinstance(r, Verdict) and r.about == "runner-up")]
    (second,) = (r for r in apart if isinstance(r, Cell) and r.impl == VEC)
    second.samples.block = [block + 6 for block in second.samples.block]
    assert summary_of([slower, apart], CASES[:2])[0].startswith(
        "no row is clearly the fastest in 2 cases; the first is slower round by round in 1; "
        "not compared in 1; weighted by the suite vllm.amx, not clearly the fastest, "
    )


def disturbed(records: list[Record], factor: float) -> list[Record]:
    """The baseline took so many times as long when it was prepared again."""
    (pair,) = (r for r in records if isinstance(r, Verdict) and r.about == "A/A")
    slower = pair.samples.model_copy(update={"seconds": [factor * s for s in pair.samples.seconds]})
    again = pair.model_copy(update={"samples": slower, "noise": factor - 1})
    return [again if r is pair else r for r in records]


@pytest.mark.parametrize(
    ("factor", "near"), [(1.0, "; within 2 %: x.near"), (1.006, ""), (1.15, ""), (4.0, "")]
)
def test_rows_as_good_as_the_best_are_named_where_the_noise_allows_it(factor, near):
    """One takes 1.5 % longer, one 3 %, and one may take 1.5 % longer or less."""
    rows = []
    for of in CASES:
        *records, done = ranked(of, {SDPA: 200.0, AMX: 100.0, "x.near": 101.5, "x.far": 103.0})
        rows.append(disturbed([*records, scattered(of, "x.scattered", 101.5), done], factor))
    sentence = summary_of(rows)[0]
    assert sentence.partition("torch.sdpa")[2].partition(")")[2].removeprefix(", too noisy") == near


def test_the_noise_is_that_of_the_group_which_measured_both_rows():
    """Memory split each case: the second group, with the best row and vLLM's default, was disturbed."""
    rows = []
    for of in CASES:
        base, early = cell(of, SDPA, 400.0), cell(of, "x.early", 300.0)
        best, default = cell(of, "x.best", 100.0), cell(of, VEC, 110.0)
        quiet, noisy = (disturbed([verdict(base, base, "same", "A/A")], factor)[0] for factor in (1.0, 1.5))
        for late in (best, default, noisy):
            late.samples = late.samples.model_copy(update={"block": [6 + b for b in late.samples.block]})
        base.samples = Samples(
            block=quiet.samples.block + noisy.samples.block,
            round=2 * quiet.samples.round,
            seconds=2 * quiet.samples.seconds,
        )
        rows.append([base, early, best, default, quiet, noisy, finished(of)])
    assert summary_of(rows)[0].endswith(
        "indistinguishable from vLLM's default vllm.vec (1.100x to 1.100x), too noisy"
    )


def test_a_case_without_a_baseline_is_not_free_of_noise():
    rows = measured(FIRST, FIRST)
    rows[0] = [r for r in rows[0] if not isinstance(r, Verdict)]
    assert "vllm.amx indistinguishable from vLLM's default" in summary_of(rows, CASES[:2])[0]


def test_what_is_missing_is_counted():
    """A case without a time, one with a single row, one that the default lacks, one that was not reached."""
    cases = [*CASES, case(100), case(101)]
    none = [cell(cases[3], AMX, None), finished(cases[3])]
    alone = [cell(CASES[2], AMX, 100.0, 1.0), verdict(*[cell(CASES[2], AMX, 100.0)] * 2, "same", "A/A")]
    rows = [*measured(FIRST, {AMX: 100.0}), [*alone, finished(CASES[2])], none]
    assert summary_of(rows, cases) == [
        "fastest in 2 of 4 cases: vllm.amx; one row alone in 1; no row has a time in 1; "
        "weighted by the suite (3 of 4 cases, 67 % of their weight) "
        "vllm.amx 1.500x vLLM's default vllm.vec (1.500 to 1.500) in 1 of 3; 1 more not measured"
    ]


@pytest.mark.parametrize(("weight", "expected"), [
    (0.99, "the same as vLLM's default vllm.vec (1.100x to 1.100x)"),
    (0.01, "1.100x vLLM's default vllm.vec (1.100 to 1.100)"),
])  # fmt: skip
def test_noise_counts_as_much_as_its_case(weight, expected):
    """Of two cases the baseline took 1.2 times as long in the first, when it was prepared again."""
    cases = [replace(of, weight=w) for of, w in zip(CASES, (weight, 1 - weight), strict=False)]
    rows = [ranked(of, {SDPA: 400.0, AMX: 100.0, VEC: 110.0}) for of in cases]
    rows[0] = disturbed(rows[0], 1.2)
    assert summary_of(rows, cases)[0].endswith(expected)


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
    assert summary_of(records, cases)[0] == (
        "fastest in 2 of 2 cases: torch.bf16; all cases together 3.000x vLLM's default flashinfer.sm90, "
        "deepgemm@vllm (2.994 to 3.006)"
    )


def test_a_race_has_no_summary():
    """Its rows are other configurations in each case."""
    assert summary_of(measured(FIRST, FIRST), race={"keep": 8, "folder": "."}) == []


def test_each_boundary_and_launch_mode_has_a_sentence():
    wide = [replace(of, boundary="with_quant") for of in CASES[:2]]
    boundaries = [*measured(FIRST, SECOND), *(ranked(of, {SDPA: 100.0, AMX: 50.0}) for of in wide)]
    assert [line.partition(";")[0] for line in summary_of(boundaries, [*CASES[:2], *wide])] == [
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
    graph, eager = summary_of(modes, CASES[:2], launches=["graph", "eager"])
    assert graph.startswith(
        "graph: fastest in 2 of 2 cases: vllm.amx; weighted by the suite 2.000x torch.sdpa"
    )
    assert eager.startswith("eager: fastest in 2 of 2 cases: torch.sdpa")


@pytest.mark.parametrize(("rows", "expected"), [
    (measured(FIRST),
     ["fastest: vllm.amx 100.0 us, 1.500x vLLM's default vllm.vec (1.480 to 1.520), "
      "10 % of this machine's limit; 2 more not measured"]),
    ([*measured(FIRST), ranked(replace(CASES[0], boundary="with_quant"), {SDPA: 100.0, AMX: 50.0})],
     ["core: fastest: vllm.amx 100.0 us, 1.500x vLLM's default vllm.vec (1.480 to 1.520), "
      "10 % of this machine's limit; 2 more not measured",
      "with_quant: fastest: vllm.amx 50.0 us, 2.000x torch.sdpa (1.980 to 2.020), "
      "20 % of this machine's limit"]),
])  # fmt: skip
def test_one_case_has_its_headline_alone(rows, expected):
    assert summary_of(rows) == expected
    assert summary_of(measured(FIRST), CASES[:1]) == [], "nothing more is to be said"
    wide = replace(CASES[1], boundary="with_quant")
    assert summary_of(measured(FIRST), [CASES[0], wide])[1:] == ["with_quant: 1 not measured"]
