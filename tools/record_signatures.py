"""Records the signatures of a library's functions that implementations (rows) use, for each release.

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
from harness.paths import ROOT
from kernels.interfaces.library_source import LibrarySource, NotThere
from shapes.toml import read_toml

DATA = ROOT / "tests" / "kernels" / "signatures"
RELEASES = DATA / "releases.toml"
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Source:
    """Where a release is: a distribution on pypi, or a repository on github."""

    origin: str  # `pypi` or `github`
    name: str
    at: str  # a version on pypi, a tag or a commit on github

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

    def download(self, folder: Path) -> None:
        """Puts the wheel or checkout into the folder. Raises SystemExit."""
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


def used_places(library: str) -> list[str]:
    """The places of a library, `module.function`, that rows use."""
    return sorted({place for row in rows() for place in places(row, library)})


def signatures(library: str, path: Path) -> dict[str, str | None]:
    """Place -> its signature; None if the release lacks the place, `""` if its sources have no signature."""
    source = LibrarySource.of(path)
    if not source.has(library):
        raise SystemExit(f"{path} has no {library}")
    texts: dict[str, str | None] = {}
    for place in used_places(library):
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
    old_releases = json.loads(file.read_text())["releases"] if file.exists() else []
    complete: dict[str, dict[str, str | None]] = {
        old.get("source"): old["signatures"]
        for old in old_releases
        if sorted(old["signatures"]) == used_places(library)
    }
    recorded = []
    for release in sorted(releases, key=lambda release: Version(release["version"])):
        source = Source.parse(release["source"])
        path = source.within(folder)
        if path is None and release["source"] not in complete:
            source.download(folder)
            path = source.within(folder)
            if path is None:
                raise SystemExit(f"{folder} has no {release['source']}")
        texts = signatures(library, path) if path else complete[release["source"]]
        recorded.append({**release, "signatures": texts})
    data.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"library": library, "releases": recorded}, indent=1) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("libraries", nargs="*")
    options = parser.parse_args()
    releases = read_toml(RELEASES)
    unknown = sorted(set(options.libraries) - set(releases))
    if unknown:
        parser.error(f"{RELEASES.relative_to(ROOT)} lists no {', '.join(unknown)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for library in options.libraries or releases:
        print(record(library, releases[library], options.folder).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
