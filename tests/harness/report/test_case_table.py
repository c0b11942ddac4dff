"""What a person reads of a case."""

from __future__ import annotations

import re

import pytest

from harness.report.case_notes import left_out, time_spent
from harness.report.case_table import case_table
from harness.report.terminal import WIDTH, plain
from harness.results.schema import CaseDone, Cell, DisturbedRound, Verdict
from shapes.case import Case

CASE = "mla_decode batch=1 ctx=64 core"
DISTURBED = "machine was disturbed"
DONE = CaseDone(case=CASE, measured_s=1, setup_s=1, rounds=30, blocks=6, stopped="tight")


def cell(impl: str, **facts: object) -> Cell:
    told = {"status": "ok", "time_us": 1.0, "place": "ad hoc"} | facts
    return Cell(
        op="mla_decode", case=CASE, boundary="core", impl=impl, platform="cpu", arch="x86", arm="plain",
        launch="eager", cache="warm", **told,
    )  # fmt: skip


def timed(impl: str, us: float, half: float, **facts: object) -> Cell:
    return cell(impl, time_us=us, low_us=us - half, high_us=us + half, tflops=0.2401, gbps=8.012, **facts)


def untimed(impl: str, status: str, reason: str) -> Cell:
    return cell(impl, status=status, reason=reason, time_us=None)


def verdict(
    a: str,
    b: str,
    about: str,
    low: float | None,
    high: float | None,
    floor: float | None = 0.0,
    ratio: float = 1.0,
    word: str = "unclear",
) -> Verdict:
    return Verdict(
        case=CASE, a=a, b=b, ratio=ratio, low=low, high=high, floor=floor, verdict=word, confidence=0.95,
        about=about,
    )  # fmt: skip


def table(*records: Cell | Verdict, columns: int | None = None) -> str:
    return plain(case_table([*records, DONE]), columns)


def headline(*records: Cell | Verdict) -> str:
    return " ".join(table(*records).split("\n\n")[0].splitlines()[2:])


TWO = (timed("vllm.amx", 33_400, 1_200, percent_of_ceiling=24.2), timed("torch.sdpa", 86_500, 2_400))


# Who is fastest


@pytest.mark.parametrize(
    ("word", "ratio", "ends", "floor", "wanted"),
    [
        ("faster", 1.942, (1.854, 2.034), 0.0, "1.94x torch.sdpa (1.85 to 2.03)"),
        ("same", 1.001, (0.9992, 1.003), 0.0, "the same as torch.sdpa (0.999x to 1.003x)"),
        ("unclear", 1.02, (0.98, 1.06), 0.0, "not told from torch.sdpa (0.98x to 1.06x)"),
        ("unclear", 2, (1.6, 2.6), None, "not told from torch.sdpa (1.6x to 2.6x), too noisy"),
        ("unclear", 1.02, (0.0, None), None, "not told from torch.sdpa, too noisy"),
    ],
)
def test_the_headline_says_no_more_than_the_verdict(word, ratio, ends, floor, wanted):
    found = verdict("vllm.amx", "torch.sdpa", "runner-up", *ends, floor, ratio, word)
    assert headline(*TWO, found) == f"fastest: vllm.amx 33.4 ms, {wanted}, 24 % of this machine's limit"


def test_where_there_is_nobody_to_compare_with_the_headline_says_so():
    assert headline(timed("a", 5.0, 0.1)) == "fastest: a 5.00 us, nothing to compare it with"
    assert headline(*TWO).startswith("fastest: vllm.amx 33.4 ms, not compared with the second, 24 %")


def test_without_a_time_the_headline_counts_why():
    rows = (untimed("a", "unsupported", "x"), untimed("b", "wrong", "y"), untimed("c", "wrong", "z"))
    assert headline(*rows) == "nothing has a time: 2 wrong, 1 unsupported"


# The ranking


def test_what_all_rows_have_alike_stands_above_them():
    lines = table(*TWO).splitlines()
    assert lines[:2] == [CASE, "ad hoc; cpu x86, cache warm"]
    assert re.split("  +", lines[4]) == ["implementation", "time, ms", "TFLOPS", "GB/s", "% of limit"]


