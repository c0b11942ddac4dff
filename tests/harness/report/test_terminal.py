"""How text reaches a terminal, and what is none."""

import io
import os
import pty
import re
from collections.abc import Callable

import pytest
from rich.console import RenderableType
from rich.text import Text

from harness.report.fitting_table import Column, FittingTable, table_of
from harness.report.lists import listing
from harness.report.notes import REPRODUCE, printed_notes
from harness.report.terminal import WIDEST, WIDTH, plain_text, show
from kernels.platform import named

TABLE = FittingTable(
    [Column("name"), Column("what", wraps=True), Column("empty")], [[Text("a", "red"), "b " * 90, ""]]
)
ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture
def in_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a terminal of so many columns is sent."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def sent(columns: int, what: RenderableType = TABLE) -> str:
        outside, inside = pty.openpty()
        with os.fdopen(inside, "w") as file:
            monkeypatch.setenv("COLUMNS", str(columns))
            show(what, file)
            data = os.read(outside, 65536).decode()
        os.close(outside)
        return data

    return sent


def test_a_terminal_is_used_up_to_a_width_that_is_read_well_and_in_colour(in_terminal, monkeypatch):
    for columns, wide in ((60, 60), (100, 100), (200, WIDEST)):
        sent = in_terminal(columns)
        assert wide - 2 <= max(len(ESCAPE.sub("", line).rstrip()) for line in sent.splitlines()) <= wide
        assert ESCAPE.search(sent)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in in_terminal(80)


def test_what_is_no_terminal_gets_plain_text_of_one_width(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = set()
    for columns in ("40", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        file = io.TextIOWrapper(io.BytesIO(), "utf-8")
        show(TABLE, file)
        shown.add(file.buffer.getvalue().decode())
    (text,) = shown
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert WIDTH - 2 <= max(map(len, lines)) <= WIDTH
    assert "empty" not in text
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    show("3 ± 1", file)
    assert file.buffer.getvalue() == b"3 ? 1\n", "a sign that a file cannot hold stops nothing"


def test_rows_by_name_lose_their_last_columns():
    rows = [{"run": "a" * 30, "ms": "5.1 (4 to 6)", "why": "w " * 20}, {"run": "b", "ms": 12, "late": "3 ms"}]
    table = table_of(rows)
    assert [(c.right, c.wraps, c.spare) for c in table.columns] == [
        (False, True, 0), (True, False, 0), (False, True, 2), (True, False, 3)
    ]  # fmt: skip
    assert plain_text(table, 60).splitlines()[-1] == "not shown for lack of width: why, late"
    assert "late" in plain_text(table).splitlines()[0], "a file has all"


def test_the_least_important_columns_go_first():
    columns = [Column("name"), Column("first", spare=2), Column("then", spare=1)]
    wide = FittingTable(columns, [["a" * 20, "b" * 20, "c" * 20]])
    assert plain_text(wide, 64).splitlines()[0].split() == ["name", "first", "then"]
    assert plain_text(wide, 63).splitlines()[0].split() == ["name", "then"]
    assert plain_text(wide, 41).splitlines()[0].split() == ["name"]


def test_no_column_is_shrunk_to_nothing():
    columns = [Column("share"), Column("sizes"), Column("kernel"), Column("left out", spare=1)]
    table = FittingTable(columns, [["69.4%", "m=128 n=2112 k=7168", "k" * 30, "l" * 20]])
    two, three = (plain_text(table, width).splitlines()[2:] for width in (52, 30))
    assert two[:2] == [f"69.4%  m=128 n=2112   {'k' * 30}", "       k=7168"], "cells break between words"
    assert three[:3] == [f"69.4%  m=128   {'k' * 30}", "       n=2112", "       k=7168"], "or it is wider"


def test_lists_take_the_width_of_the_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    for what in ("flags", "recipes"):
        text = listing(what, ["mla_decode"], named("rocm"), None, all_flags=True)[1]
        assert 70 < max(map(len, text.splitlines())) <= 80


def test_a_command_is_never_broken(in_terminal):
    line = f"  python -m harness report {'results/' * 30} --open"
    for text in (plain_text(f"as pictures:\n{line}", 40), plain_text(line), in_terminal(80, line)):
        assert line in text.splitlines()
    assert all(len(other) <= 40 for other in plain_text("words " * 30, 40).splitlines())
    for columns in (40, None):
        notes = plain_text(
            printed_notes([("wrong", "a: off"), (REPRODUCE, line.strip()), ("note", "b")]), columns
        )
        assert notes.splitlines() == ["wrong  a: off", "note   b", "reproduce:", line]
