"""What the tests of A/Bs share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving_processes import MARK, marked


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the test starts carries it; nothing may be left at its end."""
    mark = f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv(MARK, mark)
    yield mark
    monkeypatch.delenv(MARK)
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
