"""Which cases are measured and within which budget, with which baseline, and the ragged cases beside each."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.errors import UsageError
from harness.machine.monitor.base import Blind
from harness.plan.budget import allowance, parse_seconds
from harness.plan.entry import Entry
from harness.plan.select import choose_baseline, choose_cases, kept_sizes, ragged_cases
from harness.plan.settings import Setting
from harness.run.case import CaseMeasurer
from harness.run.cells import Group
from harness.run.checks import CaseChecks
from harness.run.device import OwnDevice
from harness.workers.process import WorkerFailure
from kernels.platform import Platform, named
from shapes.case import Case
from shapes.suites import suite

CPU = Platform("cpu", "x86-avx2", "cpu", "a CPU")
MLA = kernels.OPS["mla_decode"]

FNUZ = {"fp8": "e4m3fnuz", "scales": "ue8m0"}
OTHERS = {
    "block_scale_gemm": {"m": 64, "n": 256, "k": 512, **FNUZ},
    "fused_moe": {"tokens": 64, **FNUZ},
    "mha_prefill": {"batch": 1, "new": 64, "heads": 32, "dtype": "fp8", "fp8": "e4m3fnuz"},
    "mla_decode": {"batch": 1, "ctx": 64, "heads": 32, "page": 1, "kv": "fp8", "fp8": "e4m3fnuz"},
}
"""Cases with unusual formats, heads and pages: their ragged cases have the same ones."""


def test_ragged_cases_are_as_committed_and_keep_the_formats_of_the_timed_case(snapshot):
    """Lengths of 1, of whole pages and of neither, experts without rows, odd rows around a tile."""
    lines = []
    for op, other in OTHERS.items():
        of = kernels.OPS[op]
        for name in ("r1-tp8", "r1-dp-ep8", "other formats"):
            given = [other] if name == "other formats" else [case.sizes for case in suite(name).cases(op)]
            texts = {}
            for case in (of.case(sizes, boundary=of.boundaries[-1]) for sizes in given):
                ragged = ragged_cases(of, case, CPU.arch)
                assert all(kept_sizes(each) == kept_sizes(case) for each in ragged)
                texts["\n".join(each.key for each in ragged)] = None
            lines += [f"=== {op}, {name}", *texts]
    snapshot(Path(__file__).parent / "snapshots" / "ragged.txt", "\n".join(lines) + "\n")
    first, *others = ragged
    assert ragged_cases(of, first, CPU.arch) == others, "the case itself is left out"


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("q", range(1, 9))
def test_sequences_end_where_a_page_ends_and_behind_it(page, q):
    """There several query tokens lie on both sides of a page's edge."""
    verifying = MLA.case({"batch": 4, "ctx": "3204..4002", "q": q, "page": page})
    lengths = [n for case in ragged_cases(MLA, verifying, CPU.arch) for n in MLA.sizes(case.sizes).lengths()]
    assert any(n % page == 1 for n in lengths) and min(lengths) == q
    assert page > 128 or any(n % page == 0 for n in lengths)


def count_ragged(measurer: CaseMeasurer, case: Case, *names: str) -> int:
    """The number of ragged cases at which torch.naive and the named implementations are checked."""
    impls = [i for i in kernels.implementations("mla_decode") if i.name in ("torch.naive", *names)]
    entries = [Entry(i.name, i, Setting(), "eager") for i in impls]
    return len(measurer._ragged_cases(Group(case, entries, None)))


def test_a_kind_is_checked_once_at_ragged_sizes():
    plan = SimpleNamespace(op=MLA, record=SimpleNamespace(race=None))
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), progress=None)
    bf16, long, fp8 = (MLA.case({"batch": 1, "ctx": 3} | more) for more in ({}, {"ctx": 4000}, {"kv": "fp8"}))
    assert count_ragged(measurer, bf16) > 1
    measurer.found_at_ragged[("torch.naive", "core", "heads=16", "page=64", "kv=bf16")] = ""
    assert (count_ragged(measurer, long), count_ragged(measurer, fp8) > 1) == (0, True)
    assert count_ragged(measurer, long, "torch.sdpa") > 1, "torch.sdpa was not checked"
    plan.record.race = "its configurations are checked at their own case"
    assert count_ragged(measurer, fp8) == 0


def test_each_setting_has_workers_of_its_own_and_is_compared_with_those_of_its_row():
    impls = kernels.implementations("mla_decode")[:2]
    settings = [Setting(), Setting({"A": "1"}), Setting(is_rerun=True)]
    record = SimpleNamespace(contrast="settings", baseline="torch.sdpa", threads=1)
    plan = SimpleNamespace(deadlines=None, record=record)
    made = [
        Entry(i.name, i, setting, how) for i in impls for setting in settings for how in ("graph", "eager")
    ]
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), None)
    shared = [{c.setting.name for c in worker.entries} for worker in measurer._workers(made, Path())]
    assert shared == [{setting.name} for setting in settings]
    rivals = [
        (i.name, [c for c in made if (c.impl, c.launch) == (i, how)])
        for i in impls
        for how in ("graph", "eager")
    ]
    case = MLA.case({"batch": 1, "ctx": 3})
    assert measurer._compared(case, made) == rivals
    assert measurer._compared(case, []) == [("torch.sdpa", [])], "no entry can run"


H200 = named("cuda", "sm_90")


