"""Loading recorded runs: their folders, and all cells as one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness import archive
from harness.errors import UsageError
from harness.results.journal import Journal
from harness.results.schema import KEYS, CaseDone, Cell, Samples
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import MARGIN, Comparison, compare

if TYPE_CHECKING:
    import pandas


WHERE = ("run", "suite", "machine", "device", "host")
"""Columns before those of the cell."""


def run_folders(path_or_glob: str | Path) -> list[Path]:
    """Run folders at a path (a run, its cells.jsonl, or any folder above runs) or matching a glob."""
    text = str(path_or_glob)
    path = Path(text)
    matches = [text] if archive.is_folder(path) or archive.is_file(path) else archive.glob(text)
    folders: dict[Path, None] = {}
    for match in map(Path, matches):
        folder = match if archive.is_folder(match) else match.parent
        is_run = archive.is_file(folder / "run.json")
        if is_run:
            folders[folder] = None
        elif folder == match:  # what lies beside a file that is no run is not asked for
            folders |= dict.fromkeys(file.parent for file in archive.below(folder, "run.json"))
    if not folders:
        raise UsageError(f"no run at {text!r}; a run is a folder with run.json and cells.jsonl")
    return list(folders)


def load(path_or_glob: str | Path) -> pandas.DataFrame:
    """One row per cell of every finished case, with the run it belongs to and the machine it ran on; device:
    empty where the run's own measured it.

    Raises UsageError where there is no run, one cannot be read, or its schema is newer.
    """
    import pandas

    rows = []
    for folder in run_folders(path_or_glob):
        journal = Journal(folder)
        run = journal.run()
        machine = run.provenance.get("machine", {})
        hosts = {"": machine.get("host", "")} | {device.name: device.host for device in journal.devices()}
        for records in journal.finished().values():
            device = next(record.device for record in records if isinstance(record, CaseDone))
            where = (run.id, run.suite, machine.get("device", ""), device, hosts.get(device, ""))
            rows += [
                dict(zip(WHERE, where, strict=True)) | cell.model_dump()
                for cell in records
                if isinstance(cell, Cell)
            ]
    columns = [
        *WHERE,
        *(KEYS.get(name, name) for name in Cell.model_fields if name != "kind"),
    ]
    return pandas.DataFrame(rows, columns=columns)


def paired(
    a: Samples, b: Samples, *, noise: float = 0.0, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> Comparison:
    """`compare` over the rounds that both have; they must be of one case of one run."""
    times_a, times_b = (dict(zip(zip(s.block, s.round, strict=True), s.seconds, strict=True)) for s in (a, b))
    shared = sorted(times_a.keys() & times_b.keys())
    return compare(
        [times_a[place] for place in shared],
        [times_b[place] for place in shared],
        blocks=[block for block, _ in shared],
        floor=noise,
        margin=margin,
        confidence=confidence,
    )
