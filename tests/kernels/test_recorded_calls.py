"""What every row gives its library is what it gave when it was last looked at.

`pytest tests/kernels/test_recorded_calls.py --golden=write` writes the records anew; their diff is what a
reviewer reads.
"""

from __future__ import annotations

import difflib

import pytest

from tests.support.recorded import RECORDS, Case, rendered
from tests.support.recorded_rows import CASES

ROWS: dict[tuple[str, str], list[Case]] = {}
for case in CASES:
    ROWS.setdefault((case.op, case.name), []).append(case)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_row_gives_its_library_what_is_recorded(row: tuple[str, str], golden: str) -> None:
    op, name = row
    file = RECORDS / op / f"{name}.txt"
    text = rendered(ROWS[row])
    if golden == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    before = file.read_text() if file.exists() else ""
    changed = difflib.unified_diff(
        before.splitlines(), text.splitlines(), "recorded", "now", n=6, lineterm=""
    )
    assert text == before, "\n".join(
        [
            *changed,
            f"if that is right: pytest {file.parent.parent.parent}/test_recorded_calls.py --golden=write",
        ]
    )


def test_every_record_is_of_a_row() -> None:
    assert {(f.parent.name, f.stem) for f in RECORDS.glob("*/*.txt")} == set(ROWS)