def test_an_engine_as_the_baseline_stands_for_what_it_runs_in_each_case(monkeypatch):
    op = kernels.OPS["block_scale_gemm"]
    cases = [op.case({"m": m, "n": 2112, "k": 7168, "fp8": "e4m3fn"}) for m in (1, 64)]
    baseline, missing = choose_baseline(op, H200, "vllm", [], cases)
    assert (baseline, {i.name for i in missing}) == ("vllm", {"deepgemm@vllm", "flashinfer.sm90"})
    record = SimpleNamespace(contrast="implementations", baseline="vllm")
    plan = SimpleNamespace(record=record, settings=[Setting()])
    measurer = CaseMeasurer(plan, OwnDevice(H200, Blind("")), None)
    assert [measurer._compared(case, [])[0][0] for case in cases] == ["flashinfer.sm90", "deepgemm@vllm"]
    with pytest.raises(UsageError, match="unknown baseline 'vlm' of block_scale_gemm; did you mean vllm"):
        choose_baseline(op, H200, "vlm", [], cases)


@pytest.mark.parametrize(("engine", "sizes", "said"), [
    ("vllm", {"page": 8}, "--baseline vllm has no row at .* page=8 .*: pages are of 16 "),
    ("sglang", {}, "--baseline sglang has no row at .*: what it runs on x86-avx512 is not recorded"),
])  # fmt: skip
def test_a_baseline_that_cannot_run_is_refused_with_the_reason(engine, sizes, said):
    op = kernels.OPS["mla_decode"]
    here = replace(CPU, arch="x86-avx512")
    with pytest.raises(UsageError, match=said):
        choose_baseline(op, here, engine, [], [op.case({"batch": 1, "ctx": 9, **sizes})])


def test_later_cases_repeat_that_a_row_is_wrong_with_far_addresses():
    """Far addresses are checked once in a run. A library's row that is wrong there keeps its times."""
    impl = kernels.implementations("mla_decode")[0]
    plan = SimpleNamespace(op=MLA, record=SimpleNamespace(race=None))
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), progress=None)
    seen = []
    for more, told in (({}, {"far": False}), ({"ctx": 4000}, {}), ({"ctx": 5000}, None), ({"kv": "fp8"}, {})):
        entry = Entry(impl.name, impl, Setting(), "eager", check={} if told is None else {"ok": True} | told)
        case = MLA.case({"batch": 1, "ctx": 3} | more)
        measurer._remember(CaseChecks(case=case, workers=[], say=print), Group(case, [entry], None))
        seen.append(entry.check)
    assert seen == [{"ok": True, "far": False}, {"ok": True, "far": False}, {}, {"ok": True}]
    checks = CaseChecks(case=case, workers=[], say=print)
    checks.wrong_at_ragged[impl.name] = "at batch=3: zeros"
    measurer._remember(checks, Group(case, [entry], None))
    assert "at batch=3: zeros" in measurer.found_at_ragged.values(), "later cases get the reason"


def test_a_judge_that_fails_fails_the_entries_of_its_group(monkeypatch):
    def fails(*_: object) -> None:
        raise WorkerFailure("crashed", "gone")

    monkeypatch.setattr(CaseChecks, "before", fails)
    entry = Entry("a", kernels.implementations("mla_decode")[0], Setting(), "eager")
    plan = SimpleNamespace(record=SimpleNamespace(race="", seed=0, threads=1), deadlines=None)
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), SimpleNamespace(say=print))
    case = MLA.case({"batch": 1, "ctx": 3})
    measurer._measure_group(Group(case, [entry], None), 1.0, 1.0, Path())
    assert entry.status == "error"
    assert entry.reason == "the reference could not be computed or compared: gone"


def cases(*weights: float) -> list[Case]:
    return [MLA.case({"batch": i + 1, "ctx": 10}, weight=w) for i, w in enumerate(weights)]


def test_heaviest_case_first_and_equal_ones_in_suite_order():
    chosen = choose_cases(MLA, "r1-tp8", (), None)
    assert [case.sizes["batch"] for case in chosen[:3]] == [64, 128, 32]
    served = choose_cases(MLA, "serving-3200-800-c64", (), None)
    assert [c.weight for c in served] == sorted((c.weight for c in served), reverse=True)


def test_cases_that_are_the_same_measurement_are_merged():
    (case,) = choose_cases(MLA, None, ("batch=1,1 ctx=8", "batch=1 ctx=8 heads=16"), None)
    assert case.weight == pytest.approx(1)


@pytest.mark.parametrize(("budget", "weights", "reached", "share"), [
    *((budget, (0.5, 0.3, 0.2), reached, None) for budget, reached in ((5, 1), (29, 1), (31, 2))),
    *((budget, (0.5, 0.3, 0.2), 3, 0.5) for budget in (60, 600)),
    (45, (0.3, 0.2), 2, 0.6),  # weights need not add up to 1
])  # fmt: skip
def test_a_budget_reaches_as_many_cases_as_can_get_their_least_time(budget, weights, reached, share):
    allowed_s, count = allowance(budget, cases(*weights), min_s=15)
    assert count == reached and 0 < allowed_s <= budget
    assert share is None or allowed_s == pytest.approx(share * budget)


def test_seconds_are_read_and_mistakes_refused():
    read = [parse_seconds(text, "--budget") for text in ("60", "60s", "1.5m", "2h")]
    assert read == [60, 60, 90, 7200]
    for text in ("", "s", "inf"):  # others: transcripts of ../cli
        with pytest.raises(UsageError, match="--budget"):
            parse_seconds(text, "--budget")
