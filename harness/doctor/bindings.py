"""Whether the calls of implementations (rows) fit a release of their library.

The library's sources are read, or signatures that were recorded from them; nothing of it is imported. So a
maintainer without a GPU sees what a release broke.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

import kernels
from harness.errors import UsageError, one_line
from kernels.binding import Function, Operator, Symbol, Used
from kernels.interfaces import signatures
from kernels.interfaces.library_source import LibrarySource, NotThere, SignatureSource
from kernels.platform import distributions, version
from kernels.vendor import Vendor, is_older, last_read

# The status of a row:
BINDS = "binds"  # all calls whose signatures are known fit
BREAKS = "breaks"  # a call does not fit
OLDER = "too old"  # the release is older than the row's first
UNKNOWN = "not told"
"""No signature is known, or the one that matters is not: that of the torch operator which is the kernel
itself. Sources do not show functions of C++ nor functions that are made at import."""
ALL_KINDS = ("cuda", "rocm", "cpu")


@dataclass(frozen=True)
class RecordedSource:
    """Signatures that were recorded from one release."""

    texts: Mapping[str, str | None]  # by dotted place; None: no such place; "": no signature in the sources

    def signature(self, place: str) -> inspect.Signature | None:
        if place not in self.texts:
            raise NotThere(f"{place} was not recorded")
        text = self.texts[place]
        if text is None:
            raise NotThere(f"no {place}")
        return signatures.parse(text) if text else None


@dataclass(frozen=True)
class Release:
    library: str  # the name of its module
    version: str
    source: SignatureSource
    kinds: tuple[str, ...] = ALL_KINDS  # the platforms that it was built for


@dataclass(frozen=True)
class RowBinding:
    op: str
    implementation: str
    library: str
    version: str
    status: str  # BINDS, BREAKS, OLDER or UNKNOWN
    reason: str  # what does not fit, or which signatures are unknown
    without: str  # optional arguments that this version lacks
    last_read: str  # the newest release that the row was written for, where this release is newer; else empty


def bindings(releases: Sequence[Release]) -> list[RowBinding]:
    """How the rows that use each release, and run on its platforms, bind to it."""
    libraries_of = {row: libraries(row) for row in rows()}
    return [
        _bind(row, release)
        for release in releases
        for row, names in libraries_of.items()
        if release.library in names and set(row.kinds) & set(release.kinds)
    ]


def rows() -> list[Vendor]:
    """The implementations that call functions of a library."""
    everything = (i for op in kernels.OPS for i in kernels.implementations(op))
    return [i for i in everything if isinstance(i, Vendor) and i.symbols]


def libraries(row: Vendor) -> set[str]:
    """The row's own library, and the others that it uses."""
    own = row.library or row.provider  # it may be a part of a package, as flash_attn.cute is
    others = {_root(place) for place in _places(row)} - {_root(own)}
    return {own, *others}


def places(row: Vendor, library: str) -> set[str]:
    """The dotted places of that library that the row uses."""
    if library not in libraries(row):
        return set()
    return {place for place in _places(row) if _root(place) == _root(library)}


def _places(row: Vendor) -> Iterator[str]:
    return (place for taken in row.symbols for symbol in _alternatives(taken) for place in symbol.places)


def _alternatives(taken: Used) -> tuple[Symbol, ...]:
    return taken if isinstance(taken, tuple) else (taken,)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _bind(row: Vendor, release: Release) -> RowBinding:
    """Looks up in a release, for each symbol that the row takes from its package, whether the call fits."""
    package = _root(release.library)
    complaints: list[str] = []
    unknown: list[str] = []  # places whose signatures are not known
    lacking: set[str] = set()  # optional arguments that this release does not have
    known = 0  # functions whose signatures are known
    has_unknown_operator = False  # see UNKNOWN
    for taken in row.symbols:
        alternatives = _alternatives(taken)
        packages = {_root(place) for symbol in alternatives for place in symbol.places}
        if package not in packages:
            continue
        symbol, signature, complaint = _first(alternatives, release.source)
        if symbol is None and packages != {package}:  # an alternative in another package may be there
            unknown.append(alternatives[0].places[0])
        elif symbol is None or complaint:
            complaints.append(complaint)
        elif isinstance(symbol, Function) and signature is None:
            unknown.append(alternatives[0].places[0])
            has_unknown_operator |= isinstance(symbol, Operator)
        else:
            known += 1
            lacking |= symbol.lacks(signature)
    first_version = row.first_versions.get(release.library, "")
    status, reason = BINDS, ""
    if is_older(release.version, first_version):
        status, reason = OLDER, f"needs {first_version} or later"
    elif complaints:
        status, reason = BREAKS, "; ".join(dict.fromkeys(complaints))  # each once
    elif unknown:
        status = UNKNOWN if has_unknown_operator or known == 0 else BINDS
        reason = f"not told: {', '.join(unknown)}"
    without, read = ", ".join(sorted(lacking)), last_read(release.library, release.version)
    return RowBinding(row.op, row.name, release.library, release.version, status, reason, without, read)


