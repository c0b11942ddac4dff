"""What a person reads of a case under settings: of recorded runs, as committed in `snapshots/`."""

from pathlib import Path

import pytest

from harness.report.case_table import case_table, conclusion, conclusion_lines
from harness.report.terminal import plain
from harness.results.journal import Journal
from harness.results.schema import Cell, Verdict
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


@pytest.mark.parametrize(("ratio", "said"), [
    (4.0, f"{AVX2}: 1.63x over 2 cases, faster in 1 of them; but slower for block"),
    (1.01, "leave it as it is, no setting brings 2%"),  # a mean in the margin, though all are faster in one
])  # fmt: skip
def test_an_setting_is_worth_the_mean_of_its_speedups_by_the_weights_of_the_cases(ratio, said):
    journal = Journal(ROOT / "results/epyc-zen4-2core/toggle/onednn")
    (first,) = journal.finished().values()
    records = [*first]
    for record in first:
        facts = {"weight": 3.0} if isinstance(record, Cell) else {}
        if isinstance(record, Verdict):
            facts = {"verdict": "faster", "ratio": ratio if AVX2 in record.a else min(ratio, 1.2)}
        records.append(record.model_copy(update={"case": "other", **facts}))
    assert f"torch.bf16: {said}" in " ".join(plain(conclusion(records, journal.run())).split())
