"""Reads recorded files also where they are in archives. The archive `raw.zip` of a folder has raw files of
that folder. A zip file of a whole folder is read as if it were the folder (`h200.zip/smoke/run.json`).

A recorded file is always named by the path at which it was written. Where no file has that path, the member
of an archive is read that stands for it; where there are both, the file counts.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from harness.errors import UsageError, one_line

NAME = "raw.zip"
SUMS = "SHA256SUMS"  # a member with the hashes of the others, for `sha256sum --check`
COMPRESSED = (".gz", ".npz")


class BrokenArchive(UsageError):
    """An archive, or a member of it, that cannot be read."""


def open_binary(path: Path) -> io.BufferedReader:
    """The file, or the member that stands for it. Raises OSError as Path.open does, or BrokenArchive."""
    try:
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        place = _place(path)
        if place is None:
            raise
        archive, name = place
        return io.BufferedReader(io.BytesIO(_member(archive, name)))


def read_bytes(path: Path) -> bytes:
    with open_binary(path) as file:
        return file.read()


def is_file(path: Path) -> bool:
    return path.is_file() or _place(path) is not None


def is_folder(path: Path) -> bool:
    return path.is_dir() or any(path in file.parents for file in _packed_files(path))


def below(folder: Path, pattern: str) -> list[Path]:
    """The files in a folder, at any depth and in archives, whose name matches, sorted by path."""
    files = {file for file in folder.rglob(pattern) if file.is_file()}
    members = {file for file in _packed_files(folder) if fnmatchcase(file.name, pattern)}
    return sorted(files | members)


def packed(folder: Path, takes: Callable[[str], bool]) -> bytes:
    """A zip file of those files in a folder for whose path in it `takes` returns True, with their sums. It
    has the same bytes at any time and on any machine. Raises OSError."""
    paths = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    names = sorted(filter(takes, [path.relative_to(folder).as_posix() for path in paths]))
    archive, sums = io.BytesIO(), ""
    with zipfile.ZipFile(archive, "w") as target:
        for name in names:
            data = (folder / name).read_bytes()
            sums += f"{hashlib.sha256(data).hexdigest()}  {name}\n"
            _add(target, name, data)
        _add(target, SUMS, sums.encode())
    return archive.getvalue()


def _add(target: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Adds a member to a zip file, with a fixed date and the permissions of a Unix file."""
    member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    member.create_system = 3  # Unix
    member.external_attr = 0o100644 << 16  # a regular file with the mode rw-r--r--
    member.compress_type = zipfile.ZIP_STORED if name.endswith(COMPRESSED) else zipfile.ZIP_DEFLATED
    target.writestr(member, data, compresslevel=9)


def _place(path: Path) -> tuple[Path, str] | None:
    """The archive and the name of its member that stand for a file that is not there; None if none do."""
    for folder in path.parents:
        for archive in (folder, folder / NAME):
            name = path.relative_to(folder).as_posix()
            if _is_archive(archive) and name in _names(archive):
                return archive, name
    return None


def _is_archive(path: Path) -> bool:
    return path.suffix == ".zip" and path.is_file()


def _packed_files(top: Path) -> Iterator[Path]:
    """The paths that members of archives stand for, as far as these lie below `top`. Their archive may be
    `top` itself, lie in it, be a folder above it, or be the raw.zip of a folder above it."""
    above = [archive for folder in top.parents for archive in (folder, folder / NAME)]
    for archive in (top, *above, *sorted(top.rglob(NAME))):
        if _is_archive(archive):
            folder = archive.parent if archive.name == NAME else archive
            files = (folder / name for name in _names(archive))
            yield from (file for file in files if file.is_relative_to(top))


def _names(archive: Path) -> list[str]:
    with _opened(archive) as packed:
        return [name for name in packed.namelist() if name != SUMS]


def _member(archive: Path, name: str) -> bytes:
    with _opened(archive) as packed:
        try:
            return packed.read(name)
        except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as error:
            raise BrokenArchive(f"cannot read {archive}, {name}: {one_line(error)}") from None


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except zipfile.BadZipFile:
        raise BrokenArchive(f"cannot read {archive}: it is no zip archive, or it is broken") from None
    except OSError as error:
        raise BrokenArchive(f"cannot read {archive}: {one_line(error)}") from None
