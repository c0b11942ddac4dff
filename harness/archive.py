"""The archive of a run's raw files: they are written as plain files, and packed into one `raw.zip` when the
run is over.

A recorded file is always named by the path at which it was written. Where there is no such file, the member
of that name is read from the archive of a folder above; where both are there, the file counts. A zip file of
a whole folder is read as the folder that it was: `h200.zip/smoke/run.json`.
"""

from __future__ import annotations

import glob as plain_glob
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from harness.errors import UsageError, one_line
from harness.files import replace

NAME = "raw.zip"
SUMS = "SHA256SUMS"  # a member with the hashes of the others, as sha256sum writes and checks them
NEVER_PACKED = ("ab.json", "journal.jsonl", "experiment.json", "ledger.jsonl", "live.jsonl", "NOTES.md")
"""Files that people read, and files that a resumed run appends to."""
COMPRESSED = (".gz", ".npz")


class BrokenArchive(UsageError):
    """An archive, or a member of it, that cannot be read or was altered after packing."""


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


def glob(pattern: str) -> list[str]:
    """Files and folders whose path matches, as glob.glob with `**` finds them, sorted."""
    paths = set(plain_glob.glob(pattern, recursive=True))  # noqa: PTH207
    parts = Path(pattern).parts
    plain = next((i for i, part in enumerate(parts) if plain_glob.has_magic(part)), len(parts))
    for file in _packed_files(Path(*parts[:plain])):
        paths |= {str(path) for path in (file, *file.parents) if _matches(path.parts, parts)}
    return sorted(paths)


def verify(folder: Path) -> None:
    """Reads every member of the folder's archive. Raises BrokenArchive where one is not what was packed."""
    archive = folder / NAME
    if archive.is_file():
        for member in _names(archive):
            _member(archive, member)


def pack(folder: Path) -> int:
    """Packs a folder's raw files, and returns how many. Members that were packed before stay, unless there is
    a newer file.

    A kill loses nothing: the archive is complete on the disk before the first file is removed, and packing
    again continues. Raises UsageError where a folder inside has an archive of its own, OSError, or
    BrokenArchive.
    """
    archive = folder / NAME
    for half_written in folder.glob(f".{NAME}.*"):
        half_written.unlink()
    raw = [path for path in _plain_files(folder) if path.name not in NEVER_PACKED and path != archive]
    files = {file.relative_to(folder).as_posix(): file for file in sorted(raw)}
    if inner := next((name for name in files if Path(name).name == NAME), ""):
        raise UsageError(f"{folder / inner} packs a part of {folder} by itself: unpack it first")
    if files:
        before = _names(archive) if archive.exists() else []

        def read(name: str) -> bytes:
            return files[name].read_bytes() if name in files else _member(archive, name)

        replace(archive, _zipped({*files, *before}, read))
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        verify(folder)
    for file in files.values():
        file.unlink()
    for inside in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(inside.iterdir()):
            inside.rmdir()
    return len(files)


def packed(folder: Path, takes: Callable[[str], bool]) -> bytes:
    """A zip file of those files of a folder for whose path in it `takes` returns True. Raises OSError."""
    names = [file.relative_to(folder).as_posix() for file in _plain_files(folder)]
    return _zipped(filter(takes, names), lambda name: (folder / name).read_bytes())


def _plain_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _zipped(names: Iterable[str], read: Callable[[str], bytes]) -> bytes:
    """A zip file that has the same bytes at any time and on any machine."""
    archive, sums = io.BytesIO(), ""
    with zipfile.ZipFile(archive, "w") as target:
        for name in [*sorted(names), SUMS]:
            data = sums.encode() if name == SUMS else read(name)
            sums += _sum(name, data)
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
    """The paths below `top` of the members of all archives in that folder, below it or above it; `top` may
    itself be an archive."""
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
            data, sums = packed.read(name), packed.read(SUMS)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, RuntimeError) as error:
            raise BrokenArchive(f"cannot read {archive}, {name}: {one_line(error)}") from None
    if _sum(name, data).encode() not in sums.splitlines(keepends=True):
        raise BrokenArchive(f"{archive}, {name}: altered since it was packed")
    return data


def _sum(name: str, data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}  {name}\n"


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except (OSError, zipfile.BadZipFile) as error:
        raise BrokenArchive(f"cannot read {archive}: {one_line(error)}") from None


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match; `**` stands for any number of folders, also for none."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
