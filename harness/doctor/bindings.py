"""Whether rows bind to a version of their library: by its sources, or by signatures recorded of them.

Nothing of a library is imported, so that a maintainer without a GPU sees what a release broke.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

import kernels
from harness.errors import UsageError, one_line
from kernels import signatures
from kernels.binding import Symbol, Taken
from kernels.library_source import LibrarySource, NotThere, SignatureSource
from kernels.platform import distribution_names, version
from kernels.vendor import Vendor

BINDS, BREAKS, OLDER, UNKNOWN = "binds", "breaks", "too old", "not told"
"""Of a row: all calls fit; one does not; the version is older than the row's first; the sources tell of no
signature (of C++, or made as the module is imported)."""


@dataclass(frozen=True)
class RecordedSource:
    """Signatures of one library's release as text, by dotted place: None for what is not there, `""` for what
    is there and does not tell."""

    library: str
    signatures: Mapping[str, str | None]

    def has(self, module: str) -> bool:
        return module == self.library

    def signature(self, place: str) -> inspect.Signature | None:
        if place not in self.signatures:
            raise NotThere(f"{place} was not recorded")
        text = self.signatures[place]
        if text is None:
            raise NotThere(f"no {place}")
        return signatures.parse(text) if text else None


@dataclass(frozen=True)
class Release:
    """A version of one library, which is named by its module."""

    library: str
    version: str
    source: SignatureSource


@dataclass(frozen=True)
class RowBinding:
    """reason: what does not fit, or what is not told; without: wished arguments that the version lacks"""

    op: str
    implementation: str
    library: str
    version: str
    status: str
    reason: str
    without: str


def bindings(releases: Sequence[Release]) -> list[RowBinding]:
    """Of every row whose library is among them, release by release."""
    taking = {row: libraries(row) for row in rows()}
    return [_bind(row, r) for r in releases for row, names in taking.items() if r.library in names]


def rows() -> list[Vendor]:
    """Those that take something of a library."""
    everything = (i for op in kernels.OPS for i in kernels.implementations(op))
    return [i for i in everything if isinstance(i, Vendor) and i.symbols]


def libraries(row: Vendor) -> set[str]:
    """Its own, and others that it takes something of."""
    own = row.library or row.provider
    others = {_root(place) for symbol in symbols(row.symbols) for place in symbol.places}
    return {own, *others - {_root(own)}}


def _root(module: str) -> str:
    return module.partition(".")[0]


def symbols(taken: Sequence[Taken]) -> Iterator[Symbol]:
    for entry in taken:
        yield from entry if isinstance(entry, tuple) else (entry,)


def _bind(row: Vendor, release: Release) -> RowBinding:
    complaints, untold, without, told = [], [], set(), 0
    for entry in row.symbols:
        alternatives = [
            s for s in symbols([entry]) if any(_root(place) == _root(release.library) for place in s.places)
        ]
        if not alternatives:
            continue
        complaint, known, lacking = _first(alternatives, release.source)
        if complaint:
            complaints.append(complaint)
        elif known:
            told += 1
            without |= lacking
        else:
            untold.append(alternatives[0].places[0])
    reason = "; ".join(complaints) or (f"not told: {', '.join(untold)}" if untold else "")
    status = BREAKS if complaints else BINDS if told or not untold else UNKNOWN
    if release.library == (row.library or row.provider) and _is_older(release.version, row.since):
        status, reason = OLDER, f"needs {row.since} or later"
    return RowBinding(
        row.op, row.name, release.library, release.version, status, reason, ", ".join(sorted(without))
    )


def _first(alternatives: Sequence[Symbol], source: SignatureSource) -> tuple[str, bool, set[str]]:
    """Of the first alternative that exists: what is wrong with it, whether its signature is known, and the
    wishes that it lacks. Where none exists, what is missing."""
    missing = ""
    for symbol in alternatives:
        try:
            _, signature = symbol.signature_in(source)
        except NotThere as error:
            missing = missing or _when(symbol, str(error))
            continue
        if complaint := symbol.complaint(signature):
            return _when(symbol, complaint), True, set()
        return "", symbol.is_told(signature), symbol.lacks(signature)
    return missing, True, set()


def _when(symbol: Symbol, complaint: str) -> str:
    return f"{symbol.when}: {complaint}" if symbol.when else complaint


def _is_older(version: str, since: str) -> bool:
    try:
        return bool(since) and Version(version) < Version(since)
    except InvalidVersion:
        return False


def wanted_libraries() -> list[str]:
    return sorted({library for row in rows() for library in libraries(row)})


def installed() -> list[Release]:
    return [
        Release(library, known, LibrarySource.installed(_root(library)))
        for library in wanted_libraries()
        if (known := version(library))
    ]


def releases_in(path: Path) -> list[Release]:
    """In a folder of packages, a wheel, or a file of recorded signatures. Raises UsageError."""
    try:
        if path.suffix == ".json":
            return recorded(path)
        source = LibrarySource.of(path)
        here = [library for library in wanted_libraries() if source.has(library)]
        return [Release(library, _version_in(path, library), source) for library in here]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no folder of packages, wheel, or file of recorded signatures: {one_line(error)}"
        ) from None


def recorded(path: Path) -> list[Release]:
    """As tools/record_signatures.py writes them, the newest last."""
    file = json.loads(path.read_text())
    library = file["library"]
    return [
        Release(library, release["version"], RecordedSource(library, release["signatures"]))
        for release in file["releases"]
    ]


def _version_in(path: Path, library: str) -> str:
    """By the metadata beside it; else the folder's name."""
    names = {_normal(name) for name in distribution_names(library)}
    beside = [path, path.parent] if path.is_dir() else [path]
    for distribution in importlib.metadata.distributions(path=[str(place) for place in beside]):
        if _normal(distribution.metadata["Name"]) in names:
            return distribution.version
    return path.name


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