def test_points_and_intervals_stand_below_each_other():
    rows = table(timed("a", 33_400, 1_200), timed("b", 109_300, 6_000), timed("c", 3_072, 21)).splitlines()
    times = [line[16:32] for line in rows[6:9]]
    assert times == ["  3.072 ± 0.021 ", " 33.4   ± 1.2   ", "109     ± 6     "]


def test_the_fastest_is_first_and_the_baseline_is_named():
    pair = verdict("torch.sdpa (again)", "torch.sdpa", "A/A", 0.99, 1.01)
    faster = verdict("vllm.amx", "torch.sdpa", "baseline", 2.473, 2.681, 0.0, 2.577, "faster")
    lines = table(TWO[1], TWO[0], pair, faster).splitlines()
    assert "vs torch.sdpa" in lines[4]
    assert re.split("  +", lines[6]) == [
        *("vllm.amx", "33.4 ± 1.2", "2.58x (2.47 to 2.68)", "faster", "0.240", "8.01", "24")
    ]
    assert re.split("  +", lines[7]) == ["torch.sdpa", "86.5 ± 2.4", "baseline", "0.240", "8.01"]


@pytest.mark.parametrize(
    ("columns", "missing"),
    [(60, "TFLOPS, GB/s, % of limit"), (80, "GB/s"), (100, ""), (120, ""), (None, "")],
)
def test_it_fits_a_terminal_and_names_what_has_no_room(columns, missing):
    long = "cutlass @ A=1"
    found = [verdict("torch.sdpa (again)", "torch.sdpa", "A/A", 0.99, 1.01)]
    found += [
        verdict(name, "torch.sdpa", "baseline", 2.473, 2.681, ratio=2.577) for name in ("vllm.amx", long)
    ]
    refused = [
        untimed(f"library.kernel_{i}", "unsupported", "needs rocm; this is cpu x86") for i in range(20)
    ]
    shown = table(*TWO, timed(long, 40_000, 1_000), *found, *refused, columns=columns)
    assert max(map(len, shown.splitlines())) <= (columns or WIDTH)
    assert (f"not shown for lack of width: {missing}\n" in shown) == bool(missing)
    header, row = (
        next(line for line in shown.splitlines() if line.startswith(name))
        for name in ("implementation", "vllm.amx ")
    )
    for name, value in (("TFLOPS", "0.240"), ("GB/s", "8.01"), ("% of limit", "24")):
        assert (name in header) == (value in row.split()) == (name not in missing)
    for text in ("33.4 ± 1.2", "2.58x (2.47 to 2.68)", "unclear"):
        assert text in row
    assert all(cell.impl in shown for cell in refused)


def test_a_configuration_is_broken_between_its_parts_and_a_name_nowhere():
    names = [
        "aiter.dispatch_preshuffled",
        "triton.split_kv splits=8 block_n=64 num_warps=4 stages=2",
    ]
    rows = [timed(name, 10_000, 100, percent_of_ceiling=3.0) for name in names]
    against = [verdict(name, "torch.sdpa", "baseline", 0.98, 1.02) for name in names]
    shown = table(*rows, *against)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert all(re.search(rf"(^|\s){re.escape(word)}\s", shown) for name in names for word in name.split())


def test_what_is_piped_loses_no_column():
    rows = [
        timed("a_library.with_a_name_as_long_as_" + "x" * 60, 10.0, 0.1, host_us=3.0, percent_of_ceiling=1.0)
    ]
    shown = table(*rows)
    assert "TFLOPS" in shown and "GB/s" in shown and "not shown" not in shown


# The notes


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.99, 1.01, 0), (0.9, 1.4, 1), (0.0, None, 1)], ids=["calm", "wide", "endless"]
)
def test_a_pair_too_far_apart_is_said_so_whoever_else_there_is(low, high, said):
    twin = verdict("torch.naive (again)", "torch.naive", "A/A", low, high)
    rows = (cell("torch.naive"), cell("torch.sdpa"))
    assert table(*rows, twin).count(DISTURBED) == said
    other = verdict("torch.sdpa", "torch.naive", "baseline", 0.9, 1.4, None if said else 0.0)
    assert table(*rows, twin, other).count(DISTURBED) == said


