"""Whether rows bind to a version of their library: by its sources, or by signatures recorded of them.

Nothing of a library is imported, so that a maintainer without a GPU sees what a release broke.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kernels
from harness.errors import UsageError, one_line
from kernels.binding import Operator, Symbol, Taken
from kernels.interfaces import signatures
from kernels.interfaces.library_source import LibrarySource, NotThere, SignatureSource
from kernels.platform import distribution_names, version
from kernels.vendor import Vendor, is_older, last_read

BINDS, BREAKS, OLDER, UNKNOWN = "binds", "breaks", "too old", "not told"
"""Of a row: all calls fit; one does not; the version is older than the row's first; the sources tell of no
signature (of C++, or made as the module is imported), or not of that of the row's operator of torch."""

ALL_KINDS = ("cuda", "rocm", "cpu")


@dataclass(frozen=True)
class RecordedSource:
    """Signatures of one library's release by dotted place: for what is not there, why; None for what is there
    and does not tell."""

    known: Mapping[str, inspect.Signature | NotThere | None]

    @staticmethod
    def read(texts: Mapping[str, str | None]) -> RecordedSource:
        """Of texts: None for what is not there, `""` for what does not tell."""
        return RecordedSource(
            {
                place: NotThere(f"no {place}") if text is None else signatures.parse(text) if text else None
                for place, text in texts.items()
            }
        )

    def signature(self, place: str) -> inspect.Signature | None:
        known = self.known.get(place, NotThere(f"{place} was not recorded"))
        if isinstance(known, NotThere):
            raise known
        return known


@dataclass(frozen=True)
class Release:
    """A version of one library, which is named by its module.

    kinds: platforms that it was built for
    pins:  of other libraries the one version that it requires
    """

    library: str
    version: str
    source: SignatureSource
    kinds: tuple[str, ...] = ALL_KINDS
    pins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowBinding:
    """reason: what does not fit, or what is not told; without: wished arguments that the version lacks;
    last_read: the newest release that was read, where this one is newer"""

    op: str
    implementation: str
    library: str
    version: str
    status: str
    reason: str
    without: str
    last_read: str


def bindings(releases: Sequence[Release]) -> list[RowBinding]:
    """Of every row that takes something of them and runs where they do, release by release; then of the rows
    for which a version is too old that they pin of a library that is not among them."""
    given = {release.library for release in releases}
    taking = {row: libraries(row) for row in rows()}
    return [
        _bind(row, release)
        for release in releases
        for row, names in taking.items()
        if release.library in names and set(row.kinds) & set(release.kinds)
    ] + [
        _row_binding(row, library, pinned, OLDER, f"needs {first} or later; {release.library} pins {pinned}")
        for release in releases
        for library, pinned in release.pins.items()
        for row, names in taking.items()
        if library in names - given and is_older(pinned, first := row.first_version(library))
    ]


def rows() -> list[Vendor]:
    """Those that take something of a library."""
    everything = (i for op in kernels.OPS for i in kernels.implementations(op))
    return [i for i in everything if isinstance(i, Vendor) and i.symbols]


def libraries(row: Vendor) -> set[str]:
    """Its own, and others that it takes something of."""
    own = _own(row)
    others = {_root(place) for symbol in symbols(row.symbols) for place in symbol.places}
    return {own, *others - {_root(own)}}


def places(row: Vendor, library: str) -> set[str]:
    """Dotted, that it takes of that library."""
    if library not in libraries(row):
        return set()
    everything = (place for symbol in symbols(row.symbols) for place in symbol.places)
    return {place for place in everything if _root(place) == _root(library)}


def _own(row: Vendor) -> str:
    return row.library or row.provider


def _root(module: str) -> str:
    return module.partition(".")[0]


def symbols(taken: Sequence[Taken]) -> Iterator[Symbol]:
    for entry in taken:
        yield from entry if isinstance(entry, tuple) else (entry,)


