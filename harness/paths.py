"""Paths: this checkout, its recorded results and data files, the user's cache."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "harness" / "catalogue"
RESULTS = ROOT / "results"
PUBLISHED = RESULTS / "published"
_SYSTEM = r"(?:usr|opt|lib\w*|etc|dev|proc|sys)\b"  # folders that all machines have in the same place
_FOLDERS = re.compile(rf"(?<![\w./~-])/(?!{_SYSTEM})(?:[^/\s:,;=]+/)*(?=[^/\s:,;=])")
"""The folders of an absolute path in a text, without the path's last name and outside _SYSTEM."""


def cache() -> Path:
    """The folder of files that are kept between runs and may be deleted at any time. It lies in
    XDG_CACHE_HOME, in ~/.cache, or, if neither can be written, in the folder for temporary files."""
    name = "deepseek-kernel-bench"
    for place in (os.environ.get("XDG_CACHE_HOME"), user_home() / ".cache"):
        if place and writable(Path(place)):
            return Path(place) / name
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def user_home() -> Path:
    """The user's home folder; `~` if HOME is not set and the system does not know the user."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def below_here(path: Path) -> Path:
    """The path as seen from the working directory, if it lies below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def this_python() -> str:
    """The Python that runs now, as a word for a shell, seen from the working directory."""
    shown = str(below_here(Path(sys.executable)))
    return shown if os.sep in shown else f"./{shown}"  # else a shell would look it up in PATH


def command(*words: str | Path) -> str:
    """A command to paste into a shell, with this Python; screens must not wrap it (report.terminal.show)."""
    shown = (str(below_here(word)) if isinstance(word, Path) else word for word in words)
    return shlex.join([this_python(), "-m", "harness", *shown])


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line: for True a flag, for a list the option several times; None and
    False leave it out."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            for word in value if isinstance(value, list | tuple) else [value]:
                words += [f"--{name}", str(word)]
    return words


def writable(folder: Path) -> bool:
    """Whether a folder can be written, or be made if it does not exist."""
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return folder.is_absolute() and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def portable(text: str) -> str:
    """A text for a record, without the folders of this machine: files of the checkout keep their path within
    it, other files only their name. What the locale could not decode is read as UTF-8."""
    text = os.fsencode(text).decode(errors="replace")
    return _FOLDERS.sub("", text.replace(f"{ROOT}{os.sep}", ""))
