"""Files of a set of kernel tables: where AIConfigurator's layouts have them, and their rows.

A set is SYSTEM/ENGINE/VERSION, as h200_sxm/sglang/0.5.9. Until July 2026 that was a folder of tables; since
then each op has its own, SYSTEM/OP/ENGINE/VERSION, and a set is named as before. Where a version was not
timed anew, `reuse.yaml` beside the tables names the version whose times stand for it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.serving.names import engine_name

SUFFIXES = (".csv", ".txt", ".parquet")
REUSED = re.compile(r"^- table: *(\S+)\n +from_version: *['\"]?([^\s'\"]+)", re.MULTILINE)
ANY_VERSION = ("custom_allreduce_perf",)  # seldom timed anew: the last version's that is there stands in
Row = dict[str, Any]


def table_files(folder: Path, stems: Collection[str]) -> dict[str, Path]:
    """The file of each stem that the set has. Raises UsageError with one line where it has none."""
    sets = _sets(folder)
    if folder.is_dir():
        found = _in(folder, stems)
    else:
        system, engine, version = folder.parent.parent, folder.parent.name, folder.name
        homes = sorted(system.glob(f"*/{engine}/{version}")) if system.is_dir() else []
        if not homes:
            raise UsageError(f"cannot read tables in {folder}: no such folder")
        found = {stem: path for home in homes for stem, path in _in(home, stems).items()}
        for home in homes:
            found = _reused(home, stems) | found
    of_an_engine = engine_name(folder.parent.name) in ("sglang", "trtllm", "vllm")
    for stem in set(ANY_VERSION) & set(stems) - set(found) if of_an_engine else ():
        if other := _of_another_version(folder, stem):
            found[stem] = other
    if not found:
        wanted = f"one or more of {', '.join(stems)} as .csv or .parquet"
        several = f"it has sets of tables: give {folder} with one of {', '.join(sets)}" if sets else ""
        raise UsageError(f"no tables in {folder}; {several or 'wanted: ' + wanted}")
    return found


def _in(folder: Path, stems: Collection[str]) -> dict[str, Path]:
    there = {stem: next((p for s in SUFFIXES if (p := folder / (stem + s)).exists()), None) for stem in stems}
    return {stem: path for stem, path in there.items() if path}


def _reused(home: Path, stems: Collection[str]) -> dict[str, Path]:
    try:
        text = (home / "reuse.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    versions = dict(REUSED.findall(text))
    return {
        stem: path
        for stem in stems
        if stem in versions
        for path in _in(home.parent / versions[stem], [stem]).values()
    }


def _of_another_version(folder: Path, stem: str) -> Path | None:
    """Of the same system and engine."""
    system, engine = folder.parent.parent, folder.parent.name
    places = [
        path
        for pattern in (f"{engine}/*/{stem}.*", f"*/{engine}/*/{stem}.*")
        for path in system.glob(pattern)
        if path.suffix in SUFFIXES
    ]
    return max(places, key=lambda path: _version(path.parent.name), default=None)


def _version(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _sets(folder: Path) -> list[str]:
    """ENGINE/VERSION of each set of a system's folder, in either layout."""
    places = [*folder.glob("*/*/gemm_perf.*"), *folder.glob("gemm/*/*/gemm_perf.*")]
    return sorted({"/".join(place.parts[-3:-1]) for place in places})


def read_rows(
    path: Path, columns: Collection[str], wanted: Mapping[str, Collection[Any]]
) -> Iterator[tuple[int, Row]]:
    """(line, row) of those whose columns have a wanted value; a row has those of `columns` that the file has.

    Raises UsageError where the file cannot be read.
    """
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path, columns, wanted), 2)
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line, row in enumerate(csv.DictReader(file), 2):
                if all(number(row[name]) in values for name, values in wanted.items() if name in row):
                    yield line, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _parquet(path: Path, columns: Collection[str], wanted: Mapping[str, Collection[Any]]) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"cannot read {path}: parquet needs pyarrow (pip install pyarrow), or save it as CSV"
        ) from None
    if path.read_bytes()[:7] == b"version":
        raise UsageError(f"{path} is not there, only Git LFS's word for it: run `git lfs pull`")
    try:
        names = set(pyarrow.parquet.read_schema(path).names)
        filters = [(name, "in", list(values)) for name, values in wanted.items() if name in names]
        chosen = [name for name in columns if name in names]
        return pyarrow.parquet.read_table(path, columns=chosen, filters=filters or None).to_pylist()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def number(value: Any) -> Any:
    """A float where it is a number, else as it stands; words like bfloat16 stay words."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
