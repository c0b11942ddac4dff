"""What a person reads of a case: tables as committed in `snapshots/case-tables.txt`."""

from pathlib import Path

import pytest

from harness.report.case_table import case_table
from harness.report.notes import disturbance
from harness.report.terminal import WIDTH, plain_text
from harness.results.schema import CaseDone, Cell, DisturbedRound, Verdict
from tests.support.written_runs import a_cell

SNAPSHOT = Path(__file__).parent / "snapshots" / "case-tables.txt"
CASE = "mla_decode batch=1 ctx=64 core"
DONE = CaseDone(case=CASE, measured_s=1, setup_s=1, rounds=30, blocks=6, stopped="tight")


def cell(impl: str, **facts: object) -> Cell:
    return a_cell(impl=impl, **{"time_us": 1.0, "place": "ad hoc", **facts})


def timed(impl: str, us: float, half: float, **facts: object) -> Cell:
    return cell(impl, time_us=us, low_us=us - half, high_us=us + half, tflops=0.2401, gbps=8.012, **facts)


def untimed(impl: str, status: str, reason: str) -> Cell:
    return cell(impl, status=status, reason=reason, time_us=None)


def verdict(a: str, about: str, low: float | None, high: float | None, ratio: float = 1.0,
            word: str = "unclear", noise: float | None = 0.0) -> Verdict:  # fmt: skip
    return Verdict(
        case=CASE, a=a, b="torch.sdpa", ratio=ratio, low=low, high=high, noise=noise, verdict=word,
        confidence=0.95, about=about,
    )  # fmt: skip


def table(*records: Cell | Verdict | CaseDone, columns: int | None = None) -> str:
    done = () if any(isinstance(record, CaseDone) for record in records) else (DONE,)
    return plain_text(case_table([*records, *done]), columns)


RERUN = "torch.sdpa (again)"
TWO = (timed("vllm.amx", 33_400, 1_200, percent_of_ceiling=24.2), timed("torch.sdpa", 86_500, 2_400))
FASTER = verdict("vllm.amx", "baseline", 2.473, 2.681, 2.577, "faster")
CALM, WIDE, ENDLESS = (verdict(RERUN, "A/A", *ends) for ends in ((0.99, 1.01), (0.9, 1.4), (0.0, None)))
ROUNDS = [DisturbedRound(block=0, round=i, reason="a compiler ran", counted=True) for i in range(3)]
PHASES = {"reference": 5.0, "preparing": 15.0, "starting": 0.01}
SPENT = DONE.model_copy(update={"measured_s": 20.0, "setup_s": 20.0, "phases": PHASES, "disturbed": ROUNDS})
REFUSED = [
    untimed(name, "unsupported", f"needs {kind}; this is cpu x86")
    for name, kind in (("aiter.asm", "rocm"), ("aiter.ck", "rocm"), ("cudnn", "cuda"))
]
LONG = ["aiter.dispatch_preshuffled", "triton.split_kv splits=8 block_n=64 num_warps=4 stages=2"]

