"""results/tables is what the tool makes from the recorded tables."""

from pathlib import Path

import pytest

from kernels.tables.lookup import LIBRARIES
from tools.table_coverage import FOLDER, made


@pytest.mark.slow
def test_the_committed_coverage_is_that_of_the_recorded_tables():
    files = made(dict.fromkeys(LIBRARIES, Path("recorded")))
    for name, text in files.items():
        assert text == (FOLDER / name).read_text(), "run python -m tools.table_coverage"
