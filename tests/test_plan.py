"""What is measured: cases by weight within the budget, copies for the cache, groups for the memory."""

import dataclasses

import pytest

import kernels
from harness import plan, session
from harness.errors import UsageError
from kernels.platform import Platform
from shapes.case import Case

OP = kernels.OPS["mla_decode"]
CPU = Platform("cpu", "x86-avx512", features=frozenset({"avx512f"}))


def cases(*weights: float) -> list[Case]:
    return [OP.case({"batch": i + 1, "ctx": 10}, weight=w) for i, w in enumerate(weights)]


def test_heaviest_case_first_and_equal_ones_in_suite_order():
    chosen = plan.choose_cases(OP, "r1-tp8", (), None)
    assert [case.sizes["batch"] for case in chosen[:3]] == [64, 128, 32]
    served = plan.choose_cases(OP, "serving-3200-800-c64", (), None)
    assert [c.weight for c in served] == sorted((c.weight for c in served), reverse=True)


def test_cases_that_are_the_same_measurement_are_merged():
    found = plan.choose_cases(OP, None, ("batch=1,1 ctx=8", "batch=1 ctx=8 heads=16"), None)
    assert len(found) == 1
    assert found[0].weight == pytest.approx(1)


@pytest.mark.parametrize(("budget", "reached"), [(5, 1), (29, 1), (31, 2), (60, 3), (600, 3)])
def test_a_budget_reaches_as_many_cases_as_get_the_least_time(budget, reached):
    share, count = plan.allowance(budget, cases(0.5, 0.3, 0.2), least_s=15)
    assert count == reached
    assert 0 < share <= budget
    if reached == 3:
        assert share == pytest.approx(0.5 * budget)


def test_what_one_case_leaves_goes_to_the_next():
    share, _ = plan.allowance(45, cases(0.3, 0.2), least_s=15)
    assert share == pytest.approx(45 * 0.6)


def test_streamed_operands_rotate_past_the_last_level_cache():
    sizes = OP.sizes({"batch": 8, "ctx": 1024})
    touched = OP.streamed_bytes(sizes)
    found = plan.rotation(OP, sizes, "serving", last_level=10 * touched)
    assert found.enough
    assert found.bytes >= plan.ROTATE_CACHES * 10 * touched + touched
    assert plan.rotation(OP, sizes, "serving", last_level=touched // 2).copies == 1
    assert plan.rotation(OP, sizes, "warm", last_level=touched).copies == 1
    assert not plan.rotation(OP, OP.sizes({"batch": 1, "ctx": 1}), "serving", last_level=1 << 30).enough


def make_session(monkeypatch, free: int) -> session.Session:
    monkeypatch.setattr(session, "available_memory", lambda: free)
    names = [f.name for f in dataclasses.fields(session.Session)]
    values = dict.fromkeys(names) | {
        "op": OP,
        "platform": CPU,
        "implementations": [i for i in kernels.implementations("mla_decode") if i.provider == "torch"],
        "baseline": "torch.sdpa",
        "arms": [plan.Arm()],
        "launches": ["eager"],
    }
    return session.Session(**values)


def groups(monkeypatch, free: int, **given):
    made = make_session(monkeypatch, free)
    case = OP.case({"batch": 64, "ctx": 4096} | given)
    contenders, refused = made._contenders(case)
    assert not refused
    sizes = OP.sizes(case.sizes)
    found, too_large = made._groups(sizes, plan.rotation(OP, sizes, "serving", 1 << 25), contenders)
    return [[c.name for c in group] for group in found], too_large


def test_contenders_share_one_group_where_memory_allows(monkeypatch):
    found, too_large = groups(monkeypatch, free=64 << 30)
    assert len(found) == 1
    assert sorted(found[0]) == ["torch.compile", "torch.naive", "torch.sdpa"]
    assert not too_large


def test_contenders_that_do_not_fit_together_each_meet_the_baseline(monkeypatch):
    found, too_large = groups(monkeypatch, free=5 << 30)
    assert len(found) == 2
    assert all("torch.sdpa" in group for group in found)
    assert not too_large


def test_who_does_not_fit_beside_the_baseline_stands_alone(monkeypatch):
    moe = kernels.OPS["fused_moe"]
    two = [i for i in kernels.implementations("fused_moe") if i.name in ("torch.bf16", "torch.compile")]
    case = moe.case({"tokens": 64})
    sizes = moe.sizes(case.sizes)
    pair = plan.judge_memory(moe, sizes, "cpu") + plan.memory_needed(moe, sizes, [two[0]] * 2, 1)
    given = {"op": moe, "implementations": two, "baseline": "torch.bf16"}
    made = make_session(monkeypatch, free=int(1.01 * pair / plan.MEMORY_SHARE))
    for name, value in given.items():
        setattr(made, name, value)
    found, too_large = made._groups(sizes, plan.rotation(moe, sizes, "warm", 0), made._contenders(case)[0])
    assert [[c.name for c in group] for group in found] == [["torch.bf16"], ["torch.compile"]]
    assert not too_large


def test_what_fits_with_nobody_is_said_and_not_run(monkeypatch):
    found, too_large = groups(monkeypatch, free=1 << 30)
    assert found == []
    assert {c.name for c in too_large} == {"torch.compile", "torch.naive", "torch.sdpa"}
    for contender in too_large:
        assert contender.status == "unsupported"
        assert "GiB" in contender.reason


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("60s", 60), ("1.5m", 90), ("2h", 7200)])
def test_seconds_are_read(text, seconds):
    assert plan.parse_seconds(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "-3", "0s", "soon", "s", "nan", "inf"])
def test_other_seconds_are_refused_in_one_line(text):
    with pytest.raises(UsageError, match="--budget"):
        plan.parse_seconds(text, "--budget")


def test_memory_counts_what_each_copy_is_prepared_with():
    naive = next(i for i in kernels.implementations("mla_decode") if i.name == "torch.naive")
    sizes = OP.sizes({"batch": 4, "ctx": 512})
    one, nine = (plan.memory_needed(OP, sizes, [naive], copies) for copies in (1, 9))
    assert nine - one == 8 * (OP.streamed_bytes(sizes) + OP.output_bytes(sizes) + naive.workspace(sizes))


def test_memory_counts_the_baseline_twice(monkeypatch):
    sizes = OP.sizes({"batch": 64, "ctx": 4096})
    sdpa = next(i for i in kernels.implementations("mla_decode") if i.name == "torch.sdpa")
    judge = plan.judge_memory(OP, sizes, "cpu")
    once = judge + plan.memory_needed(OP, sizes, [sdpa], 1)
    found, too_large = groups(monkeypatch, free=int(1.1 * once / plan.MEMORY_SHARE))
    assert not found
    assert "torch.sdpa" in {c.name for c in too_large}
