"""Reads TOML: by the standard library, before Python 3.11 by tomli."""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises OSError, and ValueError for what is no TOML or no UTF-8."""
    return tomllib.loads(path.read_text("utf-8"))