def _first(
    alternatives: Sequence[Symbol], source: SignatureSource
) -> tuple[Symbol | None, inspect.Signature | None, str]:
    """The first alternative that exists, its signature (None: not known), and a complaint: why its call does
    not fit (empty: it fits), or that the first alternative is missing where none exists (None, None)."""
    missing: list[str] = []
    for symbol in alternatives:
        when = f"{symbol.when}: " if symbol.when else ""
        try:
            signature = symbol.signature_in(source)
        except NotThere as error:
            missing.append(f"{when}{error}")
            continue
        complaint = symbol.complaint(signature)
        return symbol, signature, f"{when}{complaint}" if complaint else ""
    return None, None, missing[0]


def wanted_libraries() -> list[str]:
    return sorted({library for row in rows() for library in libraries(row)})


def installed() -> list[Release]:
    return [
        Release(library, known, LibrarySource.installed(_root(library)), _kinds(_distribution(library)))
        for library in wanted_libraries()
        if (known := version(library))
    ]


def releases_in(path: Path) -> list[Release]:
    """The libraries in a folder of packages, a wheel, or a file of recorded signatures. Raises UsageError."""
    try:
        if path.suffix == ".json":
            return recorded(path)
        source = LibrarySource.of(path)
        return [_release(library, path, source) for library in wanted_libraries() if source.has(library)]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        if isinstance(error, zipfile.BadZipFile):
            reason = "it is no zip archive, or it is broken"
        kinds = "folder of packages, wheel, or file of recorded signatures"
        raise UsageError(f"{path} is no {kinds}: {reason}") from None


def _release(library: str, path: Path, source: LibrarySource) -> Release:
    """A library's release in a folder or wheel. Its version is that of the metadata beside the library, or
    that at the end of the folder's name (`aiter-0.1.20`); else it is the name of the folder."""
    with_metadata = [path, path.parent] if path.is_dir() else [path]
    if found := _distribution(library, [str(place) for place in with_metadata]):
        return Release(library, found.version, source, _kinds(found))
    name = path.resolve().name
    version_in_name = re.search(r"(?:^|[-_@])v?(\d+\.\d[\w.+]*)$", name)
    return Release(library, version_in_name[1] if version_in_name else name, source)


def _distribution(library: str, path: Sequence[str] | None = None) -> importlib.metadata.Distribution | None:
    """The first distribution on `path`, by default Python's own, that contains a library."""
    names = {canonicalize_name(name) for name in distributions(library)}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else [*path]):
        if canonicalize_name(distribution.metadata["Name"] or "") in names:
            return distribution
    return None


def _kinds(distribution: importlib.metadata.Distribution | None) -> tuple[str, ...]:
    """The platforms of a build: wheels for CPUs lack what GPUs run."""
    if distribution is None:
        return ALL_KINDS
    name = distribution.metadata["Name"] or ""
    return ("cpu",) if name.endswith("-cpu") or distribution.version.endswith("+cpu") else ALL_KINDS


def recorded(path: Path) -> list[Release]:
    """The releases in a file of tools/record_signatures.py, the newest last."""
    file = json.loads(path.read_bytes())
    library = file["library"]
    return [
        Release(library, release["version"], RecordedSource(release["signatures"]))
        for release in file["releases"]
    ]
