"""The record format of a run folder, and of `doctor --json`. It has a version; readers refuse newer ones."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from harness.plan.entry import ConfigSearch, Status, entry_name
from harness.statistics.multiple import About
from harness.statistics.paired import MARGIN, Comparison, VerdictName
from harness.timing.rounds import Disturbed

SCHEMA = 6
"""Version 1 had no samples in verdicts; 2 no disturbed rounds and no launch times; 3 no races and only one
setting; 4 no phases, and no disturbed rounds that count because none are quiet; 5 no devices of a cluster."""

KEYS = {"setting": "arm", "settings": "arms", "noise": "floor", "eliminations": "heats", "search": "entries"}
"""Attribute -> its older name in files and in `--json`. Programs rely on the older names."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=lambda name: KEYS.get(name, name),
                              validate_by_name=True, serialize_by_alias=True)  # fmt: skip


class Samples(Record):
    """The samples of an entry, as columns: a sample's block, its round's number, and seconds per call."""

    block: list[int] = []
    round: list[int] = []
    seconds: list[float] = []

    @property
    def by_round(self) -> dict[tuple[int, int], float]:
        """Seconds per call by block and round."""
        return dict(zip(zip(self.block, self.round, strict=True), self.seconds, strict=True))

    def add(self, others: Samples) -> None:
        self.block += others.block
        self.round += others.round
        self.seconds += others.seconds


class Cell(Record):
    """The result of an implementation under a setting in a launch mode, in one case and cache mode."""

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
    time_us: float | None = None  # microseconds per call, over blocks; its interval is low_us to high_us
    low_us: float | None = None
    high_us: float | None = None
    tflops: float | None = None  # from the operations that the op counts for a call
    gbps: float | None = None  # 10^9 bytes per second, from the op's count, which has each byte once
    percent_of_ceiling: float | None = None  # of the machine's measured limit; null where none was measured
    check: dict[str, Any] = {}
    """The judge's report of the stage that failed, or else of the last stage that compared whole outputs;
    with `calls`, `differed` and `distance` (see bench.Bench.compared) and `far`."""
    kernels: list[str] = []  # the names of the kernels that ran in a call; for a graph those of an eager call
    kernel_us: list[float] = []  # the time of each kernel by torch's profiler, in microseconds per call
    picked: str = ""  # what the library says that it chose to run, such as a tuned configuration
    ran: list[str] = []  # what else ran: oneDNN's implementations, hashes of the code that Triton generated
    host_us: float | None = None  # the median time of launching a call, in microseconds; null on a CPU
    synchronises: bool = False  # calls wait for the device, so that time_us includes time of the host
    config: dict[str, Any] | None = None  # the configuration that was set; null: the implementation chose
    setup_s: float | None = None  # seconds for preparing, JIT and the first call
    pinned: list[int] | str = ""  # the CPU that each thread is bound to, or why threads are not bound
    place: str = ""
    weight: float = 0.0
    version: str = ""  # the version of the library
    source: str = ""  # a hash of the suite's code around the library (see workers/child/profile.py)
    rotation: dict[str, Any] = {}  # the copies of operands that calls took in turn
    samples: Samples = Field(default_factory=Samples)  # the baseline's are from every group of entries
    eliminations: Samples = Field(default_factory=Samples)
    """Samples of the rounds in which a race eliminated configurations; only times of these rest on them."""

    @property
    def name(self) -> str:
        return entry_name(self.impl, self.setting, self.launch, self.platform, self.config)


class Verdict(Record):
    """A comparison of the cells named a and b, as `harness.statistics.compare` gives it from their samples at
    this confidence, noise and margin. ratio = time(b) / time(a): > 1 means that a is faster, and the verdict
    is about a."""

    kind: Literal["verdict"] = "verdict"
    case: str
    a: str
    b: str
    ratio: float | None
    low: float | None
    high: float | None
    noise: float | None  # null: infinite
    margin: float = MARGIN
    verdict: VerdictName
    confidence: float  # adjusted so that the verdicts of a case hold together
    about: About  # whether b is the baseline, or the runner-up of the fastest row, or a is the rerun of b
    samples: Samples = Field(default_factory=Samples)  # of the rerun of an A/A pair; cells have the others

    @property
    def comparison(self) -> Comparison:
        """The record has null for what JSON cannot hold: infinite ends, and a ratio that is no number."""
        if self.ratio is None or self.low is None or self.high is None:
            return Comparison(math.nan, 0.0, math.inf, self.verdict)
        return Comparison(self.ratio, self.low, self.high, self.verdict)


