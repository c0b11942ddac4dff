"""`--help` and `list` as a user meets them. What `list` prints of other machines: transcripts/list.txt."""

import json
import re

import pytest

from harness.report.terminal import WIDTH
from tests.support.paths import ROOT

HEAVY = {"torch", "pandas", "numpy", "scipy", "pydantic", "vllm", "triton", "transformers"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--help"],
        ["list", "impls"],
        ["list", "impls", "--engine", "vllm", "--arch", "gfx942"],
        ["list", "flags", "--json", "-"],
        ["list", "cases", "--suite", "smoke"],
        ["doctor", "--quick"],
        ["run", "--no-such-option"],
    ],
    ids=" ".join,
)
def test_what_measures_nothing_imports_nothing_heavy(cli, arguments):
    done = cli(*arguments, PYTHONPROFILEIMPORTTIME=1)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)", done.stderr, re.MULTILINE))
    assert {"harness", "kernels", "click"} <= imported
    assert not imported & HEAVY
    assert ("rich" in imported) == (arguments[0] == "list" and "--json" not in arguments)


def test_it_runs_from_any_folder_and_without_a_command_says_what_there_is(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "folder", tmp_path)
    done = cli(PYTHONPATH=ROOT)
    assert (done.returncode, "Usage:" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.parametrize(
    ("what", "name"),
    [("ops", "op"), ("impls", "implementation"), ("suites", "suite"), ("linears", "name"), ("flags", "name")],
)
def test_list_prints_the_same_rows_as_table_and_json(here, tmp_path, what, name):
    table = here("list", what)
    assert (table.returncode, table.stderr) == (0, "")
    printed = here("list", what, "--json", "-")
    written = here("list", what, "--json", tmp_path / "rows.json")
    assert (written.returncode, written.stdout) == (0, "")
    assert printed.stdout == (tmp_path / "rows.json").read_text()
    words = re.split(r"[\s,]+", table.stdout)
    rows = json.loads(printed.stdout)
    assert rows and all(row[name].split()[0] in words for row in rows)
    assert max(map(len, table.stdout.splitlines())) <= (120 if what == "flags" else WIDTH)
