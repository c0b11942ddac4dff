"""results/tables is what the tool makes of the recorded tables."""

from pathlib import Path

from kernels.tables.lookup import LIBRARIES
from tools.table_coverage import FOLDER, made


def test_the_committed_coverage_is_that_of_the_recorded_tables():
    """Not the page, which holds a release of Vega's."""
    files = made(dict.fromkeys(LIBRARIES, Path("recorded")))
    for name in ("coverage.csv", "README.md"):
        assert files[name] == (FOLDER / name).read_text(), "run python -m tools.table_coverage"
    assert "21 of 80" in files["coverage.html"]
