"""Recorded run: its cells, noises and clocks, and whether two runs may be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.results.journal import Journal
from harness.results.read import run_folders
from harness.results.schema import CaseDone, Cell, DeviceUsed, Record, Run, Verdict
from harness.results.spread import Spread, spreads
from harness.statistics.paired import noise_of

MACHINE = ("platform", "arch", "device", "threads", "driver")
TERMS = ("op", "cache", "seed")
CLOCKS = ("sm_clock_mhz", "gfx_clock_mhz", "frequency_mhz")
CLOCKS_APART = 0.03


@dataclass(frozen=True)
class RecordedRun:
    """A run with its records.

    devices: that measured each case, where that is known: of several, or the only one if its driver names it
    spreads: of the devices that were calibrated, by their names in `identities`
    """

    folder: Path
    run: Run
    cells: dict[tuple[str, str], Cell]
    noises: dict[str, float]
    clocks: dict[str, float]
    devices: dict[str, DeviceUsed]
    spreads: list[Spread]
    identities: dict[str, str]

    @property
    def commit(self) -> str:
        git = self.run.provenance.get("git", {})
        return f"{git.get('commit', '')[:9] or 'unknown'}{'+' * bool(git.get('dirty'))}"


def read(path: str) -> RecordedRun:
    """Raises UsageError where there is no run, or more than one."""
    folders = run_folders(path)
    if len(folders) > 1:
        raise UsageError(f"{path!r} holds {len(folders)} runs; name one: {folders[0]}, {folders[1]} ...")
    journal = Journal(folders[0])
    records = [r for case in journal.finished().values() for r in case]
    run, used = journal.run(), journal.devices()
    return RecordedRun(
        folder=folders[0],
        run=run,
        cells={(c.case, c.name): c for c in records if isinstance(c, Cell)},
        noises=_noises(records),
        clocks=_clocks(records),
        devices=_devices(records, run, used),
        spreads=spreads(journal.calibrations()),
        identities={device.name: device.identity for device in used},
    )


def _noises(records: Iterable[Record]) -> dict[str, float]:
    noises: dict[str, float] = {}
    for v in records:
        if isinstance(v, Verdict) and v.about == "A/A":
            noises[v.case] = max(noises.get(v.case, 0.0), noise_of(v.comparison))
    return noises


def _devices(records: Iterable[Record], run: Run, used: Iterable[DeviceUsed]) -> dict[str, DeviceUsed]:
    by_name = {device.name: device for device in used}
    machine = run.provenance.get("machine", {})
    if not by_name and (uuid := machine.get("uuid")):
        host = str(machine.get("host", ""))
        by_name[""] = DeviceUsed(name=f"{host}/{uuid}", type="", host=host, uuid=uuid)
    done = [record for record in records if isinstance(record, CaseDone)]
    return {record.case: by_name[record.device] for record in done if record.device in by_name}


def _clocks(records: Iterable[Record]) -> dict[str, float]:
    """Medians over cases of those clocks that were read."""
    seen: dict[str, list[float]] = {}
    for record in records:
        for conditions in getattr(record, "conditions", []):
            for name in CLOCKS:
                if reading := conditions.get(name):
                    seen.setdefault(name, []).append(reading["median"])
    return {name: statistics.median(values) for name, values in seen.items()}


def incompatibilities(a: RecordedRun, b: RecordedRun) -> list[str]:
    """Why the two cannot be compared, in words; empty if they can."""
    of_a, of_b = (run.run.provenance.get("machine", {}) for run in (a, b))
    reasons = [
        _differ(name, of_a.get(name), of_b.get(name)) for name in MACHINE if of_a.get(name) != of_b.get(name)
    ]
    reasons += [
        _differ(name, getattr(a.run, name), getattr(b.run, name))
        for name in TERMS
        if getattr(a.run, name) != getattr(b.run, name)
    ]
    if a.run.settings != b.run.settings:
        reasons.append(_differ("settings", "; ".join(a.run.settings), "; ".join(b.run.settings)))
    for name in a.clocks.keys() & b.clocks.keys():
        if abs(math.log(a.clocks[name] / b.clocks[name])) > CLOCKS_APART:
            reasons.append(_differ(name, f"{a.clocks[name]:.0f}", f"{b.clocks[name]:.0f}"))
    return reasons


def _differ(name: str, a: object, b: object) -> str:
    of_a, of_b = ("unknown" if value in (None, "") else value for value in (a, b))
    return f"{name} differs: {of_a} and {of_b}"


def other_devices(a: RecordedRun, b: RecordedRun) -> dict[str, tuple[DeviceUsed, DeviceUsed]]:
    """That of A and that of B, of each case that is known to have been measured on two."""
    return {
        case: (a.devices[case], b.devices[case])
        for case in a.devices
        if case in b.devices and a.devices[case].identity != b.devices[case].identity
    }


def differences(a: RecordedRun, b: RecordedRun) -> list[str]:
    """What else differs: it may be why a row moved."""
    notes = []
    for group in ("versions", "environment"):
        of_a, of_b = (run.run.provenance.get(group, {}) for run in (a, b))
        for name in sorted(of_a.keys() | of_b.keys()):
            if of_a.get(name) != of_b.get(name):
                notes.append(_differ(name, of_a.get(name), of_b.get(name)))
    if a.run.schema_version != b.run.schema_version:
        notes.append(_differ("schema of the record", a.run.schema_version, b.run.schema_version))
    if a.run.suite != b.run.suite:
        notes.append(_differ("suite", a.run.suite, b.run.suite))
    if moved := other_devices(a, b):
        (case, (of_a, of_b)), *_ = moved.items()
        others = f" and {len(moved) - 1} more of the cases" * (len(moved) > 1)
        notes.append(f"{_differ('device', of_a.name, of_b.name)} at {case}{others}")
    for run in (a, b):
        if run.run.provenance.get("git", {}).get("dirty"):
            notes.append(f"{run.folder} was measured from a checkout with changes that no commit holds")
    return notes
