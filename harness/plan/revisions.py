"""Revisions of this repository as settings: each runs its own kernels/ under this harness."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from harness.errors import UsageError
from harness.paths import ROOT, cache
from harness.plan.settings import Setting

BESIDE = ("harness", "shapes")
"""What a setting takes of this checkout: one engine measures all revisions, on the same cases."""


def settings(names: tuple[str, str]) -> list[Setting]:
    """Of each revision, and of the first one again. Raises UsageError for one that git does not know."""
    pair = [setting(f"{name} ({commit[:9]})", commit) for name, commit in ((n, _commit(n)) for n in names)]
    if pair[0].tree == pair[1].tree:
        raise UsageError(f"{' and '.join(names)} are the same commit, {_commit(names[0])[:9]}")
    return [*pair, Setting(is_rerun=True, tree=pair[0].tree, revision=pair[0].revision)]


def setting(name: str, commit: str) -> Setting:
    return Setting(tree=str(tree(commit)), revision=name)


def tree(commit: str) -> Path:
    """The folder in which a commit's kernels/ stand beside this checkout's other packages."""
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
    for name in BESIDE:
        link = folder / name
        if not link.is_symlink() or link.resolve() != ROOT / name:
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / name)
    return folder


def _commit(name: str) -> str:
    return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise UsageError(f"git {' '.join(words[:2])}: {lines[-1].removeprefix('fatal: ')}")
    return done.stdout
