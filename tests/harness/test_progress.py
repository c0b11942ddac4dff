"""Where a run is, as its terminal and as a file have it."""

from __future__ import annotations

import io

import pytest

from harness.progress import Progress
from shapes.case import Case

CASE = Case("mla_decode", {"batch": 64, "ctx": "3201..3999", "heads": 16, "page": 64, "kv": "bf16"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        """What it shows last."""
        return self.getvalue().rpartition("\r\x1b[K")[2]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_terminal_has_one_line_that_says_where_the_run_is(terminal):
    progress = Progress(False, terminal)
    progress.case(CASE, 3, 90.0)
    assert terminal.line == f"[1/3] {CASE.key}  about 6 min left"
    progress.say("measuring")
    assert terminal.line == f"[1/3] {CASE.key}  measuring; about 6 min left"
    progress.rounds(12, 8.2, 20.0)
    assert terminal.line.endswith("...  measuring, 12 rounds, 8 of 20 s; about 6 min left")
    assert "\n" not in terminal.getvalue()
    progress.say("checking again")
    assert "12 rounds" not in terminal.line, "of another stage"
    progress.clear()
    assert terminal.line == "", "before something else is printed"
    progress.note("a note")
    assert terminal.line == "a note\n"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_line_is_never_longer_than_the_terminal_and_quiet_is_quiet(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for quiet in (True, False):
        progress = Progress(quiet, terminal)
        progress.case(CASE, 3, 90.0)
        progress.say("preparing and checking")
        if quiet:
            progress.rounds(12, 8.0, 20.0)
            progress.note("a note")
            progress.clear()
            assert terminal.getvalue() == ""
    assert len(terminal.line) < columns
    assert terminal.line.startswith("[1/3] ")


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_elsewhere_each_case_and_stage_is_a_line(monkeypatch, file):
    monkeypatch.setenv("TERM", "dumb")
    written = file()
    progress = Progress(False, written)
    progress.case(CASE, 2, 20.0)
    progress.say("measuring")
    progress.rounds(12, 8.0, 20.0)
    progress.clear()
    assert written.getvalue().splitlines() == [
        f"[1/2] {CASE.key}; about 2 min left",
        "        0 s  measuring",
    ]
