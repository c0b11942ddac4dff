"""`python -m harness` by a Python that cannot run it."""

import os
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
    """A copy of the files that start, without a .venv."""
    for name in ("harness", "kernels", "shapes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def set_up(checkout: Path, python: Path | str) -> None:
    (checkout / ".venv/bin").mkdir(parents=True, exist_ok=True)
    file = checkout / ".venv/bin/python"
    file.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    file.chmod(0o755)


def test_the_messages_are_as_committed(bare, checkout, tmp_path_factory, snapshot):
    """One line on stderr and exit code 2; a traceback only if a module of ours is missing."""
    elsewhere, texts = tmp_path_factory.mktemp("elsewhere"), []

    def run(name: str, words: list[str], python: Path | str = bare, folder: Path = checkout) -> None:
        done = subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, check=False)
        lines = done.stderr.splitlines()
        is_one_line = (done.returncode, done.stdout, len(lines)) == (2, "", 1)
        assert is_one_line or "Traceback" in lines[0], lines
        line = lines[-1].replace(str(bare), "BARE").replace(str(checkout), "CHECKOUT")
        texts.append(f"=== {name}\n{line.replace(sys.executable, 'PYTHON')}\n")

    start = f"import sys; sys.path.insert(0, {str(checkout)!r}); sys.argv[1:] = ['list']; {PLAIN}"
    case = ["run", "--op", "mla_decode", "--case", "batch=1 ctx=4"]
    run("without what it needs", ["-m", "harness", *case])
    run("from another folder", ["-c", start], folder=elsewhere)
    run("an older Python", ["-c", OLD])
    for broken in ("/nowhere/python", bare):
        set_up(checkout, broken)
        run(
            f"a .venv of {'the same' if broken == bare else 'nothing'} that does not work",
            ["-m", "harness", "list"],
        )
    set_up(checkout, sys.executable)
    run("where the checkout is set up", ["-m", "harness", "list", "impls"])
    run("an older Python where it is set up", ["-c", OLD])
    shutil.rmtree(checkout / ".venv")
    recorded = ROOT / "results/epyc-zen4-2core/mla_decode-smoke"
    undrawn = (
        f"import sys; sys.modules['vl_convert'] = None; sys.argv[1:] = ['report', {str(recorded)!r}]; {PLAIN}"
    )
    run("a report without what draws", ["-c", undrawn], sys.executable)
    (checkout / "harness/errors.py").unlink()
    run("without something of our own", ["-m", "harness", "list"], sys.executable)
    snapshot(Path(__file__).parent / "snapshots" / "start.txt", "\n".join(texts))


def test_a_locale_of_ascii_changes_nothing():
    """Not in the workers either: torch.compile fails under one."""
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    words = [sys.executable, "-m", "harness", "run", "--resume", "/nowhere/µ".encode()]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    # With `-X utf8=0` Python reads by the locale, and the command must not start anew for ever.
    asked = [sys.executable, "-X", "utf8=0", "-m", "harness", "list", "ops"]
    assert b"mla_decode" in subprocess.run(asked, cwd=ROOT, env=environment, stdout=-1, check=True).stdout
    assert done.stderr.decode() == "error: cannot read /nowhere/µ/run.json: No such file or directory\n"
