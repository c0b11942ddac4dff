"""`python -m harness` by a Python that cannot run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PLAIN = "import runpy; runpy.run_module('harness', run_name='__main__')"
OLD = f"import sys; sys.version_info = (3, 9, 18); {PLAIN}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without a package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what starts, without a .venv."""
    for name in ("harness", "kernels", "shapes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def line(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    (only,) = done.stderr.splitlines()
    return only


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, check=False)


def set_up(checkout: Path, python: Path | str) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    file = checkout / ".venv/bin/python"
    file.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    file.chmod(0o755)


def test_without_what_it_needs_it_says_how_to_set_up(bare, checkout):
    said = line(run(bare, checkout, "-m", "harness", "run", "--op", "mla_decode", "--case", "batch=1 ctx=4"))
    assert said.startswith(f"error: {bare} has no module ")
    assert "`make set-up`" in said and "`make run`" in said
    assert said.endswith(", then run .venv/bin/python -m harness run --op mla_decode --case 'batch=1 ctx=4'")


def test_where_the_checkout_is_set_up_it_names_that_python(bare, checkout):
    set_up(checkout, sys.executable)
    said = line(run(bare, checkout, "-m", "harness", "list", "impls"))
    assert "make" not in said
    assert said.endswith(": run .venv/bin/python -m harness list impls")


@pytest.mark.parametrize("broken", ["/nowhere/python", "the same"])
def test_an_environment_that_does_not_work_is_not_named_as_if_it_did(bare, checkout, broken):
    set_up(checkout, bare if broken == "the same" else broken)
    assert "`make set-up`" in line(run(bare, checkout, "-m", "harness", "list"))


def test_a_report_without_what_draws_says_what_to_install(checkout):
    module = "vl_convert"
    without = f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = ['report', sys.argv[1]]; {PLAIN}"
    recorded = str(ROOT / "results/epyc-zen4-2core/mla_decode-smoke")
    said = line(run(Path(sys.executable), checkout, "-c", without, recorded))
    assert said.startswith(f"error: {sys.executable} has no module {module}: to draw, install ")
    assert f"`{sys.executable} -m pip install altair vl-convert-python jinja2`" in said


def test_from_another_folder_the_paths_are_whole(bare, checkout, tmp_path_factory):
    start = f"import sys; sys.path.insert(0, {str(checkout)!r}); sys.argv[1:] = ['list']; {PLAIN}"
    said = line(run(bare, tmp_path_factory.mktemp("elsewhere"), "-c", start))
    assert f"`make -C {checkout} set-up`" in said
    assert said.endswith(f"then run {checkout}/.venv/bin/python -m harness list")


def test_an_older_python_is_told_which_it_takes_and_a_broken_checkout_is_a_traceback(bare, checkout):
    assert "is Python 3.9; 3.10 or later is needed: set up" in line(run(bare, checkout, "-c", OLD))
    set_up(checkout, sys.executable)
    assert "is needed: run .venv/bin/python -m harness" in line(run(bare, checkout, "-c", OLD))
    (checkout / "harness/cli/lazy.py").unlink()  # what is missing of our own is a traceback
    done = run(Path(sys.executable), checkout, "-m", "harness", "list")
    assert "No module named 'harness.cli.lazy'" in done.stderr and "Traceback" in done.stderr
