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

SUFFIXES = (".csv", ".txt", ".parquet")
REUSED = re.compile(r"^- table: *(\S+)\n +from_version: *['\"]?([^\s'\"]+)", re.MULTILINE)
Row = dict[str, Any]


def table_files(folder: Path, stems: Collection[str]) -> dict[str, Path]:
    """The file of each stem that the set has. Raises UsageError with one line where it has none."""
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
    if not found:
        sets = [*folder.glob("*/*/gemm_perf.*"), *folder.glob("gemm/*/*/gemm_perf.*")]
        names = sorted({"/".join(place.parts[-3:-1]) for place in sets})
        wanted = f"wanted: one or more of {', '.join(stems)} as .csv or .parquet"
        several = f"it has sets of tables: give {folder} with one of {', '.join(names)}"
        raise UsageError(f"no tables in {folder}; {several if names else wanted}")
    return found


def _in(folder: Path, stems: Collection[str]) -> dict[str, Path]:
    places = [(stem, folder / (stem + suffix)) for stem in stems for suffix in reversed(SUFFIXES)]
    return {stem: path for stem, path in places if path.exists()}


def _reused(home: Path, stems: Collection[str]) -> dict[str, Path]:
    try:
        versions = dict(REUSED.findall((home / "reuse.yaml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return {}
    wanted = {stem: versions[stem] for stem in stems if stem in versions}
    return {
        stem: path for stem, version in wanted.items() for path in _in(home.parent / version, [stem]).values()
    }


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
