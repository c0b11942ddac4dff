"""Progress in a terminal and in a file: as committed in `snapshots/progress.txt`."""

import io
from pathlib import Path

from harness.progress import Progress
from shapes.case import Case

CASE = Case("mla_decode", {"batch": 64, "ctx": "3201..3999", "heads": 16, "page": 64, "kv": "bf16"})
LINE_GONE = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_written_is_as_committed(snapshot, monkeypatch):
    """The snapshot has each text of the terminal's line, which is never wider than the terminal."""
    monkeypatch.setattr("harness.progress.time.monotonic", lambda: now)
    text = ""
    for kind, columns, file, quiet in (
        ("xterm", 100, Terminal(), False), ("xterm", 64, Terminal(), False), ("xterm", 100, Terminal(), True),
        ("dumb", 100, Terminal(), False), ("xterm", 100, io.StringIO(), False),
    ):  # fmt: skip
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setenv("COLUMNS", str(columns))
        now = 0.0
        progress = Progress(quiet, file)
        progress.case(CASE, 3, 90.0)
        progress.say("measuring")
        progress.rounds(12, 8.2, 20.0)
        progress.say("checking again")  # the rounds of the last stage are gone
        progress.clear()
        progress.note("a note")
        now = 50.0  # the seconds of the first case
        progress.case(CASE, 2, 90.0)
        for budget_s in (59.0, 61.0):  # 90 s and more are shown in minutes
            Progress(quiet, file).case(CASE, 1, budget_s)
        shown = file.getvalue().split(LINE_GONE)
        assert all(len(line) < columns for line in shown) or len(shown) == 1
        text += f"=== {kind}, {columns} columns, {type(file).__name__}, quiet: {quiet}\n" + "<\n".join(shown)
    snapshot(Path(__file__).parent / "snapshots" / "progress.txt", text)