def test_each_group_has_a_pair_of_its_own():
    calm = verdict("torch.naive (again)", "torch.naive", "A/A", 0.99, 1.01)
    wide = verdict("torch.naive (again)", "torch.naive", "A/A", 0.5, 1.4)
    shown = table(cell("torch.naive"), calm, wide)
    assert shown.count(DISTURBED) == 1
    assert "measured in 2: memory does not hold all at once" in shown


def test_who_cannot_run_is_named_once_by_reason():
    refused = [
        untimed(name, "unsupported", f"needs {kind}; this is cpu x86")
        for name, kind in (("aiter.asm", "rocm"), ("aiter.ck", "rocm"), ("cudnn", "cuda"))
    ]
    lines = [line.strip() for line in table(*refused, cell("torch.naive")).splitlines()]
    assert "unsupported  needs rocm (2): aiter.asm, aiter.ck" in lines
    assert "needs cuda: cudnn" in lines
    assert sum("aiter" in line for line in lines) == 1
    assert "needs rocm (2): aiter.asm, aiter.ck" in table(*refused)


def test_failures_come_first_with_their_reasons():
    rows = (untimed("c", "unsupported", "needs rocm"), untimed("b", "checked", "interpreted"),
            untimed("a", "wrong", "after timing: 3 elements are off"))  # fmt: skip
    shown = [line.split(maxsplit=1) for line in table(*rows).splitlines()[4:7]]
    assert shown == [
        ["wrong", "a: after timing: 3 elements are off"],
        ["checked", "b: interpreted"],
        ["unsupported", "needs rocm: c"],
    ]


def test_a_remark_is_made_once_and_of_all_rows_as_such():
    rows = [timed(name, us, 1.0, reason=reason) for name, us, reason in
            (("a", 10.0, "disturbed"), ("b", 20.0, "disturbed; after the suite's own quantise"))]  # fmt: skip
    shown = table(*rows)
    assert "all rows: disturbed" in shown
    assert "b: after the suite's own quantise" in shown
    assert shown.count("disturbed") == 1


def test_disturbed_rounds_are_counted_with_an_example():
    rounds = [DisturbedRound(block=0, round=i, reason="a compiler ran", counted=True) for i in range(3)]
    done = DONE.model_copy(update={"disturbed": rounds})
    shown = plain(case_table([cell("torch.naive"), done]))
    assert "3 of 30 rounds, counted all the same; e.g. a compiler ran" in shown


def test_where_the_time_went_is_said_the_longest_first():
    assert time_spent(20.0, 20.0, {}) == "measuring 20.0 s of 40.0 s (50 %); set-up and checks 20.0 s"
    phases = {"reference": 5.0, "preparing": 15.0, "starting": 0.01}
    wanted = "measuring 20.0 s of 40.0 s (50 %); preparing 15.0 s, reference 5.0 s"
    assert time_spent(20.0, 20.0, phases) == wanted
    done = DONE.model_copy(update={"measured_s": 20.0, "setup_s": 20.0, "phases": phases})
    assert wanted in plain(case_table([cell("a"), done]))


# What the budget did not reach


def test_what_is_left_out_is_a_part_of_its_own_boundary():
    def cases(boundary: str, count: int) -> list[Case]:
        return [Case("mla_decode", {"batch": i}, boundary, weight=0.05) for i in range(count)]

    measured = [cell("torch.naive", weight=0.4), cell("torch.sdpa", weight=0.4)]
    assert left_out([], measured, 60) == ""
    assert left_out([*cases("core", 12), *cases("with_quant", 20)], measured, 60) == (
        "left out, the budget of 60 s being spent: 12 cases of core (60 % of its weight), "
        "20 cases of with_quant (100 % of its weight)"
    )
