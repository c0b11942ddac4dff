"""Records what releases of a library have at the places that rows take: facts for the tests.

python -m tools.record_signatures aiter --as 0.1.21 --commit e404860 --date 2026-08-22 PATH

PATH is a wheel or a folder of packages, as for `doctor --bind`; nothing of it is imported. A release that is
recorded already is recorded anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from packaging.version import Version

from harness.doctor.bindings import libraries, rows, symbols
from kernels import signatures
from kernels.library_source import LibrarySource, NotThere

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "kernels" / "signatures"


def places(library: str) -> list[str]:
    """That rows take of a library."""
    taking = [row for row in rows() if library in libraries(row)]
    taken = {place for row in taking for symbol in symbols(row.symbols) for place in symbol.places}
    return sorted(place for place in taken if place.partition(".")[0] == library.partition(".")[0])


def record(library: str, version: str, commit: str, date: str, path: Path, data: Path = DATA) -> Path:
    """Gives the file that was written."""
    source = LibrarySource.of(path)
    if not source.has(library):
        raise SystemExit(f"{path} has no {library}")
    texts: dict[str, str | None] = {}
    for place in places(library):
        try:
            signature = source.signature(place)
            texts[place] = "" if signature is None else signatures.text(signature)
        except NotThere:
            texts[place] = None
    file = data / f"{library}.json"
    known = json.loads(file.read_text()) if file.exists() else {"library": library, "releases": []}
    others = [release for release in known["releases"] if release["version"] != version]
    release = {"version": version, "commit": commit, "date": date, "signatures": texts}
    known["releases"] = sorted([*others, release], key=lambda r: Version(r["version"]))
    data.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", help="its module")
    parser.add_argument("path", type=Path)
    parser.add_argument("--as", dest="version", required=True, help="the release's version")
    parser.add_argument("--commit", default="", help="of its source, where that is known")
    parser.add_argument("--date", required=True, help="of the release or commit, YYYY-MM-DD")
    given = parser.parse_args()
    print(record(given.library, given.version, given.commit, given.date, given.path).relative_to(ROOT))


if __name__ == "__main__":
    main()
