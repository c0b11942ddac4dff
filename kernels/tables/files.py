"""The files of a library in a checkout, in site-packages, in an unpacked image or in a wheel."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import zipfile
import zlib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kernels.tables import RULES_TOML

RECORDED = Path(__file__).parent / "recorded"
"""Has a zip for each library, with its tables for DeepSeek's shapes. tools/record_tables.py makes them."""

VERSION = re.compile(r"""^(?:__version__|version)\b[^=\n]*=.*?['"]([^'"]+)['"]""", re.MULTILINE)
"""A line such as `__version__ = version = '0.1.20'` in a package's source."""

UNREADABLE = (OSError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""The exceptions that reading a file or a damaged zip raises."""

Place = str | Path
"""A file or folder: in the package a str such as `aiter/configs`; a Path where a variable names it."""


class TableError(ValueError):
    """A table or library cannot be read. The text is one line that says which, and why."""

    def __init__(self, reason: str, name: str = "", line: int = 0) -> None:
        """name, line: the file that cannot be read, with which the text begins, and the line in it"""
        super().__init__(f"{name}: {reason}" if name else reason)
        self.reason, self.name, self.line = reason, name, line


class Files:
    """The text files of a package. Their names include the package's: `aiter/configs/tuned_fmoe.csv`."""

    def __init__(self, package: str, path: Path) -> None:
        """path: a wheel or another zip, or a folder that contains the package. Raises TableError."""
        self.package, self.path = package, path
        try:
            self._zip = zipfile.ZipFile(path) if path.is_file() else None
        except zipfile.BadZipFile:
            raise TableError(f"{path} is neither a folder nor a wheel") from None
        except OSError as error:
            raise TableError(f"cannot read {path}: {error.strerror}") from None
        self._root = path
        if self._zip:
            if not any(name.startswith(f"{package}/") for name in self._zip.namelist()):
                raise TableError(f"{path} contains no package {package}")
        else:
            self._root = _parent(package, path)

    def names(self, pattern: str) -> list[str]:
        """The names that match a shell pattern, sorted. `*` does not match `/`. A zip lists no folders."""
        if self._zip:
            depth = pattern.count("/")
            as_deep = [name for name in self._zip.namelist() if name.count("/") == depth]
            return sorted(name for name in as_deep if fnmatch(name, pattern))
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(pattern))

    def inside(self, folder: Place) -> list[str]:
        """The names of the files in a folder, without its own. Raises TableError."""
        if isinstance(folder, str):
            return [name.rpartition("/")[2] for name in self.names(f"{folder}/*")]
        try:
            return sorted(path.name for path in folder.iterdir())
        except OSError as error:
            raise TableError(error.strerror or str(error), str(folder)) from None

    def _path(self, name: Place) -> Path:
        return name if isinstance(name, Path) else self._root / name

    def has(self, name: Place) -> bool:
        if self._zip and isinstance(name, str):
            return name in self._zip.NameToInfo
        try:
            return self._path(name).is_file()
        except OSError:  # no permission to enter the folder
            return False

    def text(self, name: Place) -> str:
        """The text of a file, with U+FFFD for bytes that are not UTF-8. Raises TableError."""
        path = self._path(name)
        try:
            if self._zip and isinstance(name, str):
                return self._zip.read(name).decode(errors="replace")
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise TableError("is not a regular file", str(name))  # reading a pipe may never end
            return path.read_bytes().decode(errors="replace")
        except UNREADABLE as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise TableError(reason or str(error), str(name)) from None

    @functools.cached_property
    def version(self) -> str:
        """The version in the metadata or the source, else the commit; empty where there is neither."""
        try:
            return self._named_version() or self._commit()
        except (OSError, TableError):
            return ""

    def _named_version(self) -> str:
        """The version in the metadata or the source; empty where there is none."""
        exact = self.names(f"{self.package}-*.dist-info/METADATA")
        for metadata in exact or self.names(f"*{self.package}-*.dist-info/METADATA"):  # such as amd_aiter
            for line in self.text(metadata).splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ").strip()
        for name in (f"{self.package}/_version.py", f"{self.package}/version.py"):
            match = VERSION.search(self.text(name)) if self.has(name) else None
            if match:
                return match[1]
        return ""

    def _commit(self) -> str:
        """`commit 1234567`, read from the files of a git checkout; empty outside of one."""
        for folder in (self._root, *self._root.parents):
            head = folder / ".git" / "HEAD"
            if head.is_file():
                commit = head.read_text("utf-8", errors="replace").strip()
                if commit.startswith("ref: "):
                    branch = folder / ".git" / commit.removeprefix("ref: ")
                    commit = branch.read_text("utf-8", errors="replace").strip() if branch.is_file() else ""
                return f"commit {commit[:7]}" if commit else ""
        return ""


def json_object(text: str) -> dict[str, Any]:
    """Reads the text of a JSON file. Raises TableError."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}" if text.strip() else "empty, which is not JSON"
        raise TableError(reason, line=error.lineno) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise TableError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(whole, dict):
        raise TableError("not a JSON object")
    return whole


def within(folder: Place, name: str) -> Place:
    """The file or folder of this name in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def _parent(package: str, path: Path) -> Path:
    """The folder that contains the package. Raises TableError."""
    if not path.is_dir():
        raise TableError(f"{path}: no such file or folder")
    if path.name == package and (path / "__init__.py").is_file():
        return path.parent
    for place in RULES_TOML["places"]:
        for folder in sorted(path.glob(place.format(package=package))):
            if (folder / "__init__.py").is_file() or (folder / "configs").is_dir():
                return folder.parent
    raise TableError(f"{path} contains no package {package}: give its checkout, wheel or site-packages")


def library(package: str, path: Path | None = None) -> Files:
    """The files of a library at a path; the word `recorded` stands for that of the recorded ones. Without a
    path, those of the installed library, or the recorded ones if it is not installed. Raises TableError."""
    recorded = RECORDED / f"{package}.zip"
    if path is not None:
        return Files(package, recorded if path == Path("recorded") else path)
    spec = importlib.util.find_spec(package)  # this imports nothing
    for folder in (spec.submodule_search_locations if spec else None) or ():
        is_other_package = package == "aiter" and not Path(folder, "configs").is_dir()  # that of PyPI
        if not is_other_package:
            return Files(package, Path(folder).parent)
    return Files(package, recorded)
