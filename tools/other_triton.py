"""Fetches the Triton in use that this environment does not have, for `make test-all`: kernels must compile
with both.

It lies in a folder of the checkout, `.other-triton/`, and goes before the environment's own by PYTHONPATH.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from set_up import ROOT, SetUpError, pip, read_pins, say

OLDER = "3.6.0"  # the newer one is constraints.txt's


def other(version: str) -> str:
    """The one of the versions in use that is not of this version's minor."""
    (newer,) = (pin.removeprefix("triton==") for pin in read_pins() if pin.startswith("triton=="))
    return newer if version.split(".")[:2] == OLDER.split(".")[:2] else OLDER


def folder(version: str) -> Path:
    """Where a version is, once it was fetched, for this Python."""
    return ROOT / ".other-triton" / f"{version}-{sys.implementation.cache_tag}"


def fetch(version: str) -> None:
    """Raises SetUpError where pip cannot have it."""
    place = folder(version)
    if place.is_dir():
        return
    fresh = place.with_name(f"{place.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    say(f"fetching Triton {version} ...")
    _, reason = pip(sys.executable, "install", "--no-deps", "--target", fresh, f"triton=={version}")
    if reason:
        raise SetUpError(f"Triton {version} cannot be fetched: {reason}; `make test` does without")
    fresh.rename(place)


if __name__ == "__main__":
    import triton

    try:
        fetch(other(triton.__version__))
    except SetUpError as error:
        say(str(error))
        sys.exit(1)
