"""What a person reads of a case under arms: of recorded runs, as committed in `snapshots/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.report.arm_table import case_table, conclusion
from harness.report.terminal import plain
from harness.results.journal import Journal
from tests.support.paths import ROOT

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize(("name", "columns"), [("onednn", None), ("threads", 80), ("threads", 120)])
def test_a_case_and_what_to_take_are_as_committed(snapshot, name, columns):
    journal = Journal(ROOT / "results/epyc-zen4-2core/toggle" / name)
    first, *others = journal.finished().values()
    text = plain(case_table(first, journal.run()), columns)
    assert max(map(len, text.splitlines())) <= (columns or 100)
    records = [record for case in (first, *others) for record in case]
    text += "\n" + plain(conclusion(records, journal.run()), columns) + "\n"
    snapshot(SNAPSHOTS / f"arms-{name}-{columns or 'piped'}.txt", text)
