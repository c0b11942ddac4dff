"""A run, its cases and their checks, with workers and judges that are stand-ins."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest

import kernels
from harness.catalogue.devices import Ceilings
from harness.errors import FAILED, NOTHING_RAN, OK
from harness.files import JournalFull
from harness.machine.monitor.base import Blind
from harness.plan.entry import Entry, entry_of
from harness.plan.memory import Rotation
from harness.plan.settings import Setting
from harness.progress import Progress
from harness.results.schema import RaceSettings, Status
from harness.run.case import CaseMeasurer, opening_s
from harness.run.cells import Group
from harness.run.checks import NO_KERNELS, CaseChecks, comparing_s, seeds_of
from harness.run.device import DeviceFacts, OwnDevice
from harness.run.execute import Outcome, RunCases, code_of, exit_code, finish, measure
from harness.run.folder import begin, finished_cases, plan_run, planned_case, record_of
from harness.run.plan import Request, RunPlan, case_of
from harness.timing.rounds import Policy, Rounds, Sampler
from harness.workers.process import WorkerFailure
from kernels.operands import Seeds
from kernels.platform import Platform, named
from kernels.tuning import StoredError
from kernels.vendor import Vendor
from shapes.case import Case
from tests.support.simulated_pool import PROVENANCE
from tests.support.written_runs import a_cell, a_run, finished

MLA, MOE = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 3}), {"tokens": 3}
OUTPUT = {"output": b"", "shape": (), "dtype": "bfloat16"}


def checks_of(case: Case = MLA, judge: Any = None, say: Any = print, workers: Any = (), seed=0) -> CaseChecks:
    """The checks of a case, with stand-ins for workers and judge."""
    checks = CaseChecks(case=case, workers=workers, say=say, seed=seed)
    checks.judge = judge
    return checks


def answering(answer: Any) -> Mock:
    """A worker or a judge that gives this answer to every request."""
    return Mock(ask=lambda *_, **__: answer)


def entry(op: str = "mla_decode", **facts: Any) -> Entry:
    impl = kernels.implementations(op)[0]
    return Entry(impl.name, impl, Setting(), "eager", **facts)


def test_a_new_run_s_record_is_as_committed(tmp_path, snapshot):
    """Of a race, with a budget, with neither, and of cases on the command line."""
    cpu, lines = named("cpu"), []
    facts = DeviceFacts(cpu, PROVENANCE, Ceilings({"bf16": 1e9}, read=1e8))
    race, written = RaceSettings(keep=3, folder=""), ("batch=1 ctx=5",)
    for budget, eliminations, case in (
        (None, race, ()),
        ("5m", None, ()),
        (None, None, ()),
        (None, None, written),
    ):
        out = str(tmp_path / str(len(lines)))
        asked_for = {"op": "mla_decode", "impl": "torch.sdpa", "per_case": "7s"}
        request = Request(**asked_for, case=case, budget=budget, out=out)
        planned = plan_run(request, cpu)
        if eliminations:
            cases = [case_of(each) for each in planned.cases]
            names = planned.implementations
            planned = record_of(request, cpu, planned.suite, cases, names, names[0], eliminations)
        _, plan = begin(planned, request, facts, print)
        lines.append(plan.record.model_dump_json(exclude={"created", "command", "provenance"}))
    snapshot(Path(__file__).parent / "snapshots" / "run.jsonl", "\n".join(lines) + "\n")


@pytest.mark.parametrize("by_set", [False, True])
def test_a_folder_without_configurations_gets_a_line(by_set, monkeypatch, tmp_path):
    """A missing folder ends the run. AITER's files of configurations do not count."""
    cpu, own = named("cpu"), tmp_path / "own"
    options = {"op": "mla_decode", "impl": "torch.sdpa", "case": ("batch=1 ctx=5",)}
    if by_set:
        options["set"] = (f"KERNEL_BENCH_TUNED={own}",)
    else:
        monkeypatch.setenv("KERNEL_BENCH_TUNED", str(own))

    def notes(run: str) -> list[str]:
        lines: list[str] = []
        request = Request(**options, out=str(tmp_path / run))
        facts = DeviceFacts(cpu, PROVENANCE, Ceilings({"bf16": 1e9}, read=1e8))
        begin(plan_run(request, cpu), request, facts, lines.append)
        return lines

    with pytest.raises(StoredError, match=f"KERNEL_BENCH_TUNED names {own}, which is not a folder"):
        notes("missing")
    for name in ("gemm/gfx950-GEMM-A8W8.json", "triton.split_kv.json"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("{}")
        note = f"KERNEL_BENCH_TUNED names {own}, which holds no <device>/<implementation>.json of this suite"
        assert notes(name[:6]) == [f"note: {note}"]
    (own / "gemm" / "triton.split_kv.json").write_text("{}")
    assert notes("right") == []


def test_the_exit_code_counts_all_cells_that_could_run():
    codes = dict.fromkeys(get_args(Status), FAILED) | {"ok": OK, "checked": OK, "unsupported": NOTHING_RAN}
    for status, code in codes.items():
        assert exit_code([a_cell(status=status)]) == code_of({status}) == code
        assert exit_code([a_cell(status="ok"), a_cell(status=status)]) == (FAILED if code == FAILED else OK)
    assert exit_code([]) == NOTHING_RAN


def test_where_none_of_the_named_rows_can_run_nothing_ran(tmp_path):
    """The baseline, which is measured in any case, does not count."""
    cells = [a_cell(impl="torch.sdpa"), a_cell(impl="flashmla", status="unsupported", time_us=None)]
    ended = Outcome(cells, 1, [], 0.0, 60.0, tmp_path)
    for patterns, code in ((None, OK), ("flashmla", NOTHING_RAN), ("flashmla,torch.*", OK)):
        request = Request(op="mla_decode", impl=patterns)
        assert finish(request, a_run(), ended, SimpleNamespace(end=lambda *_: None)) == code


def test_a_revision_in_which_a_row_lost_its_time_has_regressed(tmp_path):
    a, b = (a_cell(setting=name, time_us=1.0) for name in "AB")
    gone = a_cell(setting="B", status="unsupported")
    run = a_run(settings={"A": {}, "B": {}}, trees={"A": "a", "B": "b"})
    for cells, code in (([a, gone], FAILED), ([a, b], OK), ([gone], NOTHING_RAN)):
        ended = Outcome(cells, 1, [], 0.0, 60.0, tmp_path)
        assert finish(Request(), run, ended, SimpleNamespace(end=lambda *_: None)) == code


def test_kernels_of_older_commits_get_operands_that_they_can_make():
    trees = [
        SimpleNamespace(entries=[SimpleNamespace(setting=Setting(tree=tree))]) for tree in (None, "older")
    ]
    seeds = {"first": seeds_of(Seeds(3, 3)), "live": seeds_of(Seeds(3, 4)), "other": seeds_of(Seeds(4, 4))}
    assert checks_of(workers=trees, seed=3).seeds == seeds
    seeds["other"] = seeds_of(Seeds(4, 4, adversarial=True))
    gemm = kernels.OPS["block_scale_gemm"].case({"m": 1, "n": 128, "k": 128})
    assert checks_of(gemm, workers=trees[:1], seed=3).seeds == seeds
    seeds["lengths"] = seeds_of(Seeds(5, 5, lengths=3))
    assert checks_of(workers=trees[:1], seed=3).seeds == seeds


@pytest.mark.parametrize(
    ("budget_s", "spent_s", "share_s", "begun"),
    [(10.0, 1.3, 4.35, 2), (10.0, 1.5, 4.25, 1), (3.0, 0.0, 3.0, 1)],
)
def test_a_case_is_begun_where_most_of_its_least_time_is_left(budget_s, spent_s, share_s, begun, monkeypatch):
    """Seconds that were spent before the run was resumed count."""
    cases = [kernels.OPS["mla_decode"].case({"batch": 1, "ctx": ctx}, weight=0.5) for ctx in (4, 5)]
    made = {case.key: [finished(case, measured_s=5.0)] for case in cases}
    measurer = Mock(side_effect=made.values())
    monkeypatch.setattr(CaseMeasurer, "measure", measurer)
    record = SimpleNamespace(cases=[planned_case(case) for case in cases])
    before = {"before": [a_cell(), finished(MLA, measured_s=spent_s)]}
    plan = SimpleNamespace(budget_s=budget_s, per_case_s=4.0, record=record, retry=False)
    journal, shown = Mock(finished=lambda: dict(before)), Mock()
    outcome = measure(RunCases(plan, journal, shown), None, Mock())
    assert measurer.call_args_list[0].args[:3] == (cases[0], share_s, budget_s - spent_s)
    assert (outcome.left_out, outcome.cases) == (cases[begun:], 1 + begun)
    assert [call.args for call in shown.call_args_list] == [(case, made[case.key]) for case in cases[:begun]]
    assert outcome.records == [*before["before"], *(made[case.key][0] for case in cases[:begun])]


def test_a_run_that_goes_on_keeps_its_rule_for_disturbed_rounds():
    assert RunPlan.of(a_run(disturbed="keep"), Request()).disturbed == "keep"


def test_records_that_the_disk_has_no_room_for_are_printed_and_shown(capsys, monkeypatch):
    full, shown = Mock(append=Mock(side_effect=JournalFull("no room")), finished=dict), Mock()
    records = [a_cell(), finished(MLA)]
    monkeypatch.setattr(CaseMeasurer, "measure", lambda *_: records)
    record = SimpleNamespace(cases=[planned_case(MLA)])
    plan = SimpleNamespace(budget_s=1.0, per_case_s=1.0, record=record, retry=False)
    with pytest.raises(JournalFull):
        measure(RunCases(plan, full, shown), None, Mock())
    shown.assert_called_once_with(MLA, records)
    assert capsys.readouterr().err == "".join(f"{record.model_dump_json()}\n" for record in records)


@pytest.mark.parametrize(("how", "status"), [("error", None), ("crashed", "crashed"), ("timeout", "timeout")])
def test_a_profiler_that_does_not_work_costs_no_time(how, status):
    def refuses(*_: object) -> None:
        raise WorkerFailure(how, "CUPTI is not permitted")

    said: list[str] = []
    row = entry()
    checks_of(say=said.append)._profile(SimpleNamespace(ask=refuses), row)
    assert row.status == status
    assert said == [f"{row.name} could not be profiled: CUPTI is not permitted"]


def test_a_line_says_that_the_profiler_saw_nothing_on_a_gpu(monkeypatch):
    row = entry()
    said: list[str] = []
    worker = answering({"kernels": [], "picked": [], "ran": []})
    worker.platform = Platform("cuda", "sm_90", "cuda:0")
    worker.living = worker.entries = (row,)
    worker.request = lambda request: None
    for check in ("_check_timed", "_check_again"):
        monkeypatch.setattr(CaseChecks, check, lambda *_: None)
    checks_of(say=said.append, workers=[worker]).after(Rotation("warm", 1, 0, 0, False))
    assert f"{NO_KERNELS}: {row.name}" in said


@pytest.mark.parametrize(("facts", "reason"), [
    ({}, ""),
    ({"digest": 8}, "then: it changed its operands"),
    ({"late": True}, "then: its output changed after its call had returned"),
    ({"guards": False}, "then: it wrote beside its output"),
])  # fmt: skip
def test_an_output_may_be_wrong_whatever_its_values_are(facts, reason):
    row, given = entry(), {"seconds": 0.1, "digest": 7, "late": False, "guards": True}
    output = checks_of()._output(answering(given | facts), row, 7, stage="then: ")
    assert output == given | facts
    assert (row.status, row.reason) == (("wrong", reason) if reason else (None, ""))


def test_an_output_of_any_set_is_compared_with_the_reference_of_that_set():
    """Calls whose sums have no fixed order may differ on any set."""
    asked: list[dict[str, Any]] = []
    judge = SimpleNamespace(ask=lambda *_, **given: asked.append(given) or 0)
    run = checks_of(kernels.OPS["fused_moe"].case(MOE), judge)
    names = [run._reference_to_set(which, 5) for which in (0, 4, 2, 2)]
    assert names == ["first", "last", "set 2", "set 2"]
    assert [(each["name"], each["seeds"]) for each in asked] == [("set 2 core", {"turn": 2})]


@pytest.mark.parametrize(("facts", "reason"), [
    ({"stale": True, "outputs": []}, "its calls gave an old answer to new activations"),
    ({"guards": False, "outputs": []}, "it wrote beside its output"),
    # Wrong on the first set, it is not judged on set 2: no reference is computed in its boundary any more.
    ({}, "zeros"),
])  # fmt: skip
def test_a_row_whose_timed_calls_left_a_wrong_output_is_not_judged_again(facts, reason):
    impl = next(i for i in kernels.implementations("fused_moe") if i.native("with_quant") == "core")
    row = Entry(impl.name, impl, Setting(), "eager")
    computed = {"first with_quant", "first core", "last with_quant", "last core"}

    def judged(request: str, deadline: float, *, name: str, **given: object) -> object:
        if request == "reference":
            computed.add(name)
            return 0
        if name not in computed:
            raise WorkerFailure("error", f"KeyError: {name}")
        return {"ok": False, "reason": "zeros"}

    seen = {"calls": 20, "differed": 1, "distance": 1.0, "stale": False, "guards": True}
    worker = answering(seen | {"outputs": [OUTPUT | {"set": which} for which in (0, 2)]} | facts)
    worker.entries, worker.living, worker.request = (row,), (row,), lambda request: 0
    case = kernels.OPS["fused_moe"].case(MOE, boundary="with_quant")
    run = checks_of(case, SimpleNamespace(ask=judged), workers=[worker])
    run.digests["first"] = 0
    run._check_timed(worker, 5)
    assert (row.status, row.reason) == ("wrong", f"after timing: {reason}")


@pytest.mark.parametrize(
    ("samples_s", "spent_s"), [(0.0, 1.0), (1.0, 0.5), (3.0, 1.0), (40.0, 10.0), (400.0, 30.0)]
)
def test_comparing_takes_a_share_of_the_time_of_the_samples(samples_s, spent_s):
    assert comparing_s(samples_s) == spent_s


@pytest.mark.parametrize(("unread", "reason"), [
    (["kv"], "its output did not change with kv, written in place: its calls do not read what is there"),
    ([], ""),
])  # fmt: skip
def test_an_operand_that_calls_do_not_read(unread, reason):
    row = entry()
    checks_of()._check_reading(answering(unread), row)
    assert (row.status, row.reason) == (("wrong", reason) if reason else (None, ""))


@pytest.mark.parametrize("is_library", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_addresses_of_more_than_32_bits_cost_only_the_suites_rows_their_time(is_library, ok):
    impl = next(i for i in kernels.implementations("mla_decode") if isinstance(i, Vendor) is is_library)
    row = Entry(impl.name, impl, Setting(), "eager")
    run = checks_of(judge=answering({"ok": ok, "reason": "zeros"}))
    run._check_far(answering(OUTPUT), row, "ragged-0", "at its sizes: ")
    assert row.check == {"far": ok}
    assert row.status == (None if ok or is_library else "wrong")


SIZES = {
    "block_scale_gemm": {"m": 3, "n": 128, "k": 128},
    "fused_moe": MOE,
    "mha_prefill": {"batch": 1, "new": 3},
    "mla_decode": {"batch": 1, "ctx": 3},
}


@pytest.mark.parametrize("op", SIZES)
def test_what_is_compiled_for_each_size_is_not_checked_at_another(op):
    """But a plug-in is. A worker with an older tree is not asked for far addresses."""
    rows = {i.name: Entry(i.name, i, Setting(), "eager") for i in kernels.implementations(op)}
    own = rows["torch.compile"]
    brought = Entry("mine", copy.copy(own.impl), Setting(tree="older"), "eager")
    brought.impl.plugin = "mine.py"
    asked: list[tuple[str, str]] = []
    worker, answer = Mock(platform=Platform("cpu", "x86-avx2", "cpu", "a CPU")), {"ok": True}
    worker.living = worker.entries = [own, rows["torch.naive"], brought]
    given = OUTPUT | {"seconds": 0.1, "digest": answer, "late": False, "guards": True}
    worker.open.return_value = answer
    worker.ask = lambda row, request: asked.append((row.name, request)) or given
    run = checks_of(kernels.OPS[op].case(SIZES[op]), answering(answer), workers=[worker])
    run._reference(run.case, "ragged-0", run.seeds["first"])
    run._check_ragged(worker, run.case, "ragged-0")
    assert [call.args[0].name for call in worker.prepare.call_args_list] == ["torch.naive", "mine"]
    assert asked == [("torch.naive", "output"), ("torch.naive", "far"), ("mine", "output")]


@pytest.mark.parametrize(
    ("op", "copies", "sets"),
    [("mla_decode", 2, [1, 0, 1, 0]), ("mla_decode", 1, [0, 0, 0]), ("fused_moe", 2, [0, 0])],
)
def test_other_operands_are_put_on_a_second_set_where_sets_are_copies(monkeypatch, op, copies, sets):
    """A row that always reads the first set is wrong there."""
    row, checked = entry(op), []
    monkeypatch.setattr(CaseChecks, "_output", lambda *_, set_index=0, **__: checked.append(set_index))
    monkeypatch.setattr(CaseChecks, "_compare_operands", lambda *_: None)
    worker = Mock(living=[row], entries=[row])
    run = checks_of(kernels.OPS[op].case(SIZES[op]), workers=[worker])
    run.digests = dict.fromkeys(run.seeds, 0)
    run._check_again(copies)
    assert checked == sets
    assert len(worker.open.call_args_list[0].args) == (3 if 1 in sets else 2), "a case and seeds"


def test_a_wrong_output_whose_tensor_was_returned_says_so():
    row, run = entry(), checks_of(judge=answering({"ok": False, "reason": "all NaN"}))
    run._judge(row, "first", OUTPUT | {"ignored": True}, "then: ")
    assert row.reason.startswith("then: all NaN; its call() returns a tensor, which is not read")


def test_errors_of_few_rows_do_not_replace_those_of_all_rows():
    row, run = entry(check={"ok": True}), checks_of(judge=answering({"ok": True, "row_error": 0.1}))
    run._judge(row, "live", OUTPUT)
    assert row.check == {"ok": True}
    run._judge(row, "other", OUTPUT)
    assert row.check == {"ok": True, "row_error": 0.1}


def test_a_retry_measures_cases_again_that_broke_but_not_those_that_are_wrong():
    journal = SimpleNamespace(finished=lambda: {s: [a_cell(status=s)] for s in get_args(Status)})
    again = finished_cases(journal, False).keys() - finished_cases(journal, True).keys()
    assert again == {"crashed", "timeout", "error"}


@pytest.mark.parametrize(("call_s", "opening"), [(0.01, 0.864), (0.1, 2.88), (1.0, 14.4)])
def test_a_budget_covers_the_opening_blocks(call_s, opening):
    """In each of six blocks a sample of at least 0.05 s and, of short calls, an untimed call; all that for
    each of the A/A pair, and a fifth more."""
    assert opening_s([call_s] * 2) == pytest.approx(opening)


@pytest.mark.parametrize(("baseline", "wanted"), [(1, 1), (None, 0)])
def test_rounds_compare_with_the_run_s_baseline_and_time_it_twice(baseline, wanted):
    """The first entry is the baseline where the run's is not among the entries."""
    rows = [
        replace(entry(call_s=0.001), impl=impl, name=impl.name)
        for impl in kernels.implementations("mla_decode")[:2]
    ]
    name = "" if baseline is None else rows[baseline].name
    asked: list[tuple[list[str], str, str]] = []
    given_s: list[float] = []

    def make_rounds(samples: dict[str, Sampler], policy: Policy) -> Rounds:
        asked.append(([*samples], policy.baseline, policy.rerun))
        given_s.append(policy.budget_s)
        return Rounds()

    worker = answering(None)
    worker.living = worker.entries = rows
    record = SimpleNamespace(margin=0.01, seed=0, race=None, baseline=name)
    plan = SimpleNamespace(disturbed="prefer", record=record, make_rounds=make_rounds)
    measurer = CaseMeasurer(plan, OwnDevice(named("cpu"), Blind("a test")), Progress(quiet=True))
    group = Group(MLA, rows, Rotation("warm", 1, 0, 0, False), baseline_impl=name)
    checks = checks_of(workers=[worker])
    for budget_s, max_s in ((5.0, 9.0), (0.1, 9.0), (0.1, 1.0)):  # stretched for the opening blocks
        measurer._time(checks, group, budget_s, max_s)
    again = f"{rows[wanted].name} (again)"
    assert asked == [([rows[0].name, rows[1].name, again], rows[wanted].name, again)] * 3
    assert given_s == [5.0, pytest.approx(1.1016), 1.0]


@pytest.mark.parametrize(("captures", "launch"), [(True, "graph"), (False, "eager")])
def test_what_cannot_be_captured_is_launched_eagerly(captures, launch):
    impl = copy.copy(kernels.implementations("mla_decode")[0])
    impl.captures = captures
    made = entry_of(impl, MLA, named("cuda"), "graph", Setting())
    assert (made.launch, made.name.endswith(" eager")) == (launch, not captures)
