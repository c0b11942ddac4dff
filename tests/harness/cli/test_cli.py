"""`--help` and `list` as a user meets them. What `list` prints of other machines: transcripts/list.txt."""

import contextlib
import json
import re
import shlex
import sys

import click
import pytest

from harness.cli import cli as command_line
from harness.cli import main
from harness.report.terminal import WIDTH
from tests.support.paths import ROOT

HEAVY = {"torch", "pandas", "numpy", "scipy", "pydantic", "vllm", "triton", "transformers"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--help"],
        ["list", "impls"],
        ["engine", "vllm", "--arch", "gfx942", "--vllm", "recorded"],
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
    assert ("rich" in imported) == (arguments[0] in ("engine", "list"))


def test_it_runs_from_any_folder_and_without_a_command_says_what_there_is(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "folder", tmp_path)
    done = cli(PYTHONPATH=ROOT)
    assert (done.returncode, "Usage:" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


COMMANDS = {
    (*group, name): found
    for group, commands in (((), command_line), (("serving",), command_line.get_command(None, "serving")))
    for name in commands.list_commands(None)
    if not isinstance(found := commands.get_command(None, name), click.Group)
}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_sentences_and_examples_that_parse(here, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    text = here(*path, "--help").stdout
    examples = re.findall(r"^ +python -m harness (.*)$", text.partition("Examples:")[2], re.MULTILINE)
    assert 1 <= len(examples) <= 3
    for example in examples:
        words = shlex.split(example)
        assert tuple(words[: len(path)]) == path
        assert COMMANDS[path].make_context(path[-1], words[len(path) :])  # the command itself does not run
    options = [each for each in COMMANDS[path].params if isinstance(each, click.Option) and not each.hidden]
    said = [(each.help or "").partition("  [")[0] for each in options]
    assert [text for text in said if not re.fullmatch(r"(With --\w+.*: [a-z]|[A-Z]).*\.", text)] == []


def test_help_lists_commands_in_one_line_each_and_takes_the_width_of_the_terminal(here, monkeypatch):
    for group in ((), ("serving",)):
        monkeypatch.setenv("COLUMNS", "80")
        listed = here(*group, "--help").stdout.partition("Commands:\n")[2].splitlines()
        names = [path[-1] for path in COMMANDS if path[:-1] == group] + ["serving"] * (not group)
        assert [line.split()[0] for line in listed] == sorted(names)
        assert all(line.endswith(".") and not line.endswith("...") for line in listed)
    for columns, widest in {80: 78, 100: 98, 200: 108}.items():
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = here("run", "--help").stdout.splitlines()
        widths = [len(line) for line in lines if "python -m harness" not in line]
        assert widest - 12 < max(widths) <= widest


@pytest.mark.parametrize(
    ("what", "name"),
    [("ops", "op"), ("impls", "implementation"), ("suites", "suite"), ("linears", "name"), ("flags", "name")],
)
def test_list_prints_the_same_rows_as_table_and_json(here, tmp_path, what, name):
    table = here("list", what, *(["--all"] if what == "flags" else []))
    assert (table.returncode, table.stderr) == (0, "")
    printed = here("list", what, "--json", "-")
    written = here("list", what, "--json", tmp_path / "rows.json")
    assert (written.returncode, written.stdout) == (0, "")
    assert printed.stdout == (tmp_path / "rows.json").read_text()
    words = re.split(r"[\s,]+", table.stdout)
    rows = json.loads(printed.stdout)
    assert rows and all(row[name].split()[0] in words for row in rows)
    assert max(map(len, table.stdout.splitlines())) <= (120 if what == "flags" else WIDTH)


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "argv", ["harness", "list", "suites"])
        monkeypatch.setattr(sys, "stdout", full)
        assert main() == 2
    assert capsys.readouterr().err == "error: cannot write: No space left on device\n"
