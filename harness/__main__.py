"""`python -m harness`: the command line, or one line that says which Python has what it needs.

Python 3.6 and later can parse this file and __init__.py, so that a Python older than 3.10 prints that line.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 10)
OURS = ("harness", "kernels", "shapes")
ROOT = Path(__file__).resolve().parent.parent
DRAWING = ("altair", "vl_convert", "jinja2")  # `report` draws with them; set-up may leave them out
USAGE = 2  # as harness.errors.USAGE, which an older Python might not be able to import


def start() -> int:
    """Runs the command line. Returns the exit code."""
    if sys.version_info < OLDEST:
        version = "{}.{}".format(*sys.version_info)
        return refuse(f"is Python {version}; 3.10 or later is needed", "harness.cli")
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Libraries in the workers read and print by the locale, too: torch.compile fails where that is ASCII.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    try:
        from harness.cli import main

        return main()
    except ModuleNotFoundError as missing:
        name = missing.name or ""
        if name.split(".")[0] in OURS:
            raise
        return refuse(f"has no module {name}", name)


def refuse(why: str, needed: str) -> int:
    """Says why this Python cannot run the command, and what can. Returns the exit code."""
    folder = Path() if Path.cwd() == ROOT else ROOT
    python = folder / ".venv" / "bin" / "python"
    advice = "run " + " ".join(map(shlex.quote, [str(python), "-m", "harness", *sys.argv[1:]]))
    is_set_up = can_import(python, needed)
    if not is_set_up and needed in DRAWING:
        pip = f"{sys.executable} -m pip install altair vl-convert-python jinja2"
        advice = f"to draw, install what draws with `{pip}`, or take the run to a machine that has it"
    elif not is_set_up:
        make = "make" if folder == Path() else f"make -C {shlex.quote(str(folder))}"
        advice = f"set up with `{make} set-up` (`{make} run` measures, too), then {advice}"
    print(f"error: {sys.executable} {why}: {advice}", file=sys.stderr)
    return USAGE


def can_import(python: Path, name: str) -> bool:
    """Whether the interpreter works and has the module."""
    command = [str(python.absolute()), "-c", f"import {name}"]
    try:
        done = subprocess.run(
            command, cwd=str(ROOT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(start())
