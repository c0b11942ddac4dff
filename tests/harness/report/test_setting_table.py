"""What a person reads of a case under settings: of recorded runs, as committed in `snapshots/`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.report.case_table import case_table
from harness.report.conclusion import conclusion, conclusion_lines
from harness.report.rows import CaseResult
from harness.report.terminal import plain_text
from harness.report.text import grouped
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Record, Verdict
from shapes.case import Case
from tests.support.paths import ROOT
from tests.support.written_runs import a_run, case, cell, finished, planned, verdict

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize(("name", "columns"), [("onednn", None), ("threads", 80), ("threads", 120)])
def test_a_case_and_what_to_take_are_as_committed(snapshot, name, columns):
    journal = Journal(ROOT / "results/epyc-zen4-2core/toggle" / name)
    finished = list(journal.finished().values())
    text = plain_text(case_table(finished[0], journal.run()), columns)
    assert max(map(len, text.splitlines())) <= (columns or 100)
    text += "\n" + plain_text(conclusion([*map(CaseResult.of, finished)], journal.run()), columns) + "\n"
    snapshot(SNAPSHOTS / f"settings-{name}-{columns or 'piped'}.txt", text)
    revisions = journal.run().model_copy(update={"trees": {"HEAD": "/somewhere"}})
    assert conclusion_lines([], revisions) == ("nothing was measured, so nothing is known", [])


LIGHT, LONG, THIRD = (replace(case(batch), weight=w) for batch, w in ((1, 0.9), (64, 0.1), (9, 0.5)))


def measured(
    of: Case,
    us_or_status: Mapping[str, float | str],
    *,
    before=100.0,
    half=0.0,
    noise: float | None = 0.0,
    stopped="clear",
) -> list[Record]:
    """A finished case of x.k: for each setting a time, give or take `half`, or a status without a time."""
    first = cell(of, "x.k", before)
    again = verdict(first, first, "same", "A/A")
    records: list[Record] = [first, again, finished(of, stopped=stopped)]
    for setting, found in us_or_status.items():
        if isinstance(found, str):
            records.append(cell(of, "x.k", None, status=found, setting=setting))
        else:
            other = cell(of, "x.k", found, half, setting=setting)
            word = "slower" if found > 1.02 * before else "faster" if found < 0.98 * before else "same"
            about = verdict(other, first, word).model_copy(update={"noise": noise, "confidence": 0.95})
            records += [other, about]
    return records


def concluded(*finished_cases: list[Record], cases=(), **facts) -> str:
    """The text of the conclusion on x.k, or on the revisions."""
    records = [record for of in finished_cases for record in of]
    names = dict.fromkeys(["plain", *(r.setting for r in records if isinstance(r, Cell))])
    run = a_run(
        [planned(of) for of in cases], **{"settings": {n: {} for n in names}, "margin": 0.02, **facts}
    )
    by_case = grouped(records, lambda record: record.case).values()
    title, lines = conclusion_lines([*map(CaseResult.of, by_case)], run)
    return " ".join([title, *lines]).removeprefix("recommendation: x.k: ")


NONE, WIDEST = "no other setting", "the widest interval is"
BUDGET, QUIETER = "give a longer --budget", "a quieter machine may tell, a longer --budget would not"


@pytest.mark.parametrize(("time_or_status", "facts", "expected"), [
    (50, {}, "F=1: 2.000x (2.000 to 2.000)"),
    (80, {"noise": 0.1}, "F=1: 1.25x (1.14 to 1.38)"),
    (100, {}, "leave it: all within 2 %"),
    (99, {"noise": 0.012}, "leave it: all within 2.3 %"),
    (98.4, {"half": 0.7}, f"leave it: {NONE} clearly brings 2 %; F=1 is faster, 1.016x (1.011 to 1.022)"),
    (200, {}, f"leave it: {NONE} brings 2 %; F=1 is slower, 0.500x (0.500 to 0.500)"),
    (100, {"half": 9.0, "stopped": "clear, budget"}, f"not known: {WIDEST} 0.93 to 1.08; {BUDGET}"),
    (100, {"half": 9.0, "stopped": "complete"}, f"not known: {WIDEST} 0.93 to 1.08; {QUIETER}"),
    (100, {"noise": 0.3}, f"not known: {WIDEST} 0.77 to 1.30; {QUIETER}"),
    (100, {"noise": None, "stopped": "budget"}, f"not known: too few rounds for an interval; {BUDGET}"),
    ("error", {}, "leave it: no other setting has a time; F=1: error"),
])  # fmt: skip
def test_a_setting_is_recommended_with_evidence_only(time_or_status, facts, expected):
    assert concluded(measured(LIGHT, {"F=1": time_or_status}, **facts)) == expected


def test_a_setting_counts_by_the_time_of_all_cases():
    """Half of 10 us does not make up for a tenth of 10 ms; and the noise is that of the sum, too."""
    light, long = measured(LIGHT, {"F=1": 5}, before=10), measured(LONG, {"F=1": 11000}, before=10000)
    assert concluded(light, long) == (
        "leave it: no other setting brings 2 %; F=1 is slower, 0.914x (0.914 to 0.914) weighted by the suite"
        f"; F=1 is faster for {LIGHT.key}"
    )
    even = [
        [r.model_copy(update={"weight": 0.5}) if isinstance(r, Cell) else r for r in of]
        for of in (light, long)
    ]
    assert "0.910x (0.910 to 0.910) all cases together;" in concluded(*even)
    better = measured(LONG, {"F=1": 8000}, before=10000)
    worse = measured(LIGHT, {"F=1": 20}, before=10)
    assert concluded(worse, better) == (
        "F=1: 1.233x (1.233 to 1.233) weighted by the suite, faster in 1 of 2 cases; "
        f"but slower for {LIGHT.key}"
    )
    rerun = next(r for r in better if isinstance(r, Verdict) and r.about == "A/A")
    rerun.samples = rerun.samples.model_copy(update={"seconds": [5 * s for s in rerun.samples.seconds]})
    assert concluded(worse, better).startswith("not known: ")


def test_a_setting_that_fails_anywhere_is_named_and_not_recommended():
    assert concluded(measured(LIGHT, {"F=1": 50}), measured(LONG, {"F=1": "wrong"})) == (
        "leave it: no other setting has a time in every case; F=1: wrong in 1 of 2 cases"
    )
    assert concluded(measured(LIGHT, {"F=1": 100, "F=2": "error"})) == "leave it: F=1 within 2 %; F=2: error"
    both = {"F=1": 80, "F=2": 50}, {"F=1": 80, "F=2": "unsupported"}
    assert concluded(measured(LIGHT, both[0]), measured(LONG, both[1])).endswith(
        " weighted by the suite, faster in 2 of 2 cases; F=2: unsupported in 1 of 2 cases"
    )
    said = concluded(measured(LIGHT, {"F=1": 100}), cases=[LIGHT, LONG, THIRD])
    assert said == "recommendation; 2 cases not measured: x.k: leave it: all within 2 %"


ROW = f"x.k @ B at {LIGHT.key}"


@pytest.mark.parametrize(("time_or_status", "facts", "expected"), [
    (99, {}, "nothing regressed"),
    (101, {}, "nothing regressed: no row lost more than 1 %"),
    (100, {"half": 9.0}, f"not known whether anything regressed: the least certain is {ROW}: 1.00x"),
    (200, {}, f"1 regressed: {ROW}: 0.500x"),
    ("wrong", {}, f"1 regressed: {ROW}: wrong"),
])  # fmt: skip
def test_nothing_regressed_needs_evidence_and_every_row(time_or_status, facts, expected):
    trees = {"plain": "a", "B": "b"}
    records = measured(LIGHT, {"B": time_or_status}, **facts)
    assert concluded(records, trees=trees).startswith(expected)
    beside = [r for r in measured(LIGHT, {"B": 100}) if not isinstance(r, CaseDone)]
    others = [
        r.model_copy(
            update={"impl": "y.k"} if isinstance(r, Cell) else {"a": r.a.replace("x.", "y."), "b": "y.k"}
        )
        for r in beside
    ]
    assert concluded([*others, *records], trees=trees, cases=[LIGHT]).startswith(
        expected.partition(": no row")[0]
    )
    assert "; 2 cases not measured" in concluded(records, trees=trees, cases=[LIGHT, LONG, THIRD])
