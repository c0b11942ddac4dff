"""Files that lose nothing when the program is killed or the disk is full."""

import ast
import os
import re
from pathlib import Path

import pytest

from harness import files
from harness.errors import UsageError
from tests.support.paths import ROOT


def test_an_unfinished_line_is_cut_off_before_the_next_one(tmp_path):
    path = tmp_path / "lines"
    files.append(path, "one\n")
    path.write_text("one\ntw")
    files.append(path, "three\n")
    assert path.read_text() == "one\nthree\n"
    files.append(path, "four\n", lambda data: 0)
    assert path.read_text() == "four\n"


def test_a_full_disk_leaves_files_as_they_were(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    lines, whole = tmp_path / "lines", tmp_path / "of a folder" / "whole"
    files.append(lines, "one\n")
    files.replace(whole, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.append(lines, "two\n")
    with pytest.raises(OSError, match="No space left"):
        files.replace(whole, "new")
    assert (lines.read_text(), whole.read_text()) == ("one\n", "old")
    assert sorted(tmp_path.rglob("*")) == [lines, whole.parent, whole], "no other file is left"


def test_a_line_that_cannot_be_read_is_named_in_a_short_one(tmp_path):
    (path := tmp_path / "lines").write_text(f"1\n{'x' * 400}\n")
    with pytest.raises(UsageError, match=f"^cannot read {path}, line 2: KeyError: b'x+$") as error:
        list(files.JsonLines(path, {b"1": 1}.__getitem__).records())
    assert len(str(error.value)) == len(f"cannot read {path}, line 2: ") + 300


def test_the_check_before_a_run_leaves_files_as_they_were(tmp_path, monkeypatch):
    mine = tmp_path / "mine.json"
    mine.write_text("kept")
    files.require_writable(str(mine), str(tmp_path / "new.csv"))
    assert mine.read_text() == "kept" and list(tmp_path.iterdir()) == [mine]
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr(Path, "open", None)  # opening a pipe waits for its reader
    files.require_writable(str(pipe), "-")


def test_every_text_file_is_utf_8_whatever_the_locale():
    """Also of what programs print: `text=True` decodes it by the locale."""
    wrong = []
    for file in [file for top in ("harness", "kernels", "shapes") for file in (ROOT / top).rglob("*.py")]:
        source = file.read_text("utf-8")
        if not re.search(r"read_text|write_text|open\b|text=|universal_newlines", source):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                given, words = len(node.args), {word.arg for word in node.keywords}
                modes = [
                    a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                ]
                by_locale = {
                    "read_text": given < 1,
                    "write_text": given < 2,
                    "open": any(re.fullmatch("[rwaxt+]+", mode) for mode in modes),
                }.get(name, bool(words & {"text", "universal_newlines"} and name in ("run", "Popen")))
                if by_locale and "encoding" not in words:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []
