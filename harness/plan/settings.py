"""Settings, under which entries run: sets of environment variables, or the kernels/ of another revision."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UsageError
from harness.paths import ROOT, cache

PLAIN = "plain"  # the name of the setting that sets nothing
UNSET = "unset"  # stands for a variable that is not set, where values are given as text


@dataclass(frozen=True)
class Setting:
    """What entries run under: environment variables, none in the plain setting, or another source tree."""

    variables: dict[str, str | None] = field(default_factory=dict)  # None: the variable is not set
    is_rerun: bool = False  # whether it is the first setting again, in workers of its own: the A/A pair
    tree: str | None = None  # the folder of the source tree that provides kernels/; None: this checkout
    revision: str = ""  # the name of the revision that the tree is of, such as `main (1a2b3c4d5)`

    @property
    def name(self) -> str:
        parts = [self.revision] if self.revision else []
        for variable, value in self.variables.items():
            parts.append(f"{variable} unset" if value is None else f"{variable}={value}")
        name = ", ".join(parts) or PLAIN
        return f"{name} (again)" if self.is_rerun else name


def value_text(value: str | None) -> str:
    """The value of a variable as text: `unset` for None, two quotes for the empty string."""
    if value is None:
        return UNSET
    return value or "''"


def parse_setting(settings: Iterable[str]) -> Setting:
    """The setting of texts such as `NAME=VALUE`. Raises UsageError."""
    variables: dict[str, str | None] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"cannot read --set {text!r}; write NAME=VALUE")
        variables[name] = value
    parse_threads(variables.get("OMP_NUM_THREADS"))
    return Setting(variables)


def parse_threads(text: str | None) -> int | None:
    """OMP_NUM_THREADS as a number; None where it is not set."""
    if not text:
        return None
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"cannot read OMP_NUM_THREADS={text!r}; write a number of threads")
    return int(text)


LINKED = ("harness", "shapes")
"""The packages of this checkout in a revision's folder: revisions share one harness and the same cases."""


def revision_settings(names: tuple[str, str]) -> list[Setting]:
    """A setting for each of two revisions. Raises UsageError for a revision that git does not know."""
    first, second = (_commit(name) for name in names)
    if first == second:
        raise UsageError(f"{' and '.join(names)} are the same commit, {first[:9]}")
    named = zip(names, (first, second), strict=True)
    return [revision_setting(f"{name} ({commit[:9]})", commit) for name, commit in named]


def revision_setting(name: str, commit: str) -> Setting:
    return Setting(tree=str(tree(commit)), revision=name)


def tree(commit: str) -> Path:
    """The folder that holds a commit's kernels/ beside this checkout's other packages."""
    folder = cache() / "revisions" / commit
    if not (folder / "kernels").is_dir():
        packed = _git("archive", "--format=tar", commit, "kernels")
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder) as fresh,
            tarfile.open(fileobj=io.BytesIO(packed)) as files,
        ):
            files.extractall(fresh, filter="data")
            (Path(fresh) / "kernels").replace(folder / "kernels")
    for name in LINKED:
        link = folder / name
        if not link.is_symlink() or link.resolve() != ROOT / name:
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / name)
    return folder


def _commit(name: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()
    except UsageError:
        raise UsageError(f"git knows no commit {name!r} here; name a branch, a tag or a hash") from None


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise UsageError(f"git {' '.join(words[:2])}: {lines[-1].removeprefix('fatal: ')}")
    return done.stdout
