"""Paths: this checkout, its recorded results and data files, the user's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "harness" / "catalogue"
RESULTS = ROOT / "results"
PUBLISHED = RESULTS / "published"
# The folders of an absolute path, as it stands in a word; not of one that systems have in the same place.
_ALIKE = r"(?:usr|opt|lib\w*|etc|dev|proc|sys)\b"
_FOLDERS = re.compile(rf"(?<![\w./~-])/(?!{_ALIKE})(?:[^/\s:,;=]+/)*(?=[^/\s:,;=])")


def cache() -> Path:
    """What is kept between runs and may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepseek-kernel-bench"


def portable(text: str) -> str:
    """A text to be recorded, without folders of this machine: a file of the checkout is named by its place
    there, another by its own name."""
    return _FOLDERS.sub("", text.replace(f"{ROOT}{os.sep}", ""))