TABLES: dict[str, list[Cell | Verdict | CaseDone]] = {
    "the fastest is faster": [*TWO, verdict("vllm.amx", "runner-up", 1.854, 2.034, 1.942, "faster"), FASTER],
    "the same": [*TWO, verdict("vllm.amx", "runner-up", 0.9992, 1.003, 1.001, "same")],
    "indistinguishable from the second": [*TWO, verdict("vllm.amx", "runner-up", 0.98, 1.06, 1.02)],
    "too noisy": [*TWO, verdict("vllm.amx", "runner-up", 1.6, 2.6, 2.0, noise=None)],
    "too noisy for an interval": [*TWO, verdict("vllm.amx", "runner-up", 0.0, None, 1.02, noise=None)],
    "nothing to compare with": [timed("a", 5.0, 0.1, reason="disturbed")],
    "not compared": [*TWO],
    "nothing has a time": [
        *(untimed("a", "unsupported", "x"), untimed("b", "wrong", "y"), untimed("c", "wrong", "z")),
    ],
    "a calm pair": [*TWO, CALM],
    "a pair too far apart": [*TWO, WIDE],
    "an endless pair": [*TWO, ENDLESS],
    "a pair too far apart, and a verdict all the same": [*TWO, WIDE, FASTER],
    "what engines run by default": [
        *(facts.model_copy(update={"arch": "x86-avx512"}) for facts in TWO),
        timed("vllm.vec", 64_900, 600, arch="x86-avx512"),
        verdict("vllm.amx", "runner-up", 1.854, 2.034, 1.942, "faster").model_copy(update={"b": "vllm.vec"}),
    ],
    "engines' defaults in front and without a time": [
        *(
            timed("flash_attn.fa3@vllm", 33.0, 1.0, arch="sm_90"),
            timed("torch.sdpa", 86.0, 2.0, arch="sm_90"),
        ),
        untimed("flash_attn.fa3@sglang", "unsupported", "sgl_kernel is not installed"),
        verdict("flash_attn.fa3@vllm", "runner-up", 2.4, 2.6, 2.5, "faster"),
    ],
    "two groups": [*TWO, CALM, WIDE, verdict("of the other", "runner-up", 1.6, 2.6, 2.0, "faster")],
    "who cannot run, by reason": [*REFUSED, cell("torch.naive")],
    "failures first": [
        *(untimed("c", "unsupported", "needs rocm"), untimed("b", "checked", "interpreted")),
        untimed("a", "wrong", "after timing: 3 elements are off"),
    ],
    "remarks": [
        timed("a", 10.0, 1.0, reason="disturbed"),
        timed("b", 20.0, 1.0, reason="disturbed; after the suite's own quantise"),
    ],
    "disturbed rounds, and where the time went": [cell("torch.naive"), SPENT],
    "long configurations": [
        *(timed(name, 10_000, 100, percent_of_ceiling=3.0) for name in LONG),
        *(verdict(name, "baseline", 0.98, 1.02) for name in LONG),
    ],
    "a long name": [timed("a_library.with_a_name_as_long_as_" + "x" * 60, 10.0, 0.1, host_us=3.0)],
}


def test_tables_say_what_is_committed(snapshot):
    snapshot(SNAPSHOT, "\n".join(f"=== {name}\n{table(*records)}\n" for name, records in TABLES.items()))


def test_what_could_not_be_watched_is_said():
    """As in a container that may not see other processes; a clock alone disturbs nothing."""
    clock = {"sm_clock_mhz": "Not Supported"}
    blind = [{"not_read": clock}, {"not_read": clock | {"processes": "Not Supported"}}]
    shown = [table(*TWO, DONE.model_copy(update={"conditions": part})) for part in (blind[:1], blind)]
    assert ["not seen" in each for each in shown] == [False, True]
    assert "not seen  disturbances that would show in processes (Not Supported)" in shown[1]


def test_a_hot_gpu_is_to_cool():
    hot = [each.model_copy(update={"reason": "hardware thermal slowdown seen"}) for each in ROUNDS]
    assert disturbance([SPENT.model_copy(update={"disturbed": hot})]).endswith(
        "(hardware thermal slowdown seen): let it cool, or give a longer --budget"
    )


def test_the_long_name_of_a_race_s_baseline_widens_no_column():
    name = "triton.split_kv heads=16 tokens=64 swap=False reload=False per_unit=1 warps=4 stages=2"
    rows = [timed(name, 10.0, 0.1, host_us=3.0), timed(name.replace("64", "32"), 20.0, 0.1, host_us=3.0)]
    compared = [
        verdict(rows[1].impl, "baseline", 0.4, 0.6, 0.5, "slower"),
        verdict(f"{name} (again)", "A/A", 0.99, 1.01),
    ]
    shown = table(*rows, *(each.model_copy(update={"b": name}) for each in compared))
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "vs baseline" in shown


@pytest.mark.parametrize("columns", [60, 80, 100, 120, None])
def test_it_fits_a_terminal_and_names_what_has_no_room(snapshot, columns):
    long = "cutlass @ A=1"
    found = [CALM, *(verdict(name, "baseline", 2.473, 2.681, 2.577) for name in ("vllm.amx", long))]
    shown = table(*TWO, timed(long, 40_000, 1_000), *found, *REFUSED * 7, columns=columns)
    assert max(map(len, shown.splitlines())) <= (columns or WIDTH)
    snapshot(SNAPSHOT.parent / f"case-table-{columns or 'piped'}.txt", shown + "\n")
