"""Where the suite keeps what it may lose, with and without a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from harness.paths import cache
from harness.workers.environment import worker_environment


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder called read-only cannot be written, as none of root's own otherwise is."""
    (tmp_path / "read-only").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "read-only" not in str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / f"tmp/deepseek-kernel-bench-{os.getuid()}"


@pytest.mark.parametrize(
    ("xdg", "home", "wanted"),
    [
        (None, "home", "home/.cache/deepseek-kernel-bench"),
        ("", "home", "home/.cache/deepseek-kernel-bench"),
        ("xdg", "read-only", "xdg/deepseek-kernel-bench"),
        ("read-only", "home", "home/.cache/deepseek-kernel-bench"),
        ("read-only", "read-only", ""),
        (None, "read-only", ""),
        (None, "~", ""),  # no HOME, and a user that the system does not know
        ("xdg", "~", "xdg/deepseek-kernel-bench"),
    ],
)
def test_the_cache_is_in_the_first_place_that_can_be_written(
    tmp_path, temporary, monkeypatch, xdg, home, wanted
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    monkeypatch.setenv("HOME", home if home == "~" else str(tmp_path / home))
    assert cache() == (tmp_path / wanted if wanted else temporary)


def test_workers_have_a_home_that_can_be_written(tmp_path, temporary, monkeypatch):
    """Libraries compile into it; what the user installed in the old one is still found."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert worker_environment({})["HOME"] == str(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "read-only"))
    environment = worker_environment({})
    assert Path(environment["HOME"]) == temporary / "home"
    assert Path(environment["HOME"]).is_dir()
    assert environment["PYTHONUSERBASE"]
