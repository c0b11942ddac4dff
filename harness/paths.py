"""Paths: this checkout, its recorded results and data files, the user's cache."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "harness" / "catalogue"
RESULTS = ROOT / "results"
PUBLISHED = RESULTS / "published"
# The folders of an absolute path, as it stands in a word; not of one that systems have in the same place.
_ALIKE = r"(?:usr|opt|lib\w*|etc|dev|proc|sys)\b"
_FOLDERS = re.compile(rf"(?<![\w./~-])/(?!{_ALIKE})(?:[^/\s:,;=]+/)*(?=[^/\s:,;=])")


def cache() -> Path:
    """What is kept between runs and may be deleted at any time: in XDG_CACHE_HOME, or in ~/.cache, or, where
    neither can be written, in the folder of temporary files."""
    name = "deepseek-kernel-bench"
    for place in (os.environ.get("XDG_CACHE_HOME"), user_home() / ".cache"):
        if place and writable(Path(place)):
            return Path(place) / name
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def user_home() -> Path:
    """Relative, `~`, where HOME is not set and the system does not know the user."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def writable(folder: Path) -> bool:
    """Whether it can be written, or be made where it is not there yet."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return folder.is_absolute() and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def portable(text: str) -> str:
    """A text to be recorded, without folders of this machine: a file of the checkout is named by its place
    there, another by its own name."""
    return _FOLDERS.sub("", text.replace(f"{ROOT}{os.sep}", ""))