def _bind(row: Vendor, release: Release) -> RowBinding:
    root = _root(release.library)
    complaints, untold, without, told, is_silent = [], [], set(), 0, False
    for entry in row.symbols:
        alternatives = list(symbols([entry]))
        packages = {_root(place) for symbol in alternatives for place in symbol.places}
        if root not in packages:
            continue
        symbol, signature, complaint = _first(alternatives, release.source)
        if symbol is None and packages != {root}:  # another library may have it
            untold.append(alternatives[0].places[0])
        elif complaint:
            complaints.append(complaint)
        elif symbol and symbol.is_told(signature):
            told += 1
            without |= symbol.lacks(signature)
        else:
            untold.append(alternatives[0].places[0])
            is_silent |= isinstance(symbol, Operator)  # the kernel itself
    reason = "; ".join(dict.fromkeys(complaints)) or (f"not told: {', '.join(untold)}" if untold else "")
    status = BREAKS if complaints else UNKNOWN if is_silent or (untold and not told) else BINDS
    first = row.first_version(release.library)
    if is_older(release.version, first):
        status, reason = OLDER, f"needs {first} or later"
    return _row_binding(row, release.library, release.version, status, reason, ", ".join(sorted(without)))


def _row_binding(
    row: Vendor, library: str, version: str, status: str, reason: str, without: str = ""
) -> RowBinding:
    return RowBinding(
        row.op, row.name, library, version, status, reason, without, last_read(library, version)
    )


def _first(
    alternatives: Sequence[Symbol], source: SignatureSource
) -> tuple[Symbol | None, inspect.Signature | None, str]:
    """The first alternative that exists, its signature, and what is wrong with it; or what is missing."""
    missing = ""
    for symbol in alternatives:
        try:
            _, signature = symbol.signature_in(source)
        except NotThere as error:
            missing = missing or _when(symbol, str(error))
            continue
        complaint = symbol.complaint(signature)
        return symbol, signature, _when(symbol, complaint) if complaint else ""
    return None, None, missing


def _when(symbol: Symbol, complaint: str) -> str:
    return f"{symbol.when}: {complaint}" if symbol.when else complaint


def wanted_libraries() -> list[str]:
    return sorted({library for row in rows() for library in libraries(row)})


def installed() -> list[Release]:
    releases = []
    for library in wanted_libraries():
        if known := version(library):
            found = next(_distributions(library), None)
            kinds = _kinds(found) if found else ALL_KINDS
            releases.append(Release(library, known, LibrarySource.installed(_root(library)), kinds))
    return releases


def releases_in(path: Path) -> list[Release]:
    """In a folder of packages, a wheel, or a file of recorded signatures. Raises UsageError."""
    wanted = wanted_libraries()
    try:
        if path.suffix == ".json":
            return recorded(path)
        source = LibrarySource.of(path)
        return [_release(library, path, source) for library in wanted if source.has(library)]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"{path} is no folder of packages, wheel, or file of recorded signatures: {one_line(error)}"
        ) from None


def _release(library: str, path: Path, source: LibrarySource) -> Release:
    """Its version is that of the metadata beside it; else what a folder's name ends with (`aiter-0.1.20`), or
    the name."""
    beside = [path, path.parent] if path.is_dir() else [path]
    if found := next(_distributions(library, [str(place) for place in beside]), None):
        return Release(library, found.version, source, _kinds(found), _pins(found))
    name = path.resolve().name
    number = re.search(r"(?:^|[-_@])v?(\d+\.\d[\w.+]*)$", name)
    return Release(library, number[1] if number else name, source)


def _distributions(
    library: str, path: Sequence[str] | None = None
) -> Iterator[importlib.metadata.Distribution]:
    """That bring a library, on Python's path or that one."""
    names = {canonicalize_name(name) for name in distribution_names(library)}
    here = (
        importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=[*path])
    )
    return (one for one in here if canonicalize_name(one.metadata["Name"] or "") in names)


def _kinds(distribution: importlib.metadata.Distribution) -> tuple[str, ...]:
    """Platforms of a build: wheels for CPUs lack what GPUs run."""
    name = distribution.metadata["Name"] or ""
    is_for_cpus = name.endswith("-cpu") or distribution.version.endswith("+cpu")
    return ("cpu",) if is_for_cpus else ALL_KINDS


def _pins(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """The versions of rows' libraries that it requires exactly on this machine, whatever its extras."""
    brings = {
        canonicalize_name(n): library for library in wanted_libraries() for n in distribution_names(library)
    }
    pins = {}
    for requirement in map(Requirement, distribution.requires or ()):
        library = brings.get(canonicalize_name(requirement.name))
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        if library and exact and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            pins[library] = exact[0]
    return pins


def recorded(path: Path) -> list[Release]:
    """As tools/record_signatures.py writes them, the newest last."""
    file = json.loads(path.read_text())
    library = file["library"]
    return [
        Release(library, release["version"], RecordedSource.read(release["signatures"]))
        for release in file["releases"]
    ]
