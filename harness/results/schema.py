"""Record format: what a run folder holds. Versioned; readers refuse what is newer than they are."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from harness.plan.entry import ConfigSearch, Status, entry_name
from harness.statistics.multiple import About
from harness.statistics.paired import MARGIN, Comparison, VerdictName
from harness.timing.rounds import Disturbed

# 1 had no samples in verdicts; 2 no disturbed rounds and no launch times; 3 no races, one setting; 4 no
# phases,
# and no disturbed rounds that count as there are no quiet ones; 5 no devices of a cluster.
SCHEMA = 6


KEYS = {"setting": "arm", "settings": "arms", "noise": "floor", "eliminations": "heats"}
"""Attributes that have another name in files and in `--json`: the one that their first readers know."""


class Record(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        alias_generator=lambda name: KEYS.get(name, name),
        validate_by_name=True,
        serialize_by_alias=True,
    )


class Samples(Record):
    """Seconds per call of each round that gave a time, with its block and its number in it."""

    block: list[int] = []
    round: list[int] = []
    seconds: list[float] = []

    def add(self, others: Samples) -> None:
        self.block += others.block
        self.round += others.round
        self.seconds += others.seconds


class Cell(Record):
    """Case x implementation x setting x launch x cache on one device.

    time_us with low_us..high_us: over blocks and its interval, microseconds per call
    tflops, gbps: from the op's own count of work, each byte once
    percent_of_ceiling: of what this machine was measured to reach; null where nothing was
    config: of a tunable implementation, that it was told to use; null: it chose
    check: the judge's report of every stage, the last entry the one that decided
    setup_s: preparing, JIT and the first call
    kernels, kernel_us: what ran in a call, and its own time by torch's profiler, microseconds per call; of a
        graph, in eager calls
    picked: what its library says that it chose to run, a tuned configuration say; empty where it does not
    ran: what is known of that beside the names: oneDNN's implementations, hashes of what Triton generated
    host_us: the host's time to launch a call, microseconds, the median over samples; null on a CPU
    synchronises: its calls wait for the device before they return, so that time_us holds host time
    version, source: of its library, and a hash of the suite's code around it (see source_hash.py)
    pinned: the CPU that each of its threads is bound to, or why none is
    samples: of the baseline, where memory splits a case into groups, those of every group; its time is that
        of the first
    eliminations: of the rounds of a race that chose who went on: no verdict rests on them, and a time only
    of who was beaten in them
    """

    kind: Literal["cell"] = "cell"
    op: str
    case: str
    boundary: str
    impl: str
    platform: str
    arch: str
    setting: str
    launch: str
    cache: str
    status: Status
    reason: str = ""
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    percent_of_ceiling: float | None = None
    check: dict[str, Any] = {}
    kernels: list[str] = []
    kernel_us: list[float] = []
    picked: str = ""
    ran: list[str] = []
    host_us: float | None = None
    synchronises: bool = False
    config: dict[str, Any] | None = None
    setup_s: float | None = None
    pinned: list[int] | str = ""
    place: str = ""
    weight: float = 0.0
    version: str = ""
    source: str = ""
    rotation: dict[str, Any] = {}
    samples: Samples = Field(default_factory=Samples)
    eliminations: Samples = Field(default_factory=Samples)

    @property
    def name(self) -> str:
        return entry_name(self.impl, self.setting, self.launch, self.platform, self.config)


class Verdict(Record):
    """ratio = time(b) / time(a), so > 1 means that a is faster, and the verdict is a's.

    about: against the baseline, the winner against the runner-up, or the A/A pair
    confidence, noise, margin: with which `harness.statistics.compare` gives this verdict from the samples;
        the confidence is adjusted so that the verdicts of a case hold together; no noise: infinite
    samples: of the baseline's rerun, in an A/A pair; all others are in the cells
    """

    kind: Literal["verdict"] = "verdict"
    case: str
    a: str
    b: str
    ratio: float | None
    low: float | None
    high: float | None
    noise: float | None
    margin: float = MARGIN
    verdict: VerdictName
    confidence: float
    about: About
    samples: Samples = Field(default_factory=Samples)

    @property
    def comparison(self) -> Comparison:
        """Where nothing stands for what is not finite."""
        if self.ratio is None or self.low is None or self.high is None:
            return Comparison(math.nan, 0.0, math.inf, self.verdict)
        return Comparison(self.ratio, self.low, self.high, self.verdict)


class DisturbedRound(Record):
    """counted: whether its times are in the cells' samples; otherwise `seconds` holds them, by entry, and
    no statistic does."""

    block: int
    round: int
    reason: str
    counted: bool
    seconds: dict[str, float] = {}


class CaseDone(Record):
    """Ends a case in the journal: without it the case counts as unfinished.

    eliminations:      rounds of a race's eliminations, which are not among `rounds`
    stopped:    why measuring ended, in the words of `harness.timing.rounds.Rounds`
    disturbed:  rounds during which something else used the machine, or slowed it
    conditions: clocks, temperature, power, other processes' share ... as the rounds saw them, or why not; one
                entry for each group of entries that memory holds at once
    phases:     seconds of `setup_s` by what they were spent on
    entries:    of a race, how its configurations were found
    device:     that measured it, by its name in a DeviceUsed; empty where the run's own did
    """

    kind: Literal["case"] = "case"
    case: str
    device: str = ""
    measured_s: float
    setup_s: float
    rounds: int
    blocks: int
    eliminations: int = 0
    stopped: str
    disturbed: list[DisturbedRound] = []
    conditions: list[dict[str, Any]] = []
    phases: dict[str, float] = {}
    entries: ConfigSearch | None = None

    @property
    def nameless(self) -> CaseDone:
        """To be shown where one device measured all: its name would say nothing."""
        return self.model_copy(update={"device": ""})

    @field_validator("entries", mode="before")
    @classmethod
    def _no_search(cls, value: object) -> object:
        """Written as {} where there was none."""
        if not isinstance(value, dict) or not value:
            return value or None
        return {"baseline" if key == "anchor" else key: found for key, found in value.items()}

    @field_serializer("entries")
    def _search_or_empty(self, entries: ConfigSearch | None) -> dict[str, Any]:
        found = asdict(entries) if entries else {}
        return {"anchor" if key == "baseline" else key: value for key, value in found.items()}


class DeviceUsed(Record):
    """One of several devices that a run was measured on, written before its first case of the run.

    name: of the host and the device on it; of a CPU, of those cores that it was given
    type: of device, as its cluster calls it
    """

    kind: Literal["device"] = "device"
    name: str
    type: str
    host: str
    uuid: str = ""
    cpus: list[int] = []

    @property
    def identity(self) -> str:
        """What stays where its host is called otherwise."""
        return self.uuid or self.name


class Calibration(Record):
    """What each device of a type measured of the same case with the same implementation.

    when: before all other cases (`first`), or after them
    time_us with low_us..high_us: as in Cell
    """

    kind: Literal["calibration"] = "calibration"
    device: str
    type: str
    when: Literal["first", "last"]
    case: str
    impl: str
    time_us: float
    low_us: float
    high_us: float


class PlannedCase(Record):
    op: str
    sizes: dict[str, int | str]
    boundary: str
    place: str
    weight: float
    key: str


class RaceSettings(Record):
    """keep: configurations that the estimate leaves in a race; folder: of the winners"""

    keep: int
    folder: str


class Run(Record):
    """What a command set out to do, and on what; written once, before anything is measured.

    settings, flags: the settings by name, the first being what others are compared with; the flags that they
    differ in, by their values (null: not set)
    trees: of settings that are revisions, their commits
    busy: what else used the device then
    race: of a race of configurations only
    """

    schema_version: int = SCHEMA
    id: str
    created: str
    command: list[str]
    op: str
    suite: str
    cases: list[PlannedCase]
    implementations: list[str]
    baseline: str
    settings: dict[str, dict[str, str | None]]
    flags: dict[str, list[str | None]] = {}
    trees: dict[str, str] = {}
    launches: list[str]
    cache: str
    budget_s: float
    per_case_s: float
    seed: int
    confidence: float
    margin: float = MARGIN
    disturbed: Disturbed = "refuse"
    race: RaceSettings | None = None
    busy: list[str] = []
    ceilings: dict[str, Any]
    provenance: dict[str, Any]

    @field_validator("disturbed", mode="before")
    @classmethod
    def _drop(cls, value: object) -> object:
        """As schema 4 called it."""
        return "refuse" if value == "drop" else value

    @property
    def threads(self) -> int:
        """Of each worker, on a CPU."""
        return int(self.provenance["machine"]["threads"])

    @property
    def contrast(self) -> Literal["implementations", "settings"]:
        """What is compared with each other: implementations, or the settings of each implementation."""
        return "settings" if self.flags or self.trees else "implementations"
