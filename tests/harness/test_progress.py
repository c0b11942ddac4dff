"""Progress in a terminal and in a file: as committed in `snapshots/progress.txt`."""

import io
import threading
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


def test_a_stage_that_lasts_has_a_line_each_minute_and_measuring_one_between_rounds(monkeypatch):
    """By a clock of the test. While something is measured no thread waits."""
    now, threads = 0.0, []

    class Waiting:
        """An event: nothing happens for two minutes, then the stage is over."""

        def __init__(self):
            self.minutes = 0

        def wait(self, seconds):
            nonlocal now
            now, self.minutes = now + seconds, self.minutes + 1
            return self.minutes > 2

        def set(self):
            self.minutes = 99

    class Thread:
        def __init__(self, target, args, daemon):
            threads.append(args[1])
            self.start = lambda: target(*args)
            self.join = lambda: None

    monkeypatch.setattr("harness.progress.time.monotonic", lambda: now)
    monkeypatch.setattr("harness.progress.Event", Waiting)
    monkeypatch.setattr("harness.progress.Thread", Thread)
    progress = Progress(False, file := io.StringIO())
    progress.case(CASE, 1, 90.0)
    progress.say("preparing")
    progress.say("measuring")
    for now in (181.0, 200.0, 250.0, 260.0, 320.0):
        progress.rounds(int(now), now - 180, 99.0, between_blocks=False)
    assert threads == ["preparing"]
    assert file.getvalue().splitlines()[1:] == [
        "        0 s  preparing",
        "       60 s  still preparing",
        "      120 s  still preparing",
        "      180 s  measuring",
        "      250 s  still measuring, 250 rounds, 70 of 99 s",
        "      320 s  still measuring, 320 rounds, 140 of 99 s",
    ]
    for quiet, terminal in ((True, io.StringIO()), (False, Terminal())):
        Progress(quiet, terminal).say("preparing")
    assert threads == ["preparing"], "a terminal's line needs none"


def test_the_thread_of_a_stage_ends_with_it(monkeypatch):
    progress = Progress(False, io.StringIO())
    for end in (lambda: progress.say("measuring"), lambda: progress.case(CASE, 1, 9.0), progress.clear):
        before = threading.enumerate()
        progress.say("preparing")
        (waiting,) = (thread for thread in threading.enumerate() if thread not in before)
        end()
        assert not waiting.is_alive()
