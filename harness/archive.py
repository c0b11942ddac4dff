"""Recorded files in archives: `raw.zip` in a folder has the raw files of that folder; a zip file of a whole
folder is read as the folder that it was (`h200.zip/smoke/run.json`).

A recorded file is always named by the path at which it was written. Where there is no such file, the member
of that name is read from the archive of a folder above; where both are there, the file counts.
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
        return io.BufferedReader(io.BytesIO(_member(*place)))


def read_bytes(path: Path) -> bytes:
    with open_binary(path) as file:
        return file.read()


def is_file(path: Path) -> bool:
    return path.is_file() or _place(path) is not None


def is_folder(path: Path) -> bool:
    return path.is_dir() or any(path in file.parents for file in _packed_files(path))


def below(folder: Path, pattern: str) -> list[Path]:
    """Files at any depth whose name matches, sorted by path."""
    packed = {file for file in _packed_files(folder) if fnmatchcase(file.name, pattern)}
    return sorted({file for file in folder.rglob(pattern) if file.is_file()} | packed)


def packed(folder: Path, takes: Callable[[str], bool]) -> bytes:
    """A zip file of those files of a folder for whose path in it `takes` returns True. It has the same bytes
    at any time and on any machine. Raises OSError."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    names = filter(takes, (file.relative_to(folder).as_posix() for file in files))
    archive, sums = io.BytesIO(), ""
    with zipfile.ZipFile(archive, "w") as target:
        for name in [*sorted(names), SUMS]:
            data = sums.encode() if name == SUMS else (folder / name).read_bytes()
            sums += f"{hashlib.sha256(data).hexdigest()}  {name}\n"
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.create_system, about.external_attr = 3, 0o100644 << 16  # as on Unix
            about.compress_type = zipfile.ZIP_STORED if name.endswith(COMPRESSED) else zipfile.ZIP_DEFLATED
            target.writestr(about, data, compresslevel=9)
    return archive.getvalue()


def _place(path: Path) -> tuple[Path, str] | None:
    """The archive and the member that stand for a file that is not there."""
    for folder in path.parents:
        for archive in (folder, folder / NAME):
            name = path.relative_to(folder).as_posix()
            if _is_archive(archive) and name in _names(archive):
                return archive, name
    return None


def _is_archive(path: Path) -> bool:
    return path.suffix == ".zip" and path.is_file()


def _packed_files(top: Path) -> Iterator[Path]:
    """The paths below `top` of the members of all archives in it, above it, or that it is itself."""
    whole = (folder for folder in (top, *top.parents) if folder.name != NAME)
    above = (folder / NAME for folder in top.parents)
    for archive in (*whole, *above, *sorted(top.rglob(NAME))):
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
