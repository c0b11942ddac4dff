"""What a person reads of a case."""

from __future__ import annotations

import pytest

from harness.report.case_table import NAMED, case_table, left_out
from harness.results.schema import CaseDone, Cell, Verdict
from shapes.case import Case

CASE = "mla_decode batch=1 ctx=64 core"
DISTURBED = "too much for a verdict"


def cell(impl: str) -> Cell:
    return Cell(
        op="mla_decode", case=CASE, boundary="core", impl=impl, platform="cpu", arch="x86", arm="plain",
        launch="eager", cache="warm", status="ok", time_us=1.0, place="ad hoc",
    )  # fmt: skip


def verdict(
    a: str, b: str, about: str, low: float | None, high: float | None, floor: float | None
) -> Verdict:
    return Verdict(
        case=CASE, a=a, b=b, ratio=1.0, low=low, high=high, floor=floor, verdict="unclear", confidence=0.95,
        about=about,
    )  # fmt: skip


def table(*verdicts: Verdict) -> str:
    done = CaseDone(case=CASE, measured_s=1, setup_s=1, rounds=30, blocks=6, stopped="tight")
    return case_table([cell("torch.naive"), cell("torch.sdpa"), *verdicts, done])


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.99, 1.01, 0), (0.9, 1.4, 1), (0.0, None, 1)], ids=["calm", "wide", "endless"]
)
def test_a_pair_too_far_apart_is_said_so_whoever_else_there_is(low, high, said):
    twin = verdict("torch.naive (again)", "torch.naive", "A/A", low, high, 0.0)
    assert table(twin).count(DISTURBED) == said
    other = verdict("torch.sdpa", "torch.naive", "baseline", 0.9, 1.4, None if said else 0.0)
    assert table(twin, other).count(DISTURBED) == said


def test_each_group_has_a_pair_of_its_own():
    calm = verdict("torch.naive (again)", "torch.naive", "A/A", 0.99, 1.01, 0.0)
    wide = verdict("torch.naive (again)", "torch.naive", "A/A", 0.5, 1.4, 0.0)
    assert table(calm, wide).count(DISTURBED) == 1


def test_who_cannot_run_is_named_once_by_reason():
    refused = [
        cell(name).model_copy(update={"status": "unsupported", "reason": reason, "time_us": None})
        for name, reason in (("aiter.asm", "needs rocm"), ("aiter.ck", "needs rocm"), ("cudnn", "needs cuda"))
    ]
    done = CaseDone(case=CASE, measured_s=1, setup_s=1, rounds=30, blocks=6, stopped="tight")
    lines = case_table([*refused, cell("torch.naive"), done]).splitlines()
    assert "unsupported, needs rocm: aiter.asm, aiter.ck" in lines
    assert "unsupported, needs cuda: cudnn" in lines
    assert sum("aiter" in line for line in lines) == 1
    assert "unsupported, needs rocm: aiter.asm, aiter.ck" in case_table([*refused, done])


def test_of_many_cases_left_out_the_first_are_named():
    def cases(count: int) -> list[Case]:
        return [Case("mla_decode", {"batch": i}, weight=0.01) for i in range(count)]

    assert left_out([], 60) == ""
    assert len(left_out(cases(NAMED), 60).splitlines()) == 1 + NAMED
    assert left_out(cases(NAMED + 3), 60).splitlines()[-1] == "  and 3 more  (3.0%)"
