"""Transcripts: text files of commands, below each its exit code, what it printed and, behind `!`, its stderr.

    $ list cases --suite r2
    [2]
    ! error: unknown suite 'r2'; suites: smoke, ...

A command is what follows `python -m harness`. FOLDER stands for a folder of the test, CHECKOUT for this one.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.paths import ROOT

VOLATILE = {
    r"devices here: .*": "devices here: DEVICES",
    r"this is cpu \S+": "this is cpu ARCH",
    r"may use \d+ CPUs": "may use N CPUs",
    r"the same commit, \w+": "the same commit, HASH",
    r"https://wheels\S+": "URL",
}


def replayed(text: str, folder: Path, command: Callable[..., Any]) -> str:
    """The transcript with what its commands give now; headings, after `=== `, stay."""
    kept: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            kept += [line, *_ran(line[2:], folder, command), ""]
        elif line.startswith("=== "):
            kept += [line, ""]
    return "\n".join(kept).rstrip() + "\n"


def _ran(line: str, folder: Path, command: Callable[..., Any]) -> list[str]:
    done = command(*shlex.split(line.replace("FOLDER", str(folder)).replace("CHECKOUT", str(ROOT))))
    lines = [*done.stdout.splitlines(), *(f"! {line}" for line in done.stderr.splitlines())]
    text = "\n".join([f"[{done.returncode}]", *(line.rstrip() for line in lines)])
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "CHECKOUT")
    for pattern, name in VOLATILE.items():
        text = re.sub(pattern, name, text)
    return text.splitlines()
