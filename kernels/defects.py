"""Known defects of libraries, so that a report can name the reason for a wrong output or a fault.

defects.toml lists them. Each entry names the issue or pull request on GitHub that describes it. Where that
issue names no version in which the defect is fixed, all later versions count as affected.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from kernels.conditions import holds
from shapes.toml import read_toml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kernels.op import Implementation


@dataclass(frozen=True)
class Defect:
    issue: str
    """Where it is described: owner/repository#number."""
    symptom: str
    op: str
    rows: Sequence[str]
    """Shell patterns of the names of the implementations that have it."""
    archs: Sequence[str]
    versions: str = ""
    """The affected versions of the row's library, as PEP 440 specifiers; empty: all, also unreadable ones."""
    when: Sequence[str] = ()
    """Conditions on the sizes under which it may occur (see kernels.conditions); empty: at all sizes."""
    refuse: bool = False
    """Whether the row must not run such a case, because that harms other rows, such as by a GPU fault."""

    def __str__(self) -> str:
        return f"known: {self.issue}, {self.symptom}"


DEFECTS = [Defect(**entry) for entry in read_toml(Path(__file__).with_suffix(".toml"))["defect"]]


def known_defects(
    row: Implementation, sizes: DataclassInstance, arch: str, version: str | None = None
) -> list[Defect]:
    """The defects that may occur when an implementation runs at these sizes with this version of its library,
    by default the installed one. The library is not imported."""
    version = row.version if version is None else version
    known = []
    for defect in DEFECTS:
        is_row = any(fnmatch.fnmatchcase(row.name, pattern) for pattern in defect.rows)
        if not is_row or defect.op != row.op or arch not in defect.archs:
            continue
        if defect.versions and not _is_within(version, defect.versions):
            continue
        if holds(defect.when, asdict(sizes)):
            known.append(defect)
    return known


def _is_within(version: str, specifiers: str) -> bool:
    """Whether a version is among these. False where it is `unknown`, or empty without the library."""
    try:
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except InvalidVersion:
        return False
