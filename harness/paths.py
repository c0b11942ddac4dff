"""Paths: this checkout, its recorded results and data files, the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "harness" / "catalogue"
RESULTS = ROOT / "results"
PUBLISHED = RESULTS / "published"


def cache() -> Path:
    """What is kept between runs and may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepseek-kernel-bench"