class DisturbedRound(Record):
    block: int
    round: int
    reason: str
    counted: bool  # whether its times are in the samples of the cells and count
    seconds: dict[str, float] = {}  # the times by entry where they do not count


class CaseDone(Record):
    """Ends a case in the journal: a case without it is unfinished."""

    kind: Literal["case"] = "case"
    case: str
    device: str = ""  # the name of a DeviceUsed that measured it; empty: the run's own machine
    measured_s: float
    setup_s: float
    rounds: int
    blocks: int
    eliminations: int = 0  # rounds in which a race eliminated configurations; they are not among `rounds`
    stopped: str  # why measuring ended, in the words of `harness.timing.rounds.Rounds`
    disturbed: list[DisturbedRound] = []  # rounds during which something else used the machine, or slowed it
    conditions: list[dict[str, Any]] = []
    """For each group of entries that memory holds at once: what the monitor read in its rounds (clocks,
    power, other processes' share of the CPU and so on), or why it did not."""
    phases: dict[str, float] = {}  # the parts of `setup_s`, in seconds
    search: ConfigSearch | None = None  # how the configurations of a race were found

    @property
    def nameless(self) -> CaseDone:
        """A copy without the name of the device, for a run of which one device measured every case."""
        return self.model_copy(update={"device": ""})

    @field_validator("search", mode="before")
    @classmethod
    def _read_search(cls, value: object) -> object:
        """Files have {} for None, and an older name for `baseline`."""
        if value == {}:
            return None
        if not isinstance(value, dict):
            return value
        return {"baseline" if key == "anchor" else key: fact for key, fact in value.items()}

    @field_serializer("search")
    def _written_search(self, search: ConfigSearch | None) -> dict[str, Any]:
        facts = asdict(search) if search else {}
        return {"anchor" if key == "baseline" else key: fact for key, fact in facts.items()}


class DeviceUsed(Record):
    """One of several devices that measured a run; written before the first case that it measured."""

    kind: Literal["device"] = "device"
    name: str  # the host and the device on it; for a CPU the cores that it was given
    type: str  # the cluster's name for this kind of device
    host: str
    uuid: str = ""
    cpus: list[int] = []

    @property
    def identity(self) -> str:
        """The unique id where there is one: it stays the same when the host gets another name."""
        return self.uuid or self.name


class Calibration(Record):
    """The time of a device for a case that all devices of its type measure with the same implementation, to
    compare them. Times are as in Cell."""

    kind: Literal["calibration"] = "calibration"
    device: str
    type: str
    when: Literal["first", "last"]  # before all other cases, or after them
    case: str
    impl: str
    time_us: float
    low_us: float
    high_us: float


class PlannedCase(Record):
    op: str
    sizes: dict[str, int | str]
    boundary: str
    place: str  # the place in its model, or `ad hoc`
    weight: float  # the share of the suite
    key: str  # the text that stands for the case in other records


class RaceSettings(Record):
    keep: int  # at most how many configurations are raced in a case, without the baseline
    folder: str  # where the winners are stored


class Run(Record):
    """What a command is going to measure, and on which machine; written once, before anything is measured."""

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
    """By name the variables that a setting sets (null: not set). The others are compared with the first."""
    flags: dict[str, list[str | None]] = {}  # the variables in which the settings differ, with their values
    trees: dict[str, str] = {}  # by name the commit of each setting that is a revision
    launches: list[str]
    cache: str
    budget_s: float  # for the whole run
    per_case_s: float  # the least seconds of the budget that a case gets if it is begun
    seed: int
    confidence: float
    margin: float = MARGIN
    disturbed: Disturbed = "refuse"
    race: RaceSettings | None = None  # only where configurations raced
    busy: list[str] = []  # what else used the device as the run began
    ceilings: dict[str, Any]  # the best rates that were measured here, see catalogue.devices.Ceilings
    provenance: dict[str, Any]  # the machine, versions, the commit and the environment

    @field_validator("disturbed", mode="before")
    @classmethod
    def _read_disturbed(cls, value: object) -> object:
        """Schema 4 called `refuse` `drop`."""
        return "refuse" if value == "drop" else value

    @property
    def threads(self) -> int:
        """Threads of each worker, on a CPU."""
        return int(self.provenance["machine"]["threads"])

    @property
    def first_setting(self) -> str:
        """The name of the setting that the others are compared with."""
        return next(iter(self.settings))

    @property
    def contrast(self) -> Literal["implementations", "settings"]:
        """Whether implementations are compared with each other, or the settings of each implementation."""
        return "settings" if self.flags or self.trees else "implementations"
