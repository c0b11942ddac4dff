"""results/tables is what the tool makes from the recorded tables."""

from pathlib import Path

import pytest

from kernels.tables.lookup import LIBRARIES
from tools.table_coverage import FOLDER, made


@pytest.mark.slow
def test_the_committed_coverage_is_that_of_the_recorded_tables():
    """Without the page, which contains the code of a release of Vega."""
    files = made(dict.fromkeys(LIBRARIES, Path("recorded")))
    for name in ("coverage.csv", "README.md"):
        assert files[name] == (FOLDER / name).read_text(), "run python -m tools.table_coverage"
    assert "21 of 80" in files["coverage.html"]
