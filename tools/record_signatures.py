"""Records the signatures that releases of a library have at the places which implementations (rows) use.

    python -m tools.record_signatures FOLDER [LIBRARY ...]

For a new release, add one line to tests/kernels/signatures/releases.toml and run this command. It downloads
what is not recorded yet into FOLDER, a wheel by pip or a source by git, and neither imports nor runs anything
of it. Then `python -m harness doctor --bind tests/kernels/signatures/LIBRARY.json` says what broke.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from harness.doctor.bindings import places, rows
from kernels.interfaces.library_source import LibrarySource, NotThere
from shapes.toml import read_toml

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "kernels" / "signatures"
RELEASES = DATA / "releases.toml"
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Source:
    """A distribution with a version on pypi, or a repository with a tag or commit on github."""

    origin: str
    name: str
    at: str

    @staticmethod
    def parse(text: str) -> Source:
        """Reads `pypi: flashinfer-python 0.7.2` or `github: ROCm/aiter@v0.1.20`."""
        origin, _, place = text.partition(": ")
        name, _, at = place.partition("@" if origin == "github" else " ")
        if origin not in ("pypi", "github") or not name or not at:
            raise SystemExit(f"{text!r} is no source of a release")
        return Source(origin, name, at)

    def within(self, folder: Path) -> Path | None:
        """The wheel or checkout in the folder; None if it is not there."""
        if self.origin == "github":
            checkout = self._checkout(folder)
            return checkout if checkout.is_dir() else None
        return next(folder.glob(f"{self.name.replace('-', '_')}-{self.at}-*.whl"), None)

    def bring(self, folder: Path) -> None:
        if self.origin == "github":
            checkout = str(self._checkout(folder))
            _call("git", "init", "--quiet", checkout)
            _call("git", "-C", checkout, "fetch", "--quiet", "--depth=1", f"{GITHUB}{self.name}", self.at)
            _call("git", "-C", checkout, "checkout", "--quiet", "FETCH_HEAD")
        else:
            wheel = ("--no-deps", "--only-binary=:all:", f"{self.name}=={self.at}")
            _call(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *wheel)

    def _checkout(self, folder: Path) -> Path:
        return folder / f"{self.name.rpartition('/')[2]}@{self.at}"


def _call(*command: str) -> None:
    if subprocess.run(command).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def taken(library: str) -> list[str]:
    """The places of a library that rows use."""
    return sorted({place for row in rows() for place in places(row, library)})


def read(library: str, path: Path) -> dict[str, str | None]:
    """Place -> its signature; None if the release has no such place, `""` if its sources have no
    signature."""
    source = LibrarySource.of(path)
    if not source.has(library):
        raise SystemExit(f"{path} has no {library}")
    texts: dict[str, str | None] = {}
    for place in taken(library):
        try:
            signature = source.signature(place)
            texts[place] = "" if signature is None else str(signature)
        except NotThere:
            texts[place] = None
    return texts


def record(library: str, releases: list[dict[str, str]], folder: Path, data: Path = DATA) -> Path:
    """Writes the file of a library and returns its path. A release that is not in the folder is kept as it
    was recorded if all places were recorded; else it is downloaded."""
    file = data / f"{library}.json"
    before = json.loads(file.read_text())["releases"] if file.exists() else []
    whole = [old for old in before if sorted(old["signatures"]) == taken(library)]
    known: dict[str, dict[str, str | None]] = {old.get("source"): old["signatures"] for old in whole}
    recorded = []
    for release in sorted(releases, key=lambda release: Version(release["version"])):
        source = Source.parse(release["source"])
        path = source.within(folder)
        if path is None and release["source"] not in known:
            source.bring(folder)
            path = source.within(folder)
            if path is None:
                raise SystemExit(f"{folder} has no {release['source']}")
        signatures = read(library, path) if path else known[release["source"]]
        recorded.append({**release, "signatures": signatures})
    data.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"library": library, "releases": recorded}, indent=1) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("libraries", nargs="*")
    given = parser.parse_args()
    releases = read_toml(RELEASES)
    if unknown := set(given.libraries) - set(releases):
        parser.error(f"{RELEASES.relative_to(ROOT)} lists no {', '.join(sorted(unknown))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    for library in given.libraries or releases:
        print(record(library, releases[library], given.folder).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
