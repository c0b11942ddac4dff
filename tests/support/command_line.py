"""What the tests of the command line share."""

import subprocess
from pathlib import Path

TINY = (
    *("--device", "cpu", "--threads", "1", "--cache", "warm"),
    *("--case", "batch=1 ctx=5..20", "--budget", "1s"),
)

PLUGIN = """
from kernels.mla_decode.providers.torch_eager import naive as NaiveMlaDecode

class Elsewhere(NaiveMlaDecode):
    op = "mla_decode"
    name = "elsewhere.kernel"
    requires = "a library that nobody has"

    def available(self, platform):
        return platform.library("no_such_library", install="there is none")
"""


def error_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one line that a mistake gives."""
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.endswith("\n")
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def undisturbed(reason: str) -> str:
    """What a row says beside what a busy machine makes it say."""
    notes = reason.split("; ")
    return "; ".join(note for note in notes if note != "disturbed" and not note.endswith("calls compared"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
