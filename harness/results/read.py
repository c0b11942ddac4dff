"""Reads recorded runs, as one table of cells or as one run with its records; writes them as JSON and CSV."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from harness import archive
from harness.errors import UsageError
from harness.files import write
from harness.results.journal import Journal
from harness.results.schema import KEYS, Calibration, CaseDone, Cell, DeviceUsed, Record, Run, Verdict
from harness.statistics.paired import noise_of
from shapes.names import near

if TYPE_CHECKING:
    import pandas


WHERE = ("run", "suite", "machine", "device", "host")  # the first columns of `load`; those of the cell follow
CLOCKS = ("sm_clock_mhz", "gfx_clock_mhz", "frequency_mhz")
"""The clocks that monitors record of NVIDIA GPUs, AMD GPUs and CPUs."""

CellKey = tuple[str, str]  # the case and the name of a cell


def run_folders(path_or_glob: str | Path) -> list[Path]:
    """The run folders at a path (a run, one of its files, or a folder above runs), or those that match a glob
    pattern. Raises UsageError where there is none."""
    text = str(path_or_glob)
    path = Path(text)
    is_there = archive.is_folder(path) or archive.is_file(path)
    matches = [text] if is_there else sorted(glob(text, recursive=True))  # noqa: PTH207
    folders: list[Path] = []
    for match in map(Path, matches):
        folder = match if archive.is_folder(match) else match.parent
        if archive.is_file(folder / "run.json"):
            folders.append(folder)
        elif folder == match:  # only a folder stands for the runs below it, not a file that is of no run
            folders += [file.parent for file in archive.below(folder, "run.json")]
    if not folders:
        neighbours = [] if path.exists() else [folder.name for folder in path.parent.glob("*/")]
        similar = near(path.name, neighbours)
        hint = f"did you mean {path.parent / similar[0]}? " if similar else ""
        raise UsageError(f"no run at {text!r}; {hint}a run is a folder with run.json and cells.jsonl")
    return list(dict.fromkeys(folders))


def load(path_or_glob: str | Path) -> pandas.DataFrame:
    """One row for each cell of every finished case, with the run and the machine that it was measured on.

    Columns: those in WHERE, then the attributes of Cell under the names that files use for them, see KEYS.
    The column `device` is empty where one machine measured the whole run. Raises UsageError where there is no
    run, one cannot be read, or its schema is newer than this version of the suite.
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
            values = (run.id, run.suite, machine.get("device", ""), device, hosts.get(device, ""))
            where = dict(zip(WHERE, values, strict=True))
            rows += [where | record.model_dump() for record in records if isinstance(record, Cell)]
    columns = [*WHERE, *(KEYS.get(name, name) for name in Cell.model_fields if name != "kind")]
    return pandas.DataFrame(rows, columns=columns)


@dataclass(frozen=True)
class RecordedRun:
    folder: Path
    run: Run
    cells: dict[CellKey, Cell]
    noises: dict[str, float]  # by case the largest noise that its A/A pairs show, see `noise_of`
    clocks: dict[str, float]  # by the name of a clock (see CLOCKS) its median over all cases, in MHz
    devices: dict[str, DeviceUsed]  # by case the device that measured it, where its name or id is known
    identities: dict[str, str]  # by the name of each device that was used its DeviceUsed.identity
    calibrations: list[Calibration]

    @property
    def commit(self) -> str:
        """The first digits of the commit, with `+` where the checkout had changes."""
        git = self.run.provenance.get("git", {})
        return (git.get("commit", "")[:9] or "unknown") + ("+" if git.get("dirty") else "")


def read(path: str) -> RecordedRun:
    """The run at a path. Raises UsageError where there is no run, or more than one, or it cannot be read."""
    folders = run_folders(path)
    if len(folders) > 1:
        raise UsageError(f"{path!r} holds {len(folders)} runs; name one: {folders[0]}, {folders[1]} ...")
    journal = Journal(folders[0])
    run = journal.run()
    used = journal.devices()
    by_name = {device.name: device for device in used}
    machine = run.provenance.get("machine", {})
    uuid = machine.get("uuid")
    if uuid and not used:  # the cases of a run on one machine name no device
        host = str(machine.get("host", ""))
        by_name[""] = DeviceUsed(name=f"{host}/{uuid}", type="", host=host, uuid=uuid)
    cells: dict[CellKey, Cell] = {}
    noises: dict[str, float] = {}
    devices: dict[str, DeviceUsed] = {}
    clocks = defaultdict[str, list[float]](list)
    for record in itertools.chain.from_iterable(journal.finished().values()):
        if isinstance(record, Cell):
            cells[record.case, record.name] = record
        elif isinstance(record, Verdict) and record.about == "A/A":
            noises[record.case] = max(noises.get(record.case, 0.0), noise_of(record.comparison))
        elif isinstance(record, CaseDone):
            if record.device in by_name:
                devices[record.case] = by_name[record.device]
            for clock, conditions in itertools.product(CLOCKS, record.conditions):
                if reading := conditions.get(clock):
                    clocks[clock].append(reading["median"])
    return RecordedRun(
        folder=folders[0], run=run, cells=cells, noises=noises,
        clocks={name: statistics.median(values) for name, values in clocks.items()}, devices=devices,
        identities={device.name: device.identity for device in used}, calibrations=journal.calibrations(),
    )  # fmt: skip


def write_outputs(json_to: str | None, csv_to: str | None, run: Run, records: Sequence[Record]) -> None:
    """Writes the files of `--json` and `--csv`, or to stdout for `-`. Raises UsageError where it cannot."""
    recorded = "; the run itself is recorded"  # ends the message of the error
    cells = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Cell)]
    if json_to:
        verdicts = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Verdict)]
        whole = {"run": run.model_dump(), "cells": cells, "verdicts": verdicts}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n", recorded)
    if csv_to:
        import pandas

        columns = [KEYS.get(name, name) for name in Cell.model_fields if name not in ("kind", "samples")]
        write(csv_to, pandas.DataFrame(cells, columns=columns).to_csv(index=False), recorded)
