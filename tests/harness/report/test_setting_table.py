"""What a person reads of a case under settings: of recorded runs, as committed in `snapshots/`."""

from pathlib import Path

import pytest

from harness.report.case_table import case_table
from harness.report.conclusion import conclusion, conclusion_lines
from harness.report.terminal import plain
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Verdict
from tests.support.paths import ROOT

SNAPSHOTS = Path(__file__).parent / "snapshots"
AVX2 = "ONEDNN_MAX_CPU_ISA=AVX2"


@pytest.mark.parametrize(("name", "columns"), [("onednn", None), ("threads", 80), ("threads", 120)])
def test_a_case_and_what_to_take_are_as_committed(snapshot, name, columns):
    journal = Journal(ROOT / "results/epyc-zen4-2core/toggle" / name)
    first, *others = journal.finished().values()
    text = plain(case_table(first, journal.run()), columns)
    assert max(map(len, text.splitlines())) <= (columns or 100)
    records = [record for case in (first, *others) for record in case]
    text += "\n" + plain(conclusion(records, journal.run()), columns) + "\n"
    snapshot(SNAPSHOTS / f"settings-{name}-{columns or 'piped'}.txt", text)
    revisions = journal.run().model_copy(update={"trees": {"HEAD": "/somewhere"}})
    assert conclusion_lines([], revisions) == ("nothing was measured, so nothing is known", [])


def told(records, **run):
    """What is concluded of torch.bf16, or of the revisions."""
    journal = Journal(ROOT / "results/epyc-zen4-2core/toggle/onednn")
    title, lines = conclusion_lines(records, journal.run().model_copy(update=run))
    return lines[0].removeprefix("torch.bf16: ") if lines else title


def changed(about, done=(), case=None, **facts):
    """The records of a case with other verdicts on all settings, or on those that `about` picks."""
    (first,) = Journal(ROOT / "results/epyc-zen4-2core/toggle/onednn").finished().values()
    others = {Verdict: facts, Cell: {"weight": facts.get("weight", 1.0)}, CaseDone: dict(done)}
    return [
        record.model_copy(
            update=(others[type(record)] if type(record) is not Verdict or about(record) else {})
            | ({"case": case} if case else {})
        )
        for record in first
    ]


def every(verdict):
    return verdict.about == "baseline"


@pytest.mark.parametrize(("ratio", "low", "high", "more", "said"), [
    (1.3, 1.2, 1.4, {}, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: 1.30x (1.20 to 1.40)"),
    (1.0, 0.985, 1.015, {}, "leave it: all within 2 %"),
    (0.5, 0.4, 0.6, {}, "leave it: no other setting brings 2 %; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is "),
    # Half of the interval is 0.51 in logarithms, and must be 0.41: log(1.5). So 60 s are not enough.
    (1.5, 0.9, 2.5, {}, "not known: the widest interval is 0.9 to 2.5; give --budget 5m"),
    (1.3, 1.2, 1.4, {"noise": 0.25}, "not known: the widest interval is 1.0 to 1.8; give --budget 5m"),
    (1.01, 0.985, 1.015, {"noise": 0.02}, "not known: the widest interval is 0.97 to 1.04; give --bud"),
    (1.0, 0.0, 5e16, {}, "not known: too few rounds for an interval; give a longer --budget"),
    (1.0, None, None, {}, "not known: too few rounds for an interval; give a longer --budget"),
    (1.019, 0.9, 1.2, {}, "not known: the widest interval is 0.90 to 1.20; no budget of hours would tell"),
])  # fmt: skip
def test_a_setting_is_recommended_with_evidence_only(ratio, low, high, more, said):
    facts = {"ratio": ratio, "low": low, "high": high, "noise": 0.0, "verdict": "unclear"} | more
    records = changed(every, {"measured_s": 60.0, "blocks": 8}, **facts)
    assert told(records).startswith(said)
    few = changed(every, {"measured_s": 60.0, "blocks": 2}, **facts)
    assert told(few).replace("give --budget 5m or more", "") != told(few) or "not known" not in said


def test_the_mean_over_cases_has_their_weights_and_its_interval_all_of_theirs():
    best = changed(
        lambda v: every(v) and AVX2 in v.a, ratio=4.0, low=3.9, high=4.1, noise=0.0, verdict="faster"
    )
    other = changed(lambda v: False, case="other", weight=3.0)
    assert told([*best, *other]).startswith("not known: ")  # it is 9 times slower in three quarters
    other = changed(
        every, case="other", weight=1.0, ratio=1.0, low=0.99, high=1.01, noise=0.0, verdict="same"
    )
    said = told([*best, *other])
    assert said == f"{AVX2}: 2.00x (1.96 to 2.03) over 2 cases, faster in 1 of them"


@pytest.mark.parametrize(("low", "said"), [
    (1.01, "nothing regressed"),
    (0.99, "nothing regressed: no row lost more than 1.0%"),
    (0.7, "not known whether anything regressed: the least certain is torch.bf16 @ ONEDNN_MAX_CPU_ISA="),
])  # fmt: skip
def test_nothing_regressed_needs_evidence(low, said):
    records = changed(every, ratio=1.05, low=low, high=1.1, noise=0.0, verdict="unclear")
    assert told(records, trees={"HEAD": "/somewhere"}).startswith(said)
    regressed = changed(every, ratio=0.5, low=0.4, high=0.6, noise=0.0, verdict="slower")
    assert " @ ONEDNN_MAX_CPU_ISA=" in told(regressed, trees={"HEAD": "/somewhere"})
