"""Times of recorded runs, as a decision between launches of an engine needs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import kernels
from harness.errors import UsageError
from harness.results.read import RecordedRun, read, run_folders
from harness.results.schema import Cell, PlannedCase, Run
from shapes.case import Size, text_of

BOUNDARIES = ("with_quant", "core", "with_routing")
"""The most telling first: engines quantise in each step, and routing is no part of the chosen row."""
LAUNCH_MODES = ("graph", "eager")
"""The first in which the default has a time counts: engines decode in graphs."""
SERVING = "serving"  # the cache mode of times that are compared where any run has it
CaseKey = tuple[str, str]  # the op and the sizes as text, without the boundary


@dataclass(frozen=True)
class Row:
    """An implementation that a run timed in a case."""

    cell: Cell
    variables: Mapping[str, str | None]  # of its setting; None: not set

    @property
    def us(self) -> float:
        assert self.cell.time_us
        return self.cell.time_us


@dataclass(frozen=True)
class Sheet:
    """A case as one run measured it. Its rows were timed in the same rounds."""

    folder: Path
    suite: str
    case: PlannedCase
    rows: Sequence[Row]
    untimed: Mapping[str, str]  # implementation -> why it has no time
    varied: frozenset[str]  # the variables that the run's settings set
    noise: float

    def find(self, name: str, settings: Mapping[str, str], mode: str) -> Row | None:
        """The row of an implementation in a launch mode whose varied variables are those of the settings."""
        for row in [row for row in self.rows if row.cell.impl == name and row.cell.launch == mode]:
            if all(row.variables.get(variable) == settings.get(variable) for variable in self.varied):
                return row
        return None


@dataclass(frozen=True)
class Measured:
    """What runs of one machine measured."""

    sheets: Mapping[CaseKey, Sequence[Sheet]]  # by BOUNDARIES in order; of a boundary the newest run first
    device: str
    arch: str
    folders: Sequence[Path]
    notes: Sequence[str]

    @property
    def settings(self) -> list[dict[str, str]]:
        """The settings that the runs measured, each without the variables that it leaves unset."""
        measured: list[dict[str, str]] = []
        for sheet in chain.from_iterable(self.sheets.values()):
            for row in sheet.rows:
                variables = {name: value for name, value in row.variables.items() if value is not None}
                if variables and variables not in measured:
                    measured.append(variables)
        return measured


def read_measured(paths: Sequence[str]) -> Measured:
    """Raises UsageError for a run that cannot be read, for several machines, and where there are no times."""
    folders = list(dict.fromkeys(folder for path in paths for folder in run_folders(path)))
    recorded_runs = [read(str(folder)) for folder in folders]
    cache_modes = [recorded.run.cache for recorded in recorded_runs] or [SERVING]
    cache = SERVING if SERVING in cache_modes else cache_modes[0]
    sheets: dict[CaseKey, list[Sheet]] = {}
    devices: dict[tuple[str, str], Path] = {}
    notes = [] if cache == SERVING else [f"times are of {cache} caches, which no server has"]
    for recorded in recorded_runs:
        if why := _unfit(recorded.run, cache):
            notes.append(f"{recorded.folder} {why}: not used")
            continue
        device = str(recorded.run.provenance.get("machine", {}).get("device", ""))
        for case in recorded.run.cases:
            cells = [cell for cell in recorded.cells.values() if cell.case == case.key]
            if any(cell.time_us for cell in cells):
                devices.setdefault((device, cells[0].arch), recorded.folder)
                sheets.setdefault((case.op, text_of(case.sizes)), []).append(_sheet(recorded, case, cells))
    if len(devices) > 1:
        machines = "; ".join(f"{device} {arch} ({folder})" for (device, arch), folder in devices.items())
        raise UsageError(f"the runs are of several machines: {machines}; give those of one")
    if not devices:
        raise UsageError(f"no row of {', '.join(paths)} has a time")
    ((device, arch),) = devices
    in_several = [key for key, of_case in sheets.items() if len({sheet.folder for sheet in of_case}) > 1]
    if in_several:
        notes.append(f"cases in several runs: {len(in_several)}; the newest run that has both rows counts")
    created = {recorded.folder: recorded.run.created for recorded in recorded_runs}
    for of_case in sheets.values():
        of_case.sort(key=lambda sheet: created[sheet.folder], reverse=True)
        of_case.sort(key=lambda sheet: BOUNDARIES.index(sheet.case.boundary))  # keeps this order within each
    return Measured(sheets, device, arch, folders, notes)


def _sheet(recorded: RecordedRun, case: PlannedCase, cells: Sequence[Cell]) -> Sheet:
    """The cells of a case, without those with a configuration of the user's: no engine takes it by itself."""
    settings = recorded.run.settings
    timed = [cell for cell in cells if cell.time_us and cell.samples.seconds and cell.config is None]
    rows = [Row(cell, settings.get(cell.setting, {})) for cell in timed]
    untimed = {cell.impl: f"{cell.status}: {cell.reason}".rstrip(": ") for cell in cells if not cell.time_us}
    varied = frozenset(name for variables in settings.values() for name in variables)
    noise = recorded.noises.get(case.key, math.inf)
    return Sheet(recorded.folder, recorded.run.suite, case, rows, untimed, varied, noise)


def _unfit(run: Run, cache: str) -> str:
    """Why a run is not used; empty where it is. cache: the cache mode of the runs that are used"""
    if run.trees:
        return "compares revisions"
    if run.op not in kernels.OPS:
        return f"is of {run.op}, which no engine's rules name"
    if run.cache != cache:
        return f"has {run.cache} caches, others {cache}"
    return ""


def whole_sizes(op: str, sizes: Mapping[str, Size], arch: str) -> Mapping[str, Size]:
    """The sizes, with the usual values of sizes that are left out."""
    return kernels.OPS[op].case({**kernels.OPS[op].defaults(arch), **sizes}).sizes
